"""`vitgraph bench serving`: the two published experiments, in form.

images    single-image requests of a chat, one after the other, on one GPU
parallel  20 images of 336x336 a request over the ranks of one host, in processes of their own
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from vitgraph.bench import report, workloads
from vitgraph.bench.exactness import relative_error
from vitgraph.bench.families import build
from vitgraph.bench.options import check_options, choose, use
from vitgraph.bench.pictures import serving_picture
from vitgraph.bench.systems import TOLERANCE, Setup, System, baseline_of, require, rows
from vitgraph.bench.timing import time_in_turns
from vitgraph.bench.workloads import Batch, load_sizes, make_batch, photographs
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.encoder.inputs import Grid

REQUESTS = {"images": (3000, 300), "parallel": (1000, 200)}  # measured, after so many to warm up
PARALLEL_GRIDS: list[Grid] = [(1, 20, 20)] * 20
SEEDED_SIZES = (
    "tokens lognormal (median 350, sigma 0.7) in 64..2500, aspect lognormal (0.35), seed 42"
)
SHARE_OF_IMAGES = 0.6  # of the time, where both experiments are run
TRIAL_TURNS, WARM_UP_SHARE = 8, 0.15
LEAST_SECONDS, GRACE_SECONDS = 20, 60  # of a launch; to start and to end
LONGEST_SECONDS = 24 * 3600.0


def bench_serving(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, save; 1 if an output was wrong or a rank failed."""
    check_options(args)
    device, dtype, geometry = choose(args)
    use(device)
    if args.seconds is None:  # requests that were asked for are all made
        args.seconds = workloads.seconds_for(device) if args.requests is None else LONGEST_SECONDS
    if min(args.ranks) < 1:
        raise ValueError(f"--ranks {min(args.ranks)} is no number of processes")
    most = torch.cuda.device_count() if device.type == "cuda" else max(args.ranks)
    if max(args.ranks) > most:
        raise ValueError(f"--ranks {max(args.ranks)}: this host has {most} GPUs")
    deadline = time.monotonic() + args.seconds
    sizes = load_sizes(args.sizes) if args.sizes else None
    result: dict[str, Any] = report.header(device) | {
        "geometry": geometry,
        "dtype": str(dtype).removeprefix("torch."),
        "budgets": workloads.SERVING_BUDGETS,
        "max_items": workloads.SERVING_ITEMS,
        "systems": {},
        "experiments": {},
        "not_run": [],
    }
    if "images" in args.experiments:
        encoder = Qwen3VLVisionEncoder.random(GEOMETRIES[geometry], device=device, dtype=dtype)
        both = "parallel" in args.experiments
        seconds = args.seconds * (SHARE_OF_IMAGES if both else 1)
        run_images(args, encoder, sizes, seconds, result, console)
    for place, ranks in enumerate(args.ranks if "parallel" in args.experiments else ()):
        seconds = (deadline - time.monotonic()) / (len(args.ranks) - place)
        if args.save:  # so that an interrupted run leaves what it has
            report.save(result, args.save, sheets_of(result))
        run_parallel(args, ranks, seconds, result, console)
    add_scaling(result["experiments"])
    result |= report.header(device)  # now that everything is imported
    return publish(result, args.save, console)


def run_images(
    args: argparse.Namespace,
    encoder: Qwen3VLVisionEncoder,
    sizes: list[Grid] | None,
    seconds: float,
    result: dict[str, Any],
    console: Console,
) -> None:
    """A stream of single-image requests; sizes are repeated where there are fewer than requests."""
    started = time.monotonic()
    budgets, items = workloads.SERVING_BUDGETS, workloads.SERVING_ITEMS
    setup = Setup(
        encoder,
        budgets,
        items,
        tuple(args.attention),
        tuple(args.backends),
        linear_dtypes=tuple(args.linear_dtype),
    )
    with console.status("building and capturing"):
        systems, missing = build(setup, args.systems, started + seconds)
        require(systems, missing)
    result["systems"] |= {name: {"missing": reason} for name, reason in missing.items()}
    requests, warm_up = _counts(args, "images")
    console.print(f"images: {requests} requests after {warm_up} to warm up, if time allows")
    stream = sizes or photographs(requests + warm_up)
    pixels = make_batch(encoder, [max(stream, key=math.prod)]).pixels
    batches = [
        Batch(pixels[: t * h * w], [(t, h, w)])
        for t, h, w in (stream[n % len(stream)] for n in range(requests + warm_up))
    ]
    experiment = {
        "title": f"One image a request, {args.sizes.name if sizes else 'seeded sizes'}",
        "sizes": str(args.sizes.name) if sizes else SEEDED_SIZES,
        "errors": errors_of(systems, encoder, batches[:4]),
    }
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("requests", total=requests)
        left = seconds - (time.monotonic() - started)
        tell = lambda done: bar.update(task, completed=done)  # noqa: E731
        experiment |= measure(systems, batches, warm_up, left, progress=tell)
    result["experiments"]["images"] = experiment


