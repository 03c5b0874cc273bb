"""What a replay on a GPU does and does not do: nothing but copies and one graph launch."""

import copy
import random
import statistics
from dataclasses import replace

import pytest
import torch

from vitgraph.bench.exactness import relative_error
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.encoder.attention.backends import BACKENDS
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager
from vitgraph.graphs.calibration import is_measured

pytestmark = pytest.mark.gpu
# Two bf16 forwards of 24 layers that round in different places (1.2e-2 seen).
ROUNDING = 2e-2


@pytest.fixture(scope="module")
def manager() -> EncoderCudaGraphManager:
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["2b"], device="cuda", dtype=torch.bfloat16)
    # KNOWN_FAILURES 1: what the graphs' memory held before capture must not matter.
    poison = torch.full((2**30,), float("nan"), device="cuda", dtype=torch.bfloat16)
    del poison
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64, 512, 2048), 32))
    manager.capture()
    return manager


def random_grids(generator: random.Random, max_tokens: int) -> list[tuple[int, int, int]]:
    grids, tokens = [], 0
    for _ in range(generator.randint(1, 12)):
        grid = (generator.choice([1, 1, 1, 2, 5]), *(2 * generator.randint(1, 20) for _ in "hw"))
        tokens += grid[0] * grid[1] * grid[2] // 4
        if tokens > max_tokens:
            break
        grids.append(grid)
    return grids or [(1, 2, 2)]


def test_random_batches_equal_eager(manager, batch) -> None:
    generator = random.Random(1)
    for _ in range(20):
        mm_kwargs = batch(random_grids(generator, 3000), device="cuda", dtype=torch.bfloat16)
        outputs = torch.cat(manager.execute(mm_kwargs)).float()
        expected = manager.model.module(
            mm_kwargs["pixel_values"], mm_kwargs["image_grid_thw"]
        ).float()
        assert relative_error(outputs, expected) <= ROUNDING


def test_replays_are_repeatable(manager, batch) -> None:
    """An error that moves between runs of the same input would be a race."""
    mm_kwargs = batch([(1, 34, 36), (1, 20, 20), (3, 4, 6)], device="cuda", dtype=torch.bfloat16)
    first = torch.cat(manager.execute(mm_kwargs))
    for _ in range(50):
        assert torch.equal(torch.cat(manager.execute(mm_kwargs)), first)


def test_neighbours_do_not_matter_to_the_bit(manager, batch) -> None:
    """KNOWN_FAILURES 29: a NaN neighbour gives the bits that a normal one gives."""
    grids = [(1, 20, 20), (1, 6, 10), (1, 20, 18)]
    mm_kwargs = batch(grids, device="cuda", dtype=torch.bfloat16)
    normal = manager.execute(mm_kwargs)
    mm_kwargs["pixel_values"][400:460] = float("nan")
    poisoned = manager.execute(mm_kwargs)
    assert torch.equal(poisoned[0], normal[0])
    assert torch.equal(poisoned[2], normal[2])
    assert poisoned[1].isnan().all()
    mm_kwargs["pixel_values"][400:460] = float("inf")
    poisoned = manager.execute(mm_kwargs)
    assert torch.equal(poisoned[0], normal[0]) and torch.equal(poisoned[2], normal[2])


def test_no_host_read_and_no_allocation(manager, batch) -> None:
    """KNOWN_FAILURES 28. A borrowed output needs no memory at all."""
    mm_kwargs = batch([(1, 20, 20), (1, 32, 32)], device="cuda", dtype=torch.bfloat16)
    manager.execute(mm_kwargs, borrow=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(3):
            manager.execute(mm_kwargs, borrow=True)
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert allocated == 0


def test_trace_shows_copies_and_one_graph_launch(manager, batch) -> None:
    mm_kwargs = batch([(1, 20, 20)] * 5, device="cuda", dtype=torch.bfloat16)
    manager.execute(mm_kwargs, borrow=True)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        manager.execute(mm_kwargs, borrow=True)
        torch.cuda.synchronize()
    calls = {
        event.key: event.count
        for event in profile.key_averages()
        if event.key.startswith(("cuda", "cu")) and "Synchronize" not in event.key
    }
    launches = {name: count for name, count in calls.items() if "Launch" in name}
    assert launches == {"cudaGraphLaunch": 1}
    assert sum(count for name, count in calls.items() if "Memcpy" in name) == 2
    assert not any("Malloc" in name or "Memset" in name for name in calls)


def test_nothing_compiles_after_capture(manager, batch, monkeypatch) -> None:
    """KNOWN_FAILURES 12 and 13: over 200 random batches."""
    import triton

    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **kwargs: compiled.append(kwargs)
    )
    generator = random.Random(2)
    for _ in range(200):
        grids = random_grids(generator, 2000)
        manager.execute(batch(grids, device="cuda", dtype=torch.bfloat16))
    assert manager.get_cumulative_stats()["budgets"][2048]["replays"] > 20
    assert not compiled


