"""Throughput of `DataParallelEncoder` over the GPUs of one host, against one of them.

    torchrun --nproc-per-node 2 -m vitgraph.bench.data_parallel [--geometry 8b] [--save FILE]

Outputs of all ranks are compared with one rank's before anything is timed. Then the wall time to
the synchronised result: of one rank, of whole items shared out, of the rows of every item shared,
and of what `DataParallelEncoder` chooses from the two. --device cpu, over gloo, tries the script.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist
from rich.table import Table

from vitgraph.bench.console import make_console
from vitgraph.bench.exactness import relative_error
from vitgraph.bench.options import require
from vitgraph.bench.outputs import output_file
from vitgraph.bench.report import header
from vitgraph.bench.workloads import BUDGETS, MAX_ITEMS, WORKLOADS
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager
from vitgraph.graphs.parallel.data_parallel import DataParallelEncoder

# How the ranks share a batch: `split` of DataParallelEncoder.
WAYS = {"items": False, "rows": True, "chosen": None}
BATCHES = ("1 x (1,48,64)", "1 x (1,68,120)", "1 x (1,128,180)", "20 x (1,20,20)", "mix of 7")


def seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time, all ranks starting together."""
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def main() -> None:
    """Measure on every rank; rank 0 prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--batches", nargs="+", choices=list(WORKLOADS), default=BATCHES)
    parser.add_argument("--save", type=output_file, default=None)
    args = parser.parse_args()
    rank, on_gpu = int(os.environ.get("LOCAL_RANK", 0)), args.device == "cuda"
    gpus = int(os.environ.get("WORLD_SIZE", 1))
    if on_gpu:
        require(torch.cuda.device_count() >= gpus, f"{gpus} CUDA GPUs, or --device cpu")
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES[args.geometry], device=device, dtype=dtype)
    for parameter in encoder.parameters():
        dist.broadcast(parameter, 0)
    compilation = CompilationConfig(on_gpu, BUDGETS, MAX_ITEMS)
    manager = EncoderCudaGraphManager(encoder, compilation, log_interval=0)
    parallels = {}
    for way, split in WAYS.items():
        parallels[way] = DataParallelEncoder(manager, split=split)
        parallels[way].capture()
    ranks = dist.get_world_size()
    view = Table("batch", "one rank ms", *(f"{way} ms" for way in WAYS), "speed-up", box=None)
    rows = {}
    for name in args.batches:
        grids = WORKLOADS[name]
        pixels = torch.randn(sum(t * h * w for t, h, w in grids), 1536, device=device).to(dtype)
        dist.broadcast(pixels, 0)
        batch = {"pixel_values": pixels, "image_grid_thw": grids}
        alone = torch.cat(manager.execute(batch))
        one = seconds(lambda batch=batch: manager.execute(batch), device, args.repeats)
        times = {}
        for way, parallel in parallels.items():
            error = relative_error(torch.cat(parallel.execute(batch)), alone)
            assert error < (3e-2 if on_gpu else 1e-5), f"rank {rank}, {name}: error {error:.1e}"
            call = partial(parallel.execute, batch)
            times[way] = seconds(call, device, args.repeats)
        best = one / times["chosen"]
        rows[name] = {"one_ms": 1e3 * one, "speedup": best}
        rows[name] |= {f"{way}_ms": 1e3 * time for way, time in times.items()}
        cells = (f"{1e3 * time:.2f}" for time in (one, *times.values()))
        view.add_row(name, *cells, f"{best:.2f}")
    if dist.get_rank() == 0:
        make_console().print(view)
        if args.save:
            result = header(device) | {"ranks": ranks, "geometry": args.geometry}
            rates = parallels["chosen"].rates
            result |= {"batches": rows, "rates": rates and asdict(rates)}
            args.save.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
