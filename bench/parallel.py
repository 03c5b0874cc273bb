"""One rank of `vitgraph bench serving --ranks`: 20 images of 336x336 a request, spread over all.

Started by torch.distributed.run with the options as JSON; rank 0 writes what it measured.
"""

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from vitgraph.bench.families import build
from vitgraph.bench.report import header
from vitgraph.bench.serving import PARALLEL_GRIDS, errors_of, measure
from vitgraph.bench.systems import Setup, System, require
from vitgraph.bench.workloads import SERVING_BUDGETS, SERVING_ITEMS, Batch, make_batch
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder

COUNTS = (0, 1, 3, 4, 5, 20)  # images; fewer than ranks leave some without any
FIRST_REQUESTS = 50


@record
def main(options: dict[str, Any]) -> None:
    """Build, compare, measure."""
    started = time.monotonic()
    on_gpu = options["device"] == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    encoder = Qwen3VLVisionEncoder.random(
        GEOMETRIES[options["geometry"]], device=device, dtype=getattr(torch, options["dtype"])
    )
    for tensor in encoder.parameters():
        dist.broadcast(tensor, 0)
    setup = Setup(
        encoder,
        SERVING_BUDGETS,
        SERVING_ITEMS,
        tuple(options["attention"]),
        tuple(options["backends"]),
        dist.get_world_size(),
        tuple(options["linear_dtype"]),
    )
    batch = make_batch(encoder, PARALLEL_GRIDS)
    patches = len(batch.pixels) // len(PARALLEL_GRIDS)
    few = [Batch(batch.pixels[: patches * n], PARALLEL_GRIDS[:n]) for n in COUNTS]

    def agree(count: int) -> int:
        """Rank 0's."""
        shared = torch.tensor([count], device=device)
        dist.broadcast(shared, 0)
        return int(shared)

    def run(systems: list[System], missing: dict[str, str], requests: int, warm_up: int) -> None:
        require(systems, missing)
        errors = errors_of(systems, encoder, [batch])
        errors |= {name: max(error, errors[name]) for name, error in fewer.items()}
        left = options["seconds"] - (time.monotonic() - started)
        batches = [batch] * (warm_up + requests)
        measured = measure(systems, batches, warm_up, left, before=dist.barrier, agree=agree)
        if dist.get_rank() == 0:
            found = {"images_compared": COUNTS, "errors": errors, "missing": missing}
            found["header"] = header(device)
            Path(options["output"]).write_text(json.dumps(measured | found))

    # Ours first, and written: a rank that fails in vLLM leaves the others hanging.
    ours, missing = build(setup, [name for name in options["systems"] if name == "vitgraph"])
    fewer = errors_of(ours, encoder, few)
    requests, warm_up = options["requests"], options["warm_up"]
    others = [name for name in options["systems"] if name != "vitgraph"]
    if ours and "vllm" in others and find_spec("vllm") is not None:
        run(ours, missing, min(requests, FIRST_REQUESTS), min(warm_up, FIRST_REQUESTS))
    theirs, absent = build(setup, others)
    run([*ours, *theirs], missing | absent, requests, warm_up)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
