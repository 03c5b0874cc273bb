"""Metrics of worker processes, scraped from another process as vLLM's API server would."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from vitgraph.graphs.vllm_plugin import metrics

WORKER = """
    import sys, time
    from vitgraph.graphs.vllm_plugin.metrics import TowerMetrics
    counted = TowerMetrics(on_gpu=False)
    for _ in range(int(sys.argv[1])):
        counted.start_replay(2, 60, 64)
        counted.end_replay()
    counted.start_replay(1, 65, 128)
    time.sleep(0.05)
    counted.end_replay()
    with counted.eager(3, "too_large"):
        time.sleep(0.05)
"""
# As vLLM's API server: plugins are loaded late, and prometheus_client long before.
SERVER = """
    import os, subprocess, sys
    import prometheus_client
    from vitgraph.graphs.vllm_plugin.metrics import publish
    publish()
    publish()
    before = prometheus_client.generate_latest().decode()
    assert "vitgraph" not in before, before
    for replays in sys.argv[2:]:
        subprocess.run([sys.executable, "-c", sys.argv[1], replays], check=True)
    print(os.environ.get("VITGRAPH_METRICS_DIR"))
    print(prometheus_client.generate_latest().decode())
"""


def run(code: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={k: v for k, v in os.environ.items() if k not in (metrics.SHARED, metrics.OURS)}
        | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(value, seconds_from: float) -> None:
    """What two workers with three and one small replays have done."""
    expected = {
        ("items", "served", "graph"): 10,
        ("items", "served", "eager"): 6,
        ("misses", "reason", "too_large"): 6,
        ("replays", "budget", "64"): 4,
        ("replays", "budget", "128"): 2,
        ("replayed_items", "budget", "64"): 8,
        ("tokens", "budget", "64"): 240,
        ("tokens", "budget", "128"): 130,
        ("capacity_tokens", "budget", "64"): 256,
        ("capacity_tokens", "budget", "128"): 256,
    }
    assert {key: value(*key) for key in expected} == expected
    for served in ("graph", "eager"):
        assert seconds_from <= value("seconds", "served", served) < 10


def test_workers_are_seen_on_the_servers_registry() -> None:
    folder, _, text = run(SERVER, textwrap.dedent(WORKER), "3", "1").partition("\n")
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if "vitgraph" in line)

    def value(family: str, label: str, of: str) -> float:
        labels = ",".join(sorted([f'{label}="{of}"', 'encoder="vision"']))
        return float(samples[f"vitgraph_encoder_{family}_total{{{labels}}}"])

    check(value, 0.1)
    assert "# TYPE vitgraph_encoder_items_total counter" in text
    assert "# HELP vitgraph_encoder_misses_total Items that ran eagerly, by reason." in text
    assert "python_info" in text  # and what the registry had is still there
    assert not Path(folder).exists()  # once the server has gone


def test_a_folder_that_vllm_reads(tmp_path) -> None:
    """With several API servers vLLM sets PROMETHEUS_MULTIPROC_DIR and collects by itself."""
    folder = {metrics.SHARED: str(tmp_path)}
    said = run(SERVER, textwrap.dedent(WORKER), "3", "1", **folder)
    assert said.splitlines()[0] == "None"
    assert "vitgraph" not in said  # of the registry, which nobody serves: nothing twice
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))

    def value(family: str, label: str, of: str) -> float | None:
        labels = {"encoder": "vision", label: of}
        return registry.get_sample_value(f"vitgraph_encoder_{family}_total", labels)

    check(value, 0.1)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".db"] == []


def test_a_folder_set_after_the_plugin_was_loaded(tmp_path) -> None:
    """`vllm serve --api-server-count 2`: the plugin is loaded when arguments are parsed."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    run(WORKER, "1", **{metrics.OURS: str(ours), metrics.SHARED: str(theirs)})
    assert (len(list(ours.iterdir())), len(list(theirs.iterdir()))) == (0, 1)


def test_a_folder_that_went_away(tmp_path, monkeypatch) -> None:
    """vLLM's own metrics are served all the same."""
    monkeypatch.setenv(metrics.OURS, str(tmp_path / "gone"))
    registry = CollectorRegistry(auto_describe=True)
    registry.register(metrics.FolderCollector())
    assert list(registry.collect()) == []
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "counter_1.db").write_bytes(b"\x01")  # no such file can be read
    assert list(registry.collect()) == []


