"""A replay costs what the images cost: one graph of 6,144 tokens against graphs of the exact size.

    python -m vitgraph.bench.replay_cost [--geometry 8b] [--save bench/results/NAME.json]

For batches of 100, 1,000, 2,000 and 3,100 tokens: the replay of a graph captured for 6,144 tokens
over the replay of one captured for the batch alone (meant to stay below 1.25 for 100 tokens, 1.10
for the others). Then 51 % fill over 100 %, and the host's time for 1 and for 20 images: until the
call returns, of vLLM's graph manager too where vLLM is installed, and until the replay is launched,
in a tight loop and with the processor's caches full of something else, as in a server.
"""

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from rich.table import Table

from vitgraph.bench.console import make_console
from vitgraph.bench.families import build
from vitgraph.bench.options import require
from vitgraph.bench.outputs import output_file
from vitgraph.bench.report import header
from vitgraph.bench.systems import Setup, synchronize
from vitgraph.bench.timing import wall
from vitgraph.bench.workloads import Batch, make_batch
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager

CAPACITY = 6144
EVICTED_BYTES = 256 << 20  # more than a processor's caches hold
Grids = list[tuple[int, int, int]]


def replay_ms(manager: EncoderCudaGraphManager, grids: Grids) -> float:
    """Median GPU time of the replay that serves `grids`, inputs in place."""
    patches = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(patches, 1536, device="cuda").to(manager.model.dtype)
    packs = []
    manager.on_pack = lambda pack, _: packs.append(pack)
    manager.execute({"pixel_values": pixels, "image_grid_thw": grids}, borrow=True)
    manager.on_pack = None
    (pack,) = packs
    graph = manager.budget_graphs[pack.budget].graph
    times = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[5:])


class Clocked:
    """A graph that notes when it is launched."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.launched = graph, 0.0

    def replay(self) -> None:
        self.launched = time.perf_counter()
        self.graph.replay()


def launch_ms(
    manager: EncoderCudaGraphManager, batch: Batch, repeats: int = 50
) -> dict[str, float]:
    """Median host milliseconds from `execute` to the launch of the one replay that serves a
    batch."""
    clocks = {budget: Clocked(kept.graph) for budget, kept in manager.budget_graphs.items()}
    evicted = np.zeros(EVICTED_BYTES, np.uint8)
    times: dict[str, list[float]] = {"warm": [], "cold": []}
    try:
        for budget, kept in manager.budget_graphs.items():
            kept.graph = clocks[budget]  # type: ignore[assignment]
        for state in ["warm"] * repeats + ["cold"] * repeats:
            synchronize(manager.device)
            if state == "cold":
                evicted += 1
            started = time.perf_counter()
            manager.execute(batch.mm_kwargs)
            launched = max(clock.launched for clock in clocks.values())
            times[state].append(1e3 * (launched - started))
    finally:
        for budget, kept in manager.budget_graphs.items():
            kept.graph = clocks[budget].graph
    return {state: statistics.median(taken[3:]) for state, taken in times.items()}


def capture(encoder: Qwen3VLVisionEncoder, budget: int, items: int) -> EncoderCudaGraphManager:
    """A manager with one budget."""
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (budget,), items))
    manager.capture()
    return manager


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="8b")
    parser.add_argument("--save", type=output_file, default=None)
    args = parser.parse_args()
    require(torch.cuda.is_available(), "a CUDA GPU, and torch sees none")
    encoder = Qwen3VLVisionEncoder.random(
        GEOMETRIES[args.geometry], device="cuda", dtype=torch.bfloat16
    )
    roomy = capture(encoder, CAPACITY, 96)
    view = Table("batch", "tokens", "roomy ms", "exact ms", "ratio", box=None)
    rows = {}
    for images in (1, 10, 20, 31):
        grids = [(1, 20, 20)] * images
        exact = capture(encoder, 100 * images, images)
        # alternated, so that the card's temperature is in both
        pairs = [(replay_ms(roomy, grids), replay_ms(exact, grids)) for _ in range(3)]
        exact.clear()
        roomy_ms, exact_ms = (statistics.median(times) for times in zip(*pairs, strict=True))
        name = f"{images} x (1,20,20)"
        rows[name] = {
            "tokens": 100 * images,
            "roomy_ms": roomy_ms,
            "exact_ms": exact_ms,
            "ratio": roomy_ms / exact_ms,
        }
        numbers = f"{roomy_ms:.3f}", f"{exact_ms:.3f}", f"{roomy_ms / exact_ms:.3f}"
        view.add_row(name, str(100 * images), *numbers)
    fills = {count: replay_ms(roomy, [(1, 16, 16)] * count) for count in (49, 96)}
    theirs, missing = build(Setup(encoder, backends=("FLASH_ATTN",)), ["vllm"])
    encoders = {"vitgraph": lambda batch: roomy.execute(batch.mm_kwargs)}
    encoders |= {system.name: system.encode for system in theirs if system.name.endswith("graph")}
    hosts: dict[str, dict[int, float]] = {}
    for name, encode in encoders.items():
        for images in (1, 20):
            batch = make_batch(encoder, [(1, 20, 20)] * images)
            _, host = wall(lambda encode=encode, batch=batch: encode(batch), 200)
            hosts.setdefault(name, {})[images] = host
    launches = {
        images: launch_ms(roomy, make_batch(encoder, [(1, 20, 20)] * images)) for images in (1, 20)
    }
    result = header() | {
        "geometry": args.geometry,
        "capacity": CAPACITY,
        "batches": rows,
        "fill_51_percent_ms": fills[49],
        "fill_100_percent_ms": fills[96],
        "fill_ratio": fills[49] / fills[96],
        "host_ms": hosts,
        "launch_ms": launches,
        "plans": {
            budget: {"attention": plan.attention, **plan.providers}
            for budget, plan in roomy.model.plans.items()
        },
    }
    console = make_console()
    console.print(view)
    console.print(f"51 % fill over 100 %: {result['fill_ratio']:.3f}")
    for name, host in hosts.items():
        console.print(f"host ms for 1 and 20 images, {name}: {host[1]:.3f}, {host[20]:.3f}")
    for images, taken in launches.items():
        numbers = f"{taken['warm']:.3f} warm, {taken['cold']:.3f} cold"
        console.print(f"host ms until the replay of {images} images is launched: {numbers}")
    for name, reason in missing.items():
        console.print(f"not here: {name}: {reason}", markup=False)
    console.print(result["plans"])
    if args.save:
        args.save.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
