"""Eager and graph times of the encoder for the nine workloads, one GPU, random weights.

    python bench/encoder_graphs.py [--geometry 8b] [--save bench/results/NAME.json]

eager, graph   wall time from call to synchronised result, median of 20 (ms)
replay         the replays alone, by CUDA events (ms)
host           time until `execute` returns, nothing synchronised (ms)
floor          useful FLOPs at the matmul rate measured in the same run (ms)
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder, VisionConfig
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager

MIX = [(1, 14, 20), (1, 48, 64), (1, 30, 42), (1, 68, 120), (1, 26, 36), (1, 64, 36), (1, 20, 20)]
WORKLOADS: dict[str, list[tuple[int, int, int]]] = {
    "1 x (1,20,20)": [(1, 20, 20)],
    "1 x (1,32,32)": [(1, 32, 32)],
    "1 x (1,48,64)": [(1, 48, 64)],
    "1 x (1,68,120)": [(1, 68, 120)],
    "1 x (1,128,180)": [(1, 128, 180)],
    "8 x (1,32,32)": [(1, 32, 32)] * 8,
    "20 x (1,20,20)": [(1, 20, 20)] * 20,
    "1 video (8,24,40)": [(8, 24, 40)],
    "mix of 7": MIX,
}
BUDGETS, MAX_ITEMS = (128, 256, 512, 1024, 2048, 4096, 6144), 32


def flops(config: VisionConfig, grids: list[tuple[int, int, int]]) -> float:
    """Multiply-adds of the matrix products times two."""
    patches = sum(t * h * w for t, h, w in grids)
    hidden, inner = config.hidden_size, config.intermediate_size
    block = 2 * patches * hidden * (4 * hidden + 2 * inner)
    scores = sum(4 * t * (h * w) ** 2 * hidden for t, h, w in grids)
    wide = hidden * config.spatial_merge_size**2
    merge = 2 * patches // config.spatial_merge_size**2 * wide * (wide + config.out_hidden_size)
    levels = 1 + len(config.deepstack_visual_indexes)
    embed = 2 * patches * config.patch_width * hidden
    return embed + config.depth * (block + scores) + levels * merge


def matmul_rate() -> float:
    """FLOP/s of an 8192-cubed bf16 product of random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ms = triton.testing.do_bench(lambda: a @ b, return_mode="median")
    return 2 * 8192**3 / (ms * 1e-3)


def wall(call: Callable[[], object], repeats: int = 20) -> tuple[float, float]:
    """Median milliseconds to the synchronised result, and until the call returns."""
    for _ in range(3):
        call()
    total, host = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        host.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        total.append(time.perf_counter() - started)
    return 1e3 * statistics.median(total), 1e3 * statistics.median(host)


def measure(manager: EncoderCudaGraphManager, grids: list[tuple[int, int, int]]) -> dict:
    """One row of the table; outputs are compared before anything is timed."""
    encoder = manager.model
    patches = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(patches, encoder.config.patch_width, device="cuda").to(encoder.dtype)
    key = ("pixel_values", "image_grid_thw")
    if grids[0][0] > 1:
        key = ("pixel_values_videos", "video_grid_thw")
    batch = {key[0]: pixels, key[1]: grids}
    eager_output = encoder(pixels, grids).double()
    error = (torch.cat(manager.execute(batch)).double() - eager_output).norm()
    eager_ms, _ = wall(lambda: encoder(pixels, grids))
    graph_ms, host_ms = wall(lambda: manager.execute(batch))
    graphs = [manager.budget_graphs[p.budget].graph for p in manager.last_plan if p.budget]
    replay_ms = triton.testing.do_bench(
        lambda: [graph.replay() for graph in graphs], return_mode="median"
    )
    return {
        "tokens": patches // 4,
        "budgets": [pack.budget for pack in manager.last_plan],
        "error_to_eager": (error / eager_output.norm()).item(),
        "eager_ms": eager_ms,
        "graph_ms": graph_ms,
        "replay_ms": replay_ms if graphs else None,
        "host_ms": host_ms,
    }


def header() -> dict[str, str]:
    """Hardware and versions of a result."""
    return {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("VITGRAPH_COMMIT") or _commit(),
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="8b")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--ops", default="auto")
    parser.add_argument("--save", type=Path, default=None)
    args = parser.parse_args()
    config = GEOMETRIES[args.geometry]
    encoder = Qwen3VLVisionEncoder.random(
        config, device="cuda", dtype=torch.bfloat16, attention=args.attention, ops=args.ops
    )
    compilation = CompilationConfig(True, BUDGETS, MAX_ITEMS)
    manager = EncoderCudaGraphManager(encoder, compilation, log_interval=0)
    started = time.perf_counter()
    manager.capture()
    torch.cuda.synchronize()
    capture_s = time.perf_counter() - started
    rate = matmul_rate()
    rows = {}
    for name, grids in track(WORKLOADS.items(), description="workloads"):
        rows[name] = measure(manager, grids)
        rows[name]["floor_ms"] = 1e3 * flops(config, grids) / rate
    result = header() | {
        "geometry": args.geometry,
        "dtype": "bfloat16",
        "attention": args.attention,
        "plans": {
            budget: {"attention": plan.attention, **plan.providers}
            for budget, plan in encoder.plans.items()
        },
        "matmul_tflops": rate / 1e12,
        "budgets": BUDGETS,
        "max_items": MAX_ITEMS,
        "capture_s": capture_s,
        "statistics": manager.get_cumulative_stats(),
        "workloads": rows,
    }
    _print(result)
    if args.save:
        args.save.write_text(json.dumps(result, indent=1) + "\n")


def _print(result: dict) -> None:
    view = Table(box=None, title_justify="left")
    view.title = (
        f"{result['gpu']}, torch {result['torch']}, triton {result['triton']}, "
        f"{result['geometry']} {result['dtype']}, attention {result['attention']}, "
        f"captured in {result['capture_s']:.1f} s"
    )
    view.add_column("workload")
    names = ["tokens", "eager_ms", "graph_ms", "replay_ms", "host_ms", "floor_ms"]
    for name in [*names, "eager/graph", "error"]:
        view.add_column(name, justify="right")
    for name, row in result["workloads"].items():
        view.add_row(
            name,
            str(row["tokens"]),
            *(f"{row[key]:.2f}" if row[key] is not None else "-" for key in names[1:]),
            f"{row['eager_ms'] / row['graph_ms']:.2f}",
            f"{row['error_to_eager']:.1e}",
        )
    Console(width=130).print(view)


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return run.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
