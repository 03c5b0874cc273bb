"""`vitgraph bench encoder`: every system on the same batches, compared before it is timed."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from vitgraph.bench import report
from vitgraph.bench.exactness import relative_error
from vitgraph.bench.families import build
from vitgraph.bench.limits import OutOfTime, time_limit
from vitgraph.bench.options import check_options, choose, use
from vitgraph.bench.pictures import encoder_picture
from vitgraph.bench.systems import TOLERANCE, Setup, System, baseline_of, require, rows, synchronize
from vitgraph.bench.timing import matmul_rate, peak_mib, replay_ms, time_in_turns
from vitgraph.bench.workloads import (
    ALL_WORKLOADS,
    Batch,
    flops,
    load_sizes,
    make_batch,
    seconds_for,
)
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.encoder.inputs import Grid

WARM_UP = 3
COMPILE_SECONDS = 120  # for all shapes together; the rest are left out
MOST_CPU_TOKENS = 512  # larger batches are for GPUs


def bench_encoder(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, save; 1 if a system failed or its output was wrong, or nothing was timed."""
    check_options(args)
    device, dtype, geometry = choose(args)
    use(device)
    args.seconds = args.seconds or seconds_for(device)
    started = time.monotonic()
    workloads, not_run = _workloads(args, device)
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES[geometry], device=device, dtype=dtype)
    setup = Setup(
        encoder,
        attention=tuple(args.attention),
        linear_dtypes=tuple(args.linear_dtype),
        backends=tuple(args.backends),
    )
    with console.status("building and capturing"):
        systems, missing = build(setup, args.systems, started + args.seconds)
        rate = matmul_rate(device)
    require(systems, missing)
    result: dict[str, Any] = report.header(device) | {
        "geometry": geometry,
        "dtype": str(dtype).removeprefix("torch."),
        "attention": " ".join(args.attention),
        "matmul_tflops": rate / 1e12,
        "budgets": setup.budgets,
        "max_items": setup.max_items,
        "baseline": baseline_of(systems),
        "systems": {s.name: {"capture_s": s.capture_s, "memory_mib": s.memory_mib} for s in systems}
        | {name: {"missing": reason} for name, reason in missing.items()},
        "workloads": {},
        "not_run": not_run,
    }
    compiling = 0.0
    for name, grids in track(workloads.items(), description="workloads", console=console):
        if time.monotonic() - started > args.seconds:
            not_run.append(f"{name} (no time left of {args.seconds:g} s)")
            continue
        batch = make_batch(encoder, grids)
        row, took = measure(
            systems,
            batch,
            result["baseline"],
            turns=args.repeats,
            seconds=args.workload_seconds,
            may_compile=compiling < min(COMPILE_SECONDS, args.seconds / 4),
            deadline=started + args.seconds,
        )
        compiling += took
        if skipped := [s.name for s in systems if s.name not in row["systems"]]:
            why = f"no time left; first calls took {compiling:.0f} s"
            not_run.append(f"{', '.join(skipped)} of {name} ({why})")
        if not row["systems"]:
            continue
        on_gpu = device.type == "cuda"  # matmuls of another size are faster on a CPU
        row["floor_ms"] = 1e3 * flops(encoder.config, grids) / rate if on_gpu else None
        result["workloads"][name] = row
        if args.save:  # so that an interrupted run leaves what it has
            report.save(result, args.save, report.encoder_sheets(result))
    result["compile_s"] = compiling
    return publish(result, args.save, console)


def publish(result: dict[str, Any], path: Path | None, console: Console) -> int:
    """Print and save; 1 if a system failed or its output was wrong, or nothing was timed."""
    sheets = report.encoder_sheets(result)
    lines = report.missing_lines(result["systems"], result["not_run"])
    wrong = not any(row["turns"] for row in result["workloads"].values())
    for workload, row in result["workloads"].items():
        for name, one in row["systems"].items():
            if "failed" in one:
                wrong = True
                lines.append(f"failed: {name} of {workload}: {one['failed']}")
            elif one["wrong"]:
                wrong = True
                lines.append(f"WRONG, not timed: {name} of {workload} is off by {one['error']:.1e}")
    if result["compile_s"]:
        lines.append(f"torch.compile took {result['compile_s']:.0f} s in first calls, not in times")
    report.publish(result, sheets, lines, encoder_picture(result), path, console)
    return int(wrong)


