"""A soak of the manager: random requests from several threads, outputs checked against eager.

    python -m vitgraph.bench.soak [--requests 20000] [--seconds 300] [--threads 8] [--save FILE]

Every thread has a stream of its own. One request in a hundred is compared with the eager encoder;
memory is read after every tenth. The exit status is 1 if an output was wrong or the memory held at
the end, all threads gone, exceeds that at the start by more than 1 %: what is in use without the
blocks that torch keeps for later. Those grow until every thread has met the largest sizes, and are
not to grow in the last third. If nothing comes back for a minute it says where every thread is and
ends with status 2.
"""

import argparse
import contextlib
import faulthandler
import json
import math
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import Progress
from rich.table import Table

from vitgraph.bench.console import make_console
from vitgraph.bench.exactness import relative_error
from vitgraph.bench.outputs import output_file
from vitgraph.bench.report import header
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager

CHECK_EVERY = 100
STALLED = 60  # seconds
GROWTH = 1.01
VERDICTS = {True: "flat", False: "GREW", None: "not judged on a CPU"}


def random_grids(generator: random.Random, largest: int) -> list[tuple[int, int, int]]:
    """1 to 6 items, mostly small images, some videos, now and then one above every budget."""
    grids = []
    for _ in range(generator.randint(1, 6)):
        frames = generator.choice([1, 1, 1, 1, 3])
        grids.append((frames, 2 * generator.randint(1, 12), 2 * generator.randint(1, 12)))
    if generator.random() < 0.01:
        grids.append((1, 2, 2 * (largest + 8)))
    return grids


def memory(device: torch.device) -> dict[str, int]:
    """Bytes in use, of the GPU as a whole or of this process, and those of them that are free
    blocks of torch's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return {"used": total - free, "unused": unused}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"used": pages * 4096, "unused": 0}


def is_flat(memories: dict[int | str, dict[str, int]]) -> bool:
    """Whether no more is held at the end than at the start, and what torch keeps has stopped to
    grow in the last third."""
    held = [m["used"] - m["unused"] for m in memories.values()]
    used = [m["used"] for m in memories.values()]
    return held[-1] <= GROWTH * held[0] and used[-1] <= GROWTH * used[len(used) * 2 // 3]


def join_or_exit(workers: list[threading.Thread], completed: Callable[[], float]) -> None:
    """Wait for the workers. One that waits for a GPU forever cannot be stopped: if nothing is
    completed for `STALLED` seconds, say where each thread is and end the process."""
    last, since = -1.0, time.monotonic()
    while any(worker.is_alive() for worker in workers):
        time.sleep(0.2)
        if completed() != last:
            last, since = completed(), time.monotonic()
        elif time.monotonic() - since > STALLED:
            print(f"stalled after {last:.0f} requests", flush=True)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(2)


def main() -> int:
    """Run, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="2b")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop early, and say so")
    parser.add_argument("--save", type=output_file, default=None)
    args = parser.parse_args()
    if min(args.requests, args.threads) < 1 or not args.seconds > 0:
        parser.error("--requests, --threads and --seconds must be positive")
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES[args.geometry], device=device, dtype=dtype)
    manager = EncoderCudaGraphManager(
        encoder, CompilationConfig(True, (64, 128, 256, 512), 32), log_interval=0
    )
    manager.capture()
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    pixels = torch.randn(16_384, encoder.config.patch_width, device=device).to(dtype)
    wrong: list[str] = []
    torch.cuda.empty_cache()
    memories: dict[int | str, dict[str, int]] = {0: memory(device)}
    done, checked, lock, console = 0, 0, threading.Lock(), make_console()
    interrupted = threading.Event()

    def serve(worker: int, progress: Progress, task: int) -> None:
        try:
            serve_until_done(worker, progress, task)
        except Exception as error:  # the other threads go on, and the soak has failed
            wrong.append(f"thread {worker} ended: {type(error).__name__}: {error}")

    def serve_until_done(worker: int, progress: Progress, task: int) -> None:
        nonlocal done, checked
        generator = random.Random(worker)
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            while True:
                with lock:
                    late = time.perf_counter() - started > args.seconds
                    if done >= args.requests or late or interrupted.is_set():
                        return
                    done += 1
                    number = done
                    if number % max(1, args.requests // 10) == 0:
                        memories[number] = memory(device)
                grids = random_grids(generator, manager.budgets[-1])
                patches = sum(t * h * w for t, h, w in grids)
                start = generator.randrange(len(pixels) - patches)
                mine = pixels[start : start + patches]
                outputs = manager.execute({"pixel_values": mine, "image_grid_thw": grids})
                if number % CHECK_EVERY == 0 or number == args.requests:
                    with lock:
                        checked += 1
                    error = relative_error(torch.cat(outputs), encoder(mine, grids))
                    if not error <= tolerance:
                        wrong.append(f"request {number} {grids}: {error:.1e}")
                progress.advance(task)

    started = time.perf_counter()
    with Progress(console=console) as progress:
        task = progress.add_task("requests", total=args.requests)
        workers = [
            threading.Thread(target=serve, args=(n, progress, task), daemon=True)
            for n in range(args.threads)
        ]
        for worker in workers:
            worker.start()
        try:
            join_or_exit(workers, lambda: progress.tasks[0].completed)
        except KeyboardInterrupt:  # as if the time was up; once more ends it at once
            interrupted.set()
            join_or_exit(workers, lambda: progress.tasks[0].completed)
    seconds = time.perf_counter() - started
    memories["end"] = memory(device)
    # What malloc keeps for later cannot be told apart on a CPU.
    flat = is_flat(memories) if device.type == "cuda" else None
    result = header(device) | {
        "requests": done,
        "asked_for": args.requests,
        "threads": args.threads,
        "geometry": args.geometry,
        "device": str(device),
        "seconds": seconds,
        "checked": checked,
        "wrong": wrong,
        "memory_bytes": memories,
        "memory_flat": flat,
        "statistics": manager.get_cumulative_stats(),
    }
    console.print(
        f"{done} of {args.requests} requests in {seconds:.1f} s, {result['checked']} checked, "
        f"{len(wrong)} wrong; memory {VERDICTS[flat]}"
    )
    table = Table("request", "used MiB", "of them unused by torch", "held", box=None)
    for when, m in memories.items():
        held = m["used"] - m["unused"]
        table.add_row(str(when), *(f"{b >> 20:,}" for b in (m["used"], m["unused"], held)))
    console.print(table)
    for line in wrong[:10]:
        console.print(line, markup=False)
    if args.save:
        args.save.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(wrong) or not checked or flat is False)


if __name__ == "__main__":
    raise SystemExit(main())