def test_misses_compile_nothing_either(manager, batch, monkeypatch) -> None:
    import triton

    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **kwargs: compiled.append(kwargs)
    )
    generator = random.Random(3)
    for grids in (
        [(1, 96, 128)],
        [(24, 20, 24)],
        [(1, 2, 4)] * 100,
        [(40, 2, 2)],
        *(random_grids(generator, 4000) for _ in range(30)),
    ):
        mm_kwargs = batch(grids, device="cuda", dtype=torch.bfloat16)
        manager.model.module(mm_kwargs["pixel_values"], mm_kwargs["image_grid_thw"])
    assert not compiled


def test_float32_is_captured(reference, tools, batch) -> None:
    encoder = Qwen3VLVisionEncoder.from_transformers(copy.deepcopy(reference).cuda())
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64, 512), 8))
    manager.capture()
    for grids in ([(1, 16, 16)], [(1, 2, 196), (3, 4, 6)], [(8, 8, 24)]):
        mm_kwargs = batch(grids, device="cuda")
        # On the CPU: transformers' Conv3d uses TF32 on a GPU.
        truth = tools.reference_rows(reference, mm_kwargs["pixel_values"].cpu(), grids)
        output = torch.cat(manager.execute(mm_kwargs)).cpu()
        assert relative_error(output, truth) < 1e-4
    assert manager.get_cumulative_stats()["graph_misses"] == 0


@pytest.mark.parametrize("captured", [torch.uint8, torch.bfloat16], ids=["uint8", "bf16"])
def test_uint8_patches(captured) -> None:
    """KNOWN_FAILURES 20: bytes are normalised, whatever the graph was captured for."""
    encoder = Qwen3VLVisionEncoder.random(
        GEOMETRIES["2b"], device="cuda", dtype=torch.bfloat16, pixel_dtype=captured
    )
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (512,), 8))
    manager.capture()
    pixels = torch.randint(0, 256, (400, 1536), dtype=torch.uint8)
    expected = encoder((pixels.float() / 255 - 0.5) / 0.5, [(1, 20, 20)]).float()
    output = manager.execute({"pixel_values": pixels, "image_grid_thw": [(1, 20, 20)]})[0].float()
    assert manager.get_cumulative_stats()["graph_hits"] == 1
    assert relative_error(output, expected) <= ROUNDING
    if captured == torch.uint8:
        with pytest.raises(ValueError, match="graphs take uint8 patches"):
            manager.execute({"pixel_values": pixels.float(), "image_grid_thw": [(1, 20, 20)]})


def test_plans_are_recorded(manager) -> None:
    """How a plan is chosen of its times is test_calibration.py's."""
    plans, encoder = manager.model.plans, manager.model.module
    assert set(plans) == {64, 512, 2048}
    if not is_measured(encoder):
        for plan in plans.values():
            assert replace(plan, branches=False) == encoder.plan
    plan = manager.model._measured_plan(2048, 8)
    measured = plan.microseconds["attention"]
    assert set(measured) | set(plan.left_out) == set(BACKENDS)
    assert measured["triton"] > 0 and "sdpa" in plan.left_out


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Median GPU time of a replay of what the static buffers hold."""
    times = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[5:])


def test_cost_follows_real_rows(manager, batch) -> None:
    """KNOWN_FAILURES 10 and 11: what a budget of 2,048 computes is the rows in it."""
    times = {}
    for images in (3, 4, 8):  # of 256 tokens each
        mm_kwargs = batch([(1, 32, 32)] * images, device="cuda", dtype=torch.bfloat16)
        before = manager.get_cumulative_stats()["budgets"][2048]["replays"]
        manager.execute(mm_kwargs)
        assert manager.get_cumulative_stats()["budgets"][2048]["replays"] == before + 1
        times[images] = replay_ms(manager.budget_graphs[2048].graph)
    assert times[4] < 0.75 * times[8]
    assert times[3] < times[4]
