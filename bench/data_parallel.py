"""Throughput of `DataParallelEncoder` over the GPUs of one host, against one of them.

    torchrun --nproc-per-node 2 bench/data_parallel.py [--geometry 8b] [--save FILE]

Two batches, 20 x (1,20,20) and the mix of seven: outputs of all ranks are compared with one rank's
before anything is timed; then the wall time to the synchronised result, alone and together. With
--device cpu it runs over gloo, to try the script.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

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
from vitgraph.graphs.data_parallel import DataParallelEncoder

BATCHES = ("20 x (1,20,20)", "mix of 7")


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
    manager.capture()
    parallel = DataParallelEncoder(manager)
    view = Table("batch", "one rank ms", f"{parallel.world} ranks ms", "speed-up", box=None)
    rows = {}
    for name in BATCHES:
        grids = WORKLOADS[name]
        pixels = torch.randn(sum(t * h * w for t, h, w in grids), 1536, device=device).to(dtype)
        dist.broadcast(pixels, 0)
        batch = {"pixel_values": pixels, "image_grid_thw": grids}
        alone, together = (torch.cat(one.execute(batch)) for one in (manager, parallel))
        error = relative_error(together, alone)
        assert error < (3e-2 if on_gpu else 1e-5), f"rank {rank}, {name}: error {error:.1e}"
        one = seconds(lambda batch=batch: manager.execute(batch), device, args.repeats)
        many = seconds(lambda batch=batch: parallel.execute(batch), device, args.repeats)
        rows[name] = {"one_ms": 1e3 * one, "all_ms": 1e3 * many, "speedup": one / many}
        view.add_row(name, f"{1e3 * one:.2f}", f"{1e3 * many:.2f}", f"{one / many:.2f}")
    if dist.get_rank() == 0:
        make_console().print(view)
        if args.save:
            result = header(device) | {"ranks": parallel.world, "geometry": args.geometry}
            result["batches"] = rows
            args.save.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