def run_parallel(
    args: argparse.Namespace, ranks: int, seconds: float, result: dict[str, Any], console: Console
) -> None:
    """Twenty images a request over `ranks` processes; what each does is in parallel.py."""
    name = f"parallel {ranks}"
    if seconds < LEAST_SECONDS:
        result["not_run"].append(f"{name} (no time left of {args.seconds:g} s)")
        return
    device, dtype, geometry = choose(args)
    requests, warm_up = _counts(args, "parallel")
    console.print(f"{name}: {requests} requests after {warm_up} to warm up, if time allows")
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "result.json", Path(folder) / "log"
        options = {
            "device": device.type,
            "dtype": str(dtype).removeprefix("torch."),
            "geometry": geometry,
            "systems": args.systems,
            "attention": args.attention,
            "linear_dtype": args.linear_dtype,
            "backends": args.backends,
            "requests": requests,
            "warm_up": warm_up,
            "seconds": seconds,
            "output": str(output),
        }
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        module = ["-m", "vitgraph.bench.parallel", json.dumps(options)]
        with console.status(f"20 images a request, {ranks} ranks"), log.open("w") as stream:
            command = [sys.executable, "-m", *launcher, *module]
            process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
            try:
                process.wait(timeout=seconds + GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                _end(process)
            except KeyboardInterrupt:
                _end(process)
                raise
        if process.returncode:
            tail = log.read_text(errors="replace").strip()[-2000:]
            result["not_run"].append(f"{name}: failed, status {process.returncode}: {tail}")
        if not output.exists():
            return
        found = json.loads(output.read_text())
    missing = found.pop("missing")
    result |= found.pop("header")  # vLLM is loaded there, and perhaps only there
    for system, why in missing.items():
        if result["systems"].get(system) != {"missing": why}:
            result["systems"][f"{system} ({name})"] = {"missing": why}
    title = f"20 images of 336x336 a request, {ranks} rank{'s' * (ranks > 1)}"
    result["experiments"][name] = {"title": title, "ranks": ranks, **found}


def _end(process: subprocess.Popen) -> None:
    """Ask the launcher to end its ranks; do not wait for ever."""
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measure(
    systems: Sequence[System],
    batches: Sequence[Batch],
    warm_up: int,
    seconds: float,
    *,
    before: Callable[[], object] = lambda: None,
    agree: Callable[[int], int] = lambda count: count,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Any]:
    """Times of all systems over the batches after the first `warm_up`, as many as `seconds` allow.

    Args:
        before: runs before each call.
        agree: makes all ranks do as many turns.
        progress: is told the turns done.
    """
    started = time.monotonic()
    device = batches[0].pixels.device

    def turn_seconds(few: Sequence[Batch]) -> float:
        times = time_in_turns(systems, few, device, before=before)
        return sum(statistics.fmean(one.total[len(few) // 2 :]) for one in times.values()) / 1e3

    turn = turn_seconds(batches[:TRIAL_TURNS])
    warm = agree(max(min(warm_up, int(WARM_UP_SHARE * seconds / turn)), 1))
    turn = turn_seconds(batches[:warm])
    left = seconds - (time.monotonic() - started)
    count = agree(max(min(len(batches) - warm_up, int(left / turn)), 1))
    chosen = batches[warm_up : warm_up + count]
    times = time_in_turns(systems, chosen, device, before=before, progress=progress)
    baseline = baseline_of(systems)
    return {
        "warm_up": warm,
        "requests": count,
        "complete": count == len(batches) - warm_up,
        "baseline": baseline,
        "systems": {
            name: report.summarise(one.total)
            | report.ratio(one.total, times[baseline].total)
            | {"percentiles_ms": [round(ms, 4) for ms in report.percentiles_of(one.total)]}
            for name, one in times.items()
        },
    }


def errors_of(
    systems: Sequence[System], encoder: Qwen3VLVisionEncoder, batches: Sequence[Batch]
) -> dict[str, float]:
    """Largest relative error of each system against the encoder, run eagerly and alone."""
    errors: dict[str, float] = {}
    for batch in batches:
        truth = encoder(batch.pixels, batch.grids)
        for system in systems:
            output = system.encode(batch)
            error = relative_error(rows(output) if len(output) else truth[:0], truth)
            errors[system.name] = max(errors.get(system.name, 0.0), error)
    return errors


def add_scaling(experiments: dict[str, dict[str, Any]]) -> None:
    """Speed over one rank, and over the ranks used, where both were measured."""
    one = experiments.get("parallel 1", {"systems": {}})["systems"]
    for experiment in experiments.values():
        for name, numbers in experiment["systems"].items():
            if "ranks" in experiment and name in one:
                speedup = one[name]["mean_ms"] / numbers["mean_ms"]
                numbers |= {"speedup": speedup, "efficiency": speedup / experiment["ranks"]}


def publish(result: dict[str, Any], path: Path | None, console: Console) -> int:
    """Print and save; 1 if an output was wrong or something failed."""
    tolerance = TOLERANCE[getattr(torch, result["dtype"])]
    lines = report.missing_lines(result["systems"], result["not_run"])
    wrong = False
    for name, one in result["experiments"].items():
        cut = "" if one["complete"] else ", cut by the time that was left"
        lines.append(f"{name}: {one['requests']} requests after {one['warm_up']}{cut}")
        for system, error in one["errors"].items():
            if not error <= tolerance:
                wrong = True
                lines.append(f"WRONG: {name}: {system} is off by {error:.1e}")
    report.publish(result, sheets_of(result), lines, serving_picture(result), path, console)
    return int(wrong or any("failed" in line for line in result["not_run"]))


def sheets_of(result: dict[str, Any]) -> list[report.Sheet]:
    """The tables of all experiments so far."""
    graphs = result["gpu"] != "none"
    experiments = result["experiments"].values()
    return [s for one in experiments for s in report.serving_sheets(one, graphs=graphs)]


def _counts(args: argparse.Namespace, experiment: str) -> tuple[int, int]:
    """Requests and warm-up, as asked for or in the published proportion."""
    requests, warm_up = REQUESTS[experiment]
    asked = requests if args.requests is None else args.requests
    share = max(round(asked * warm_up / requests), 1)
    return asked, share if args.warm_up is None else args.warm_up
