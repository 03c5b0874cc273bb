"""The comparison is fair, and reports what it is given."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vitgraph.bench import replay_cost, report
from vitgraph.bench.encoder import measure, publish
from vitgraph.bench.families import build
from vitgraph.bench.limits import OutOfTime, time_limit
from vitgraph.bench.systems import Setup, System, rows
from vitgraph.bench.timing import replay_ms, time_in_turns, wall
from vitgraph.bench.workloads import Batch, make_batch
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
BATCH = Batch(torch.zeros(4, 1536), [(1, 2, 2)])


def sleeper(name: str, seconds: float, calls: list[str] | None = None) -> System:
    """Takes so long and returns one row."""

    def encode(batch: Batch) -> torch.Tensor:
        if calls is not None:
            calls.append(name)
        time.sleep(seconds)
        return torch.ones(1, 8)

    return System(name, encode)


def slowed(system: System, seconds: float) -> System:
    """The same system with a sleep in its forward: what the report must show as slower."""

    def encode(batch: Batch) -> torch.Tensor | Sequence[torch.Tensor]:
        time.sleep(seconds)
        return system.encode(batch)

    return replace(system, name=f"{system.name}, slowed by {1e3 * seconds:g} ms", encode=encode)


def test_a_slowed_system_is_reported_as_slower_by_that_amount() -> None:
    system = sleeper("vitgraph graph", 0.005)
    row, _ = measure([system, slowed(system, 0.02)], BATCH, "vitgraph graph", turns=9, seconds=60)
    plain, slow = row["systems"].values()
    assert slow["p50_ms"] - plain["p50_ms"] == pytest.approx(20, abs=3)
    assert slow["ratio"] == pytest.approx(slow["p50_ms"] / plain["p50_ms"], rel=0.2)
    assert plain["ratio"] == 1 and plain["ratio_quartiles"] == [1, 1]
    low, high = slow["ratio_quartiles"]
    assert low <= slow["ratio"] <= high


def test_a_slowed_encoder_still_equals_the_others() -> None:
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
    batch = make_batch(encoder, [(1, 4, 4)])
    (eager, graph), missing = build(Setup(encoder, budgets=(64,)), ["vitgraph"])
    assert not missing
    row, _ = measure([eager, slowed(graph, 0.05)], batch, eager.name, turns=5, seconds=60)
    one = row["systems"]["vitgraph graph, slowed by 50 ms"]
    assert not one["wrong"] and one["fill"] == 4 / 64 and one["budgets"] == [64]
    assert one["p50_ms"] > 50 and one["mean_ms"] <= one["p99_ms"]


def test_the_order_alternates_and_every_turn_has_everyone() -> None:
    calls: list[str] = []
    systems = [sleeper(name, 0, calls) for name in "abc"]
    times = time_in_turns(systems, [BATCH] * 3, CPU)
    assert "".join(calls) == "abc" + "cba" + "abc"
    assert all(len(one.total) == len(one.host) == 3 for one in times.values())


def test_time_runs_out_after_five_turns_at_the_earliest() -> None:
    times = time_in_turns([sleeper("a", 0.001)], [BATCH] * 50, CPU, seconds=0)
    assert len(times["a"].total) == 5


def test_a_limit_ends_what_runs() -> None:
    """Also where every Exception is caught; the alarm that was set before is set again."""
    started = time.perf_counter()
    with pytest.raises(OutOfTime), time_limit(0.1):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)
    assert time.perf_counter() - started < 1
    with pytest.raises(OutOfTime), time_limit(-1):
        pytest.fail("nothing starts when there is no time left")
    with time_limit(float("inf")):
        time.sleep(0.01)


def test_a_system_that_compiles_too_long_is_left_out() -> None:
    def compile_forever(batch: Batch) -> torch.Tensor:
        time.sleep(60)
        return torch.ones(1, 8)

    systems = [sleeper("vitgraph graph", 0.001), System("slow", compile_forever, compiles=True)]
    started = time.monotonic()
    row, compiling = measure(
        systems, BATCH, "vitgraph graph", turns=5, seconds=60, deadline=started + 1
    )
    assert time.monotonic() - started < 30 and 0.5 < compiling < 30
    assert list(row["systems"]) == ["vitgraph graph"] and row["turns"] >= 1


def test_what_is_not_built_in_time_is_missing() -> None:
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
    systems, missing = build(Setup(encoder, budgets=(64,)), ["vitgraph"], time.monotonic() - 1)
    assert not systems and missing == {"vitgraph": "no time left to build it"}


def test_wrong_and_failing_systems_are_named_and_not_timed(capsys, tmp_path) -> None:
    def fail(batch: Batch) -> torch.Tensor:
        raise RuntimeError("out of everything")

    systems = [
        sleeper("vitgraph graph", 0.001),
        System("off eager", lambda batch: torch.full((1, 8), 2.0)),
        System("broken eager", fail),
    ]
    row, _ = measure(systems, BATCH, "vitgraph graph", turns=5, seconds=60)
    assert "p50_ms" in row["systems"]["vitgraph graph"]
    assert not {"p50_ms", "ratio"} & {*row["systems"]["off eager"], *row["systems"]["broken eager"]}
    result = report.header(CPU) | {
        "geometry": "none",
        "dtype": "float32",
        "baseline": "vitgraph graph",
        "systems": {system.name: {"capture_s": 0.0, "memory_mib": 0.0} for system in systems},
        "workloads": {"one": row | {"floor_ms": 0.1}},
        "not_run": ["two (no time left)"],
        "compile_s": 0.0,
    }
    from rich.console import Console

    assert publish(result, tmp_path / "a.json", Console()) == 1
    printed = capsys.readouterr().out
    assert "WRONG, not timed: off eager of one is off by 1.0e+00" in printed
    assert (
        "failed: broken eager of one: out of everything" in printed and "left out: two" in printed
    )
    assert (tmp_path / "a.png").exists() and "off eager" in (tmp_path / "a.md").read_text()


def test_systems_that_are_not_installed_are_listed_with_the_reason() -> None:
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
    setup = Setup(encoder, budgets=(128, 256), attention=("sdpa", "flash_attn"))
    systems, missing = build(setup, ["vitgraph", "vllm", "transformers"])
    names = ["vitgraph sdpa eager", "vitgraph sdpa graph", "transformers eager"]
    assert [system.name for system in systems] == names
    assert "needs CUDA" in missing["vitgraph flash_attn"]
    assert set(missing) == {"vitgraph flash_attn", "vllm FLASH_ATTN", "vllm FLASHINFER"}
    assert all("No module named 'vllm'" in missing[name] for name in missing if "vllm" in name)
    batch = make_batch(encoder, [(1, 4, 4), (1, 8, 4)])
    first, *others = [rows(system.encode(batch)) for system in systems]
    for other in others:  # the weights are the same
        torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-4)


def test_wall_returns_total_and_host() -> None:
    total, host = wall(lambda: time.sleep(0.002), 5, CPU)
    assert 2 <= host <= total < 20


def test_the_time_until_a_replay_is_launched_leaves_the_replay_out(monkeypatch) -> None:
    """With graphs that stand in for a GPU's, and take their time."""
    monkeypatch.setattr(replay_cost, "EVICTED_BYTES", 1)
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
    manager = replay_cost.capture(encoder, 64, 8)
    (kept,) = manager.budget_graphs.values()
    slow = SimpleNamespace(replay=lambda: time.sleep(0.2))
    kept.graph, kept.output_buffer = slow, torch.zeros(64, encoder.config.output_width)
    taken = replay_cost.launch_ms(manager, make_batch(encoder, [(1, 4, 4)]), repeats=5)
    assert taken.keys() == {"warm", "cold"} and all(0 < ms < 200 for ms in taken.values())
    assert kept.graph is slow


def test_only_one_replay_is_timed_with_its_inputs_in_place() -> None:
    """Several packs share one input: what is there is the last one's."""
    for graphs in ([], [None], [object(), object()]):
        system = System("graph", lambda batch: [], lambda batch, g=graphs: [(64, one) for one in g])
        assert replay_ms(system, BATCH) is None