def measure(
    systems: Sequence[System],
    batch: Batch,
    baseline: str,
    *,
    turns: int,
    seconds: float,
    may_compile: bool = True,
    deadline: float = float("inf"),
) -> tuple[dict[str, Any], float]:
    """One workload.

    Args:
        deadline: of `time.monotonic`; a system that has not answered by then is left out.

    Returns:
        The row of the report, and the seconds that compiling took.
    """
    device, dtype = batch.pixels.device, batch.pixels.dtype
    truth: Tensor | None = None
    found: dict[str, dict[str, Any]] = {}
    compiling = 0.0
    for system in systems:
        if system.compiles and not may_compile:
            continue
        started = time.perf_counter()
        try:
            with time_limit(deadline - time.monotonic()):
                output = rows(system.encode(batch))
                synchronize(device)
        except OutOfTime:
            compiling += time.perf_counter() - started if system.compiles else 0.0
            continue
        except Exception as failure:  # out of memory, say: the others still run
            found[system.name] = {"error": None, "wrong": True, "failed": str(failure)[:300]}
            continue
        first = time.perf_counter() - started
        if truth is None:
            truth = output.clone()  # systems may reuse what they return
        error = relative_error(output, truth)
        wrong = not error <= (system.tolerance or TOLERANCE[dtype])
        found[system.name] = {"first_call_s": first, "error": error, "wrong": wrong}
        compiling += first if system.compiles else 0.0
    timed = [s for s in systems if s.name in found and not found[s.name]["wrong"]]
    left = deadline - time.monotonic()
    time_in_turns(timed, [batch] * WARM_UP, device, seconds=left / 4, least=1)
    left = deadline - time.monotonic()
    least = 5 if seconds < left else 1
    times = time_in_turns(timed, [batch] * turns, device, seconds=min(seconds, left), least=least)
    for system in timed:
        one, samples = found[system.name], times[system.name]
        one |= report.summarise(samples.total)
        one["host_ms"] = report.summarise(samples.host)["p50_ms"]
        one["peak_mib"] = peak_mib(system, batch, device)
        budgets = [budget for budget, _ in system.replays(batch)]
        one["budgets"] = budgets
        replayed = replay_ms(system, batch)
        one["replay_ms"] = replayed
        one["fill"] = batch.tokens / sum(budgets) if all(budgets) and budgets else None
        if baseline in times:
            one |= report.ratio(samples.total, times[baseline].total)
    done = max((len(samples.total) for samples in times.values()), default=0)
    sequences = sum(t for t, _, _ in batch.grids)
    row = {"tokens": batch.tokens, "sequences": sequences, "turns": done, "systems": found}
    return row | _ours(found, baseline), compiling


def _ours(found: dict[str, dict[str, Any]], baseline: str) -> dict[str, Any]:
    """Our own medians, where other readers of the file look for them."""
    graph = found.get(baseline, {})
    eager = found.get(baseline.replace(" graph", " eager"), {})
    return {
        "budgets": graph.get("budgets"),
        "error_to_eager": graph.get("error"),
        "eager_ms": eager.get("p50_ms"),
        "graph_ms": graph.get("p50_ms"),
        "replay_ms": graph.get("replay_ms"),
        "host_ms": graph.get("host_ms"),
    }


def _workloads(
    args: argparse.Namespace, device: torch.device
) -> tuple[dict[str, list[Grid]], list[str]]:
    """What to run, and what this device is too slow for."""
    known = ALL_WORKLOADS
    if args.sizes:
        return {args.sizes.stem: load_sizes(args.sizes)}, []
    if args.workloads:
        if unknown := [name for name in args.workloads if name not in known]:
            raise ValueError(f"--workloads {unknown[0]!r} is none of {', '.join(map(repr, known))}")
        return {name: known[name] for name in args.workloads}, []
    if device.type == "cuda":
        return known, []
    tokens = {name: sum(t * h * w for t, h, w in grids) // 4 for name, grids in known.items()}
    small = {name: grids for name, grids in known.items() if tokens[name] <= MOST_CPU_TOKENS}
    return small, [f"{name} ({tokens[name]} tokens, CPU)" for name in known if name not in small]
