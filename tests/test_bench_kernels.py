"""What surrounds the kernel benchmarks (`pytest bench`), without a GPU."""

import io
import json
import runpy
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor as ThreadPool
from pathlib import Path

import pytest
import torch
from rich.console import Console

from vitgraph.kernels.linear_config import SM90

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "2026-11-30-h200-kernels.json"


def pytest_bench(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "bench", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would measure")
def test_benchmarks_are_skipped_with_the_reason() -> None:
    done = pytest_bench("--compare", str(RESULT))
    assert done.returncode == 0, done.stdout
    assert "skipped" in done.stdout and "needs a CUDA GPU" in done.stdout
    assert "passed" not in done.stdout and "failed" not in done.stdout


def test_a_file_that_is_not_there_is_refused_before_anything_runs(tmp_path) -> None:
    done = pytest_bench("--compare", str(tmp_path / "none.json"))
    assert done.returncode == 4 and "none.json: " in done.stderr


@pytest.mark.parametrize("content", ["{}", "[]", '{"rows": 5}', '{"rows": [{}]}', '{"rows": []}'])
def test_a_damaged_file_is_refused_before_anything_runs(content, tmp_path) -> None:
    (path := tmp_path / "damaged.json").write_text(content)
    load = runpy.run_path(str(ROOT / "bench" / "conftest.py"))["_load"]
    with pytest.raises(pytest.UsageError, match=r"damaged\.json: no result of this"):
        load(path)
    assert load(RESULT)["path"] == RESULT


def test_the_table_shows_the_change() -> None:
    conftest = runpy.run_path(str(ROOT / "bench" / "conftest.py"))
    saved = json.loads(RESULT.read_text())
    rows = [conftest["Row"](**row) for row in saved["rows"][:2]]
    before = {rows[0].name: rows[0].median_us / 1.1}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(conftest["_table"](rows, saved, before))
    text = console.export_text()
    assert "+10.0%" in text and "new" in text and rows[0].name in text
    for part in (f"driver {saved['driver']}", f"commit {saved['commit']}", "TB/s", "quartiles"):
        assert part in text


def test_tune_linear_prints_what_it_timed_and_what_not(monkeypatch, tmp_path, capsys) -> None:
    """Its flow, with a clock and times of this test's own."""
    from vitgraph.bench import tune_linear

    gpu = types.SimpleNamespace(
        major=9, minor=0, name="a GPU", shared_memory_per_block_optin=232_448
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    every = tune_linear.candidates(gpu.shared_memory_per_block_optin, True)
    assert len(every) == len(set(every)) > 100
    found = {config.large for config in every}
    table = [(row.config.large, row.config.small) for row in SM90]
    assert {tile for tiles in table for tile in tiles if tile} <= found
    fast, wrong, slow, fails = every[:4]
    monkeypatch.setattr(tune_linear, "candidates", lambda *about: every[:4])
    monkeypatch.setattr(tune_linear, "ProcessPoolExecutor", lambda n, mp_context: ThreadPool(n))
    monkeypatch.setattr(tune_linear, "compile_one", lambda layer, c: None if c == fails else c)
    now = iter(range(100))
    monkeypatch.setattr(tune_linear.time, "monotonic", lambda: next(now))

    class Problem:
        def reference(self):
            return None

        def error(self, config, expected):
            return 1.0 if config == wrong else 1e-3

        def microseconds(self, config):
            return {fast: 10.0, slow: 30.0}.get(config, 20.0)

    monkeypatch.setattr(tune_linear.Problem, "make", lambda layer, rows: Problem())
    path = tmp_path / "tiles.json"
    arguments = ["--layers", "qkv", "--rows", "400", "8160", "--seconds", "1.5"]
    monkeypatch.setattr(sys, "argv", ["tune_linear.py", *arguments, "--save", str(path)])
    tune_linear.main()
    saved = json.loads(path.read_text())["results"]
    assert [(row["us"], row["of_table"]) for row in saved] == [
        (20.0, True),
        (10.0, False),
        (30.0, False),
    ]
    assert [row["large"] for row in saved[1:]] == [fast.large._asdict(), slow.large._asdict()]
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines() if line.strip().startswith("qkv")]
    assert [line[2] for line in lines] == ["10.0", "20.0", "30.0", "20.0"]
    assert "(table)" in lines[-1]
    assert "left out: qkv with 8160 rows (no time left of 1.5 s)" in printed


def test_tune_linear_fp8_prints_what_it_timed_and_what_failed(
    monkeypatch, tmp_path, capsys
) -> None:
    """Its flow, with errors and times of this test's own."""
    from vitgraph.bench import tune_linear_fp8

    wrong, slow, *others = tune_linear_fp8.CANDIDATES.values()
    gluon = tune_linear_fp8.HOPPER_CANDIDATES.values()

    class Problem:
        out_features, in_features = 1152, 4304

        def __init__(self, name, real, capacity):
            pass

        def layer(self):
            return ()

        def check(self, buffers, config):
            assert config != wrong, "relative error 1"

        def fp8(self, config):
            return config

        def bf16(self):
            pass

    monkeypatch.setattr(tune_linear_fp8, "Problem", Problem)
    monkeypatch.setattr(
        tune_linear_fp8,
        "microseconds",
        lambda calls: 30.0 if calls[0].keywords.get("config") == slow else 10.0,
    )
    monkeypatch.setattr(tune_linear_fp8, "hopper_tier_unavailable", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    path = tmp_path / "tiles.json"
    arguments = ["--layers", "fc2", "--rows", "8160", "--save", str(path)]
    monkeypatch.setattr(sys, "argv", ["tune_linear_fp8.py", *arguments])
    tune_linear_fp8.main()
    saved = json.loads(path.read_text())["results"]
    times = [10.0, None, 30.0, *[10.0] * (len(others) + len(gluon))]  # the first is bf16's
    assert [row["us"] for row in saved] == times
    assert {"consumers", "large"} <= {key for row in saved for key in row}
    printed = capsys.readouterr().out
    assert "relative error 1" in printed and printed.count("(table)") == 1


def test_tune_attention_times_what_is_right_and_what_is_near(monkeypatch, tmp_path, capsys) -> None:
    """Its flow, with compilations, errors and times of this test's own."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import tune_attention

    from vitgraph.kernels.attention_config import AttentionConfig

    gpu = types.SimpleNamespace(major=9, minor=0, name="a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    every = list(tune_attention.candidates())
    assert len(every) == len(set(every)) > 20
    fast, slow, wrong, spills = (AttentionConfig(64, block_n) for block_n in (16, 32, 64, 128))
    monkeypatch.setattr(tune_attention, "candidates", lambda: [fast, slow, wrong, spills])
    monkeypatch.setattr(tune_attention, "ProcessPoolExecutor", lambda n, mp_context: ThreadPool(n))

    def compile_one(arch, config):
        reason = "spills 8 bytes" if config == spills else ""
        return tune_attention.Compiled(config, programs=2, reason=reason)

    class Problem:
        def __init__(self, lengths):
            self.qkv, self.cu_seqlens = torch.zeros(4, 3, 1, 16), torch.tensor([0, 4])

        def error(self, config, expected):
            return float("inf") if config.block_n == wrong.block_n else 1e-3

        def microseconds(self, config):
            return {fast.block_n: 10.0, slow.block_n: 30.0}.get(config.block_n, 11.0)

    monkeypatch.setattr(tune_attention, "compile_one", compile_one)
    monkeypatch.setattr(tune_attention.Problem, "make", Problem)
    own = AttentionConfig(128, 16, programs_per_sm=2)
    monkeypatch.setattr(tune_attention, "portable_config", lambda *about: own)
    path = tmp_path / "tilings.json"
    arguments = ["--cases", "8x1024", "1x8160", "--all", "--save", str(path)]
    monkeypatch.setattr(sys, "argv", ["tune_attention.py", *arguments])
    tune_attention.main()
    saved = json.loads(path.read_text())["results"]
    timed = {(row["case"], row["block_n"], row["programs_per_sm"]) for row in saved}
    both = {("8x1024", n, programs) for n in (16, 32) for programs in (1, 2)}
    assert timed == both | {("1x8160", 16, 1), ("1x8160", 16, 2)}
    printed = capsys.readouterr().out
    assert printed.count("(table)") == 2 and "5 compiled, 1 of them spill or fail" in printed
    assert "wrong: 64x64" in printed
