"""Fair times: every system once a turn, the order reversed from turn to turn."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from vitgraph.bench.systems import System, synchronize
from vitgraph.bench.workloads import Batch


@dataclass
class Times:
    """Milliseconds of one system: to the synchronised result, and until the call returned."""

    total: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


def time_in_turns(
    systems: Sequence[System],
    batches: Sequence[Batch],
    device: torch.device,
    *,
    seconds: float = float("inf"),
    least: int = 5,
    before: Callable[[], object] = lambda: None,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Times]:
    """Encode each batch once with every system.

    Args:
        systems: warmed up for these batches.
        batches: one a turn.
        device: waited for before a call starts and when it has returned.
        seconds: no turn starts after as many, the first `least` excepted.
        before: runs before each call, untimed.
        progress: is told the turns done.
    """
    times = {system.name: Times() for system in systems}
    deadline = time.perf_counter() + seconds
    gc.collect()
    gc.disable()
    try:
        for turn, batch in enumerate(batches):
            if turn >= least and time.perf_counter() > deadline:
                break
            for system in systems if turn % 2 == 0 else reversed(systems):
                synchronize(device)
                before()
                started = time.perf_counter()
                output = system.encode(batch)
                host = time.perf_counter()
                synchronize(device)
                done = time.perf_counter()
                del output
                times[system.name].host.append(1e3 * (host - started))
                times[system.name].total.append(1e3 * (done - started))
            progress(turn + 1)
    finally:
        gc.enable()
    return times


def wall(
    call: Callable[[], object], repeats: int = 20, device: torch.device | None = None
) -> tuple[float, float]:
    """Median milliseconds to the synchronised result, and until the call returns."""
    system = System("", lambda batch: call())
    device = device or torch.device("cuda")
    batches: list[Any] = [None] * repeats
    time_in_turns([system], batches[:3], device)
    times = time_in_turns([system], batches, device)[""]
    return statistics.median(times.total), statistics.median(times.host)


def replay_ms(system: System, batch: Batch, repeats: int = 20) -> float | None:
    """Median milliseconds of the GPU in the one replay of a batch, inputs in place; None where it
    is not served by one graph alone: several share their inputs."""
    graphs = [graph for _, graph in system.replays(batch)]
    if len(graphs) != 1 or graphs[0] is None:
        return None
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs[0].replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def peak_mib(system: System, batch: Batch, device: torch.device) -> float | None:
    """Memory that a call takes at its peak beyond what is allocated already; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    output = system.encode(batch)
    torch.cuda.synchronize(device)
    del output
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def matmul_rate(device: torch.device | None = None) -> float:
    """FLOP/s of a product of random data: 8192 cubed in bf16 on a GPU, 512 in float32 on a CPU."""
    on_gpu = device is None or device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device or "cuda").to(dtype) for _ in range(2))
    if on_gpu:
        ms = triton.testing.do_bench(lambda: a @ b, return_mode="median")
    else:
        ms, _ = wall(lambda: a @ b, device=device)
    return 2 * size**3 / (1e-3 * ms)
