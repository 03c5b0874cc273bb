"""bench/large_job.py, shortened: it measures whole runs, and a killed one loses nothing."""

import json
import sys

from vitgraph.bench import large_job


def test_large_job(tmp_path, monkeypatch) -> None:
    save = tmp_path / "job.json"
    monkeypatch.setattr(large_job, "SIZES", ((64, 64), (96, 64)))
    options = "--images 30 --workers 0 2 --geometry tiny --device cpu --shard-size 0"
    monkeypatch.setattr(sys, "argv", ["large_job.py", *options.split(), "--save", str(save)])
    assert large_job.main() == 0
    result = json.loads(save.read_text())
    assert [run["images"] for run in result["runs"]] == [30, 30]
    for run in result["runs"]:
        assert run["images_per_second"] > 0 and "encoding" in run["where"] and run["peak_mib"] > 100
    killed = result["killed"]
    assert killed["shards_kept"] >= 3 and killed["encoded_again"] == 30 - killed["shards_kept"]
