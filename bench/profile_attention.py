"""Hardware counters of packed attention, by Nsight Compute: how busy are the tensor cores?

    python -m vitgraph.bench.profile_attention [--libraries fa3-fwd] [--save FILE]
    python -m vitgraph.bench.profile_attention --csv FILE     # the counters of an earlier run

One launch of each case of bench_attention.py, ours and then every library's, profiled by `ncu`,
which needs a GPU whose counters may be read. Times are those of single launches at the profiler's
pace, for comparison within the table only. Busy is a share of the active cycles; an instruction's
stalls are average warps that wait, for every instruction issued.
"""

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

from vitgraph.bench.console import make_console
from vitgraph.bench.options import require
from vitgraph.bench.outputs import output_file
from vitgraph.bench.report import header

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "WarpStateStats",
    "SchedulerStats",
    "LaunchStats",
)
ACTIVE = ".avg.pct_of_peak_sustained_active"
COLUMNS = {  # counter -> heading
    "sm__pipe_tensor_op_hmma_cycles_active" + ACTIVE: "tensor cores %",
    "sm__inst_executed_pipe_xu" + ACTIVE: "exponentials %",
    "sm__pipe_fma_cycles_active" + ACTIVE: "multiply-add %",
    "smsp__issue_active" + ACTIVE: "issue slots %",
    "launch__registers_per_thread": "registers",
}
OURS = "attention_"  # what our kernels' names begin with
STALL = "smsp__average_warps_issue_stalled_"
STALL_END = "_per_issue_active.ratio"


def main() -> int:
    """Profile, or read; print; save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--libraries", nargs="*", default=["fa3-fwd"])
    parser.add_argument("--csv", type=Path, default=None, help="made by this script")
    parser.add_argument(
        "--save", type=output_file, default=None, help="JSON; the counters go beside it"
    )
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.launch:
        launch(args.libraries)
        return 0
    if args.csv:
        require(args.csv.is_file(), f"{args.csv}, which is no file")
    else:
        require(shutil.which("ncu"), "Nsight Compute's ncu, or --csv")
    text = args.csv.read_text() if args.csv else profile(args.libraries)
    result = summarise(text, args.libraries)
    show(result)
    if args.save:
        about = {"csv": args.csv.name} if args.csv else header()
        args.save.write_text(json.dumps(about | {"cases": result}, indent=1) + "\n")
        if not args.csv:
            args.save.with_suffix(".csv").write_text(text)
    return 0


def profile(libraries: list[str]) -> str:
    """Run this script under ncu; the counters as CSV."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv"]
    command += ["--page", "raw", *(part for name in SECTIONS for part in ("--section", name))]
    command += [sys.executable, __file__, "--launch", "--libraries", *libraries]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def launch(libraries: list[str]) -> None:
    """Every case once to warm up and once for the profiler."""
    import torch

    from vitgraph.bench.bench_attention import CASES, ours, random_qkv, theirs

    inputs = {case: random_qkv(sum(lengths)) for case, lengths in CASES.items()}
    calls = [
        (make(CASES[case]), qkv)
        for case, qkv in inputs.items()
        for make in (ours, *(lambda lengths, name=n: theirs(name, lengths) for n in libraries))
    ]
    for attend, qkv in calls:
        attend(qkv)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for attend, qkv in calls:
        attend(qkv)
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def summarise(text: str, libraries: list[str]) -> dict:
    """case -> library -> its main kernel's counters; the order of launches is that of `launch`."""
    from vitgraph.bench.bench_attention import CASES, useful_flops

    lines = [line for line in text.splitlines() if line.startswith('"')]
    names, _, *rows = csv.reader(io.StringIO("\n".join(lines)))
    kernels = [dict(zip(names, row, strict=False)) for row in rows]
    # FlashAttention-3 prepares its schedule in a kernel of its own.
    kernels = [k for k in kernels if "prepare" not in k["Kernel Name"]]
    expected = [(case, library) for case in CASES for library in ("ours", *libraries)]
    if len(kernels) != len(expected):
        raise ValueError(f"{len(kernels)} kernels for {len(expected)} launches")
    result: dict = {}
    for (case, library), kernel in zip(expected, kernels, strict=True):
        if kernel["Kernel Name"].startswith(OURS) != (library == "ours"):
            raise ValueError(f"{kernel['Kernel Name'][:60]} is no kernel of {library}")
        us = number(kernel["gpu__time_duration.sum"]) / 1e3
        stalls = {
            name.removeprefix(STALL).removesuffix(STALL_END): number(value)
            for name, value in kernel.items()
            if name.startswith(STALL) and name.endswith(STALL_END) and "_not_issued" not in name
        }
        stalls.pop("selected", None)  # the one that issues
        largest = sorted(stalls, key=stalls.__getitem__, reverse=True)[:4]
        result.setdefault(case, {})[library] = {
            "us": us,
            "tflop_s": useful_flops(CASES[case]) / us / 1e6,
            **{heading: number(kernel[name]) for name, heading in COLUMNS.items()},
            "stalls": {name: stalls[name] for name in largest},
        }
    return result


def number(text: str) -> float:
    return float(text.replace(",", ""))


def show(result: dict) -> None:
    """One row a case and library."""
    from rich.table import Table

    table = Table(title="attention under ncu", box=None, title_justify="left")
    table.add_column("case")
    table.add_column("library")
    for heading in ("us", "TFLOP/s", *COLUMNS.values()):
        table.add_column(heading, justify="right")
    table.add_column("stalls")
    for case, libraries in result.items():
        for library, row in libraries.items():
            cells = [f"{row['us']:.1f}", f"{row['tflop_s']:.0f}"]
            cells += [f"{row[heading]:.0f}" for heading in COLUMNS.values()]
            stalls = ", ".join(f"{name} {value:.1f}" for name, value in row["stalls"].items())
            table.add_row(case, library, *cells, stalls)
    make_console().print(table)


if __name__ == "__main__":
    sys.exit(main())
