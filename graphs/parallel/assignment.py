"""Who encodes what of a batch: whole items shared out over the ranks, or all rows together.

Both are estimated from numbers that every rank has, so nobody has to ask:

    apart     the busiest rank's FLOPs / FLOP/s
    together  all FLOPs / (ranks * FLOP/s) + a collective a layer: its latency + its bytes / B/s

Fitted to one H200 (8B), FLOPs / 440 T are within 5 % of what large batches take there.
"""

import heapq
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vitgraph.encoder import VisionConfig
from vitgraph.encoder.inputs import Grid
from vitgraph.encoder.sequence_parallel import SequenceParallel, all_gather
from vitgraph.graphs.qwen3_vl import Qwen3VLGraphModel

REPEATS = 5
TRIAL: list[Grid] = [(1, 64, 64)]  # enough to keep a GPU busy
SMALL, LARGE = 1 << 14, 1 << 24  # bytes from each rank


@dataclass(frozen=True)
class Rates:
    """What the ranks reach, the slowest of them.

    Attributes:
        seconds_per_flop: of one rank's forward.
        seconds_per_byte: that a rank receives.
        latency: seconds of a collective without bytes.
    """

    seconds_per_flop: float
    seconds_per_byte: float
    latency: float


def assign(sizes: Sequence[int], world: int) -> list[list[int]]:
    """Indices of the items of each rank, ascending: largest first onto the least loaded rank.

    Items of equal size are handed out in their order, rank by rank, so that a rank's items are
    neighbours where they can be and their pixels need no copy.
    """
    if world < 1:
        raise ValueError(f"world size {world} must be at least 1")
    loads = [(0, rank) for rank in range(world)]
    counts: list[Counter[int]] = [Counter() for _ in range(world)]
    for size in sorted(sizes, reverse=True):
        load, rank = loads[0]
        counts[rank][size] += 1
        heapq.heapreplace(loads, (load + max(size, 1), rank))
    ranks: list[list[int]] = [[] for _ in range(world)]
    first: Counter[int] = Counter()  # the first rank that may have room for a size
    for index, size in enumerate(sizes):
        while not counts[first[size]][size]:
            first[size] += 1
        counts[first[size]][size] -= 1
        ranks[first[size]].append(index)
    return ranks


def work(config: VisionConfig, grid: Grid) -> int:
    """FLOPs of an item's blocks: four and two products a layer by its rows, attention by the
    square of a frame's."""
    frames, height, width = grid
    hidden, rows = config.hidden_size, frames * height * width
    products = 2 * rows * (4 * hidden**2 + 2 * hidden * config.intermediate_size)
    return config.depth * (products + 4 * rows * height * width * hidden)


def together_pays(
    model: Qwen3VLGraphModel, grids: Sequence[Grid], ranks: list[list[int]], rates: Rates
) -> bool:
    """Whether all ranks are faster on all rows than each on the items of `ranks`."""
    config, flops = model.config, [work(model.config, grid) for grid in grids]
    rows = sum(t * h * w for t, h, w in grids)
    apart = max(sum(flops[index] for index in indices) for indices in ranks)
    others = (len(ranks) - 1) / len(ranks)
    received = others * rows * 3 * config.hidden_size * model.dtype.itemsize * config.depth
    together = sum(flops) / len(ranks) * rates.seconds_per_flop
    together += config.depth * rates.latency + received * rates.seconds_per_byte
    return together < apart * rates.seconds_per_flop


def measure(model: Qwen3VLGraphModel, parallel: SequenceParallel) -> Rates:
    """Time a forward and collectives of two sizes. A collective operation; every rank gets the
    same answer."""
    device, batch = model.device, model.make_encoder_inputs(TRIAL)

    def gather(size: int) -> Callable[[], object]:
        every = torch.zeros(parallel.ranks * size, dtype=torch.uint8, device=device)
        own = every[parallel.rank * size :][:size]
        return lambda: all_gather(every, own, group=parallel.group)

    def forward() -> None:
        model.module(batch["pixel_values"], TRIAL)

    seconds = torch.tensor(
        [_median(call, device) for call in (forward, gather(SMALL), gather(LARGE))], device=device
    )
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=parallel.group)
    one, small, large = seconds.tolist()
    received = (parallel.ranks - 1) * (LARGE - SMALL)
    per_byte = max(large - small, 0.0) / max(received, 1)
    return Rates(one / work(model.config, TRIAL[0]), per_byte, small)


def _median(call: Callable[[], object], device: torch.device) -> float:
    """Seconds to the synchronised result."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