@pytest.fixture
def counted(tmp_path, monkeypatch):
    monkeypatch.delenv(metrics.SHARED, raising=False)
    monkeypatch.setenv(metrics.OURS, str(tmp_path))
    return metrics.TowerMetrics(on_gpu=False)


def test_without_a_folder_nothing_is_counted(monkeypatch, caplog) -> None:
    for name in (metrics.SHARED, metrics.OURS):
        monkeypatch.delenv(name, raising=False)
    idle = metrics.TowerMetrics(on_gpu=True)  # no event is made: there is no GPU here
    idle.start_replay(1, 1, 64)
    idle.end_replay()
    with idle.eager(1, "too_large"):
        pass
    assert idle.file is None
    assert caplog.text == ""


def test_without_prometheus_client(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delenv(metrics.OURS, raising=False)
    metrics.publish.__wrapped__()
    assert metrics.OURS not in os.environ


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(
        os,
        "posix_fallocate",
        lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    monkeypatch.delenv(metrics.SHARED, raising=False)
    monkeypatch.setenv(metrics.OURS, str(tmp_path))
    assert metrics.TowerMetrics(on_gpu=False).file is None
    assert "vitgraph: no metrics: OSError: [Errno 28] No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_failure_ends_the_counting_and_nothing_else(counted, monkeypatch, caplog) -> None:
    def fail(*_) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(counted.file, "write_value", fail)
    for _ in range(2):
        counted.start_replay(1, 1, 64)
        counted.end_replay()
        with counted.eager(1, "too_large"):
            encoded = True
    assert encoded
    assert caplog.text.count("vitgraph: no metrics: RuntimeError: broken") == 1


def test_an_encoder_that_fails_is_not_counted(counted) -> None:
    with pytest.raises(ValueError, match="half a patch"), counted.eager(1, "too_large"):
        raise ValueError("half a patch")
    counted.end_replay()  # vLLM post-processes what was encoded eagerly, too
    assert counted._values == {}


def test_a_replay_whose_end_is_not_told(counted) -> None:
    """vLLM 0.20 and 0.21: counted, not timed."""
    counted.start_replay(2, 60, 64)
    counted.end_replay(timed=False)
    assert counted._values[metrics._key("items", "graph")] == 2
    assert metrics._key("seconds", "graph") not in counted._values


class Event:
    """A CUDA event whose device runs when it is told to."""

    made, clock, device = 0, 0.0, 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self) -> None:
        Event.clock += 1000
        self.at = Event.clock

    def query(self) -> bool:
        return self.at <= Event.device

    def elapsed_time(self, end: "Event") -> float:
        assert self.query() and end.query(), "an event is read before it has passed"
        return end.at - self.at


def test_seconds_of_a_gpu_are_read_when_they_have_passed(counted, monkeypatch) -> None:
    """Nothing waits for the device, and events are used again."""
    import torch

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(counted, "_on_gpu", True)
    seconds = {s: metrics._key("seconds", s) for s in ("graph", "eager")}
    for _ in range(3):
        counted.start_replay(1, 60, 64)
        counted.end_replay()
    assert seconds["graph"] not in counted._values  # the device has not started
    Event.device = 4000  # two replays have ended
    with counted.eager(1, "too_large"):
        pass
    assert counted._values[seconds["graph"]] == 2
    assert seconds["eager"] not in counted._values
    Event.device = 8000
    for _ in range(20):
        counted.start_replay(1, 60, 64)
        counted.end_replay()
        Event.device = Event.clock
    assert counted._values[seconds["graph"]] == 2 + 1 + 19
    assert counted._values[seconds["eager"]] == 1
    assert Event.made <= 8


def test_counting_is_cheap(counted) -> None:
    """A replay of the smallest image takes 2 ms; counting it must not be seen beside that."""
    counted.start_replay(1, 60, 64)
    started = time.perf_counter()
    for _ in range(1000):
        counted.start_replay(1, 60, 64)
        counted.end_replay()
    assert time.perf_counter() - started < 0.2  # 0.2 ms each, on a slow and busy machine
