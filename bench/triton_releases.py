"""Our graphs under several releases of Triton: a process each on one GPU, taking turns.

    python -m vitgraph.bench.triton_releases NAME=SITE [NAME=SITE ...] [--rounds 4] [--save FILE]

SITE is what a process gets before its PYTHONPATH, folders with another Triton (and its torch) say,
or nothing: "3.6.0=". All processes capture the same budgets; then each encodes every workload a few
times and hands over to the next, round by round, so that the card's temperature is the same for
all. Reported are medians and quartiles of all rounds.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from rich.table import Table

from vitgraph.bench.console import make_console
from vitgraph.bench.families import build
from vitgraph.bench.options import checked_geometry
from vitgraph.bench.outputs import output_file
from vitgraph.bench.report import header
from vitgraph.bench.systems import Setup
from vitgraph.bench.timing import time_in_turns
from vitgraph.bench.workloads import WORKLOADS, make_batch
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder

CALLS = 10  # of a workload in a round


def serve(geometry: str) -> None:
    """In a release's process: capture, then measure a round for every line on standard input."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES[geometry], device=device, dtype=dtype)
    systems, missing = build(Setup(encoder), ["vitgraph"])
    if missing:
        raise RuntimeError(f"not captured: {missing}")
    graph = [system for system in systems if system.name.endswith("graph")]
    batches = {name: make_batch(encoder, grids) for name, grids in WORKLOADS.items()}
    for batch in batches.values():
        time_in_turns(graph, [batch] * 3, device)
    answer(header=header(device), capture_s=graph[0].capture_s)
    for _ in sys.stdin:  # a line a round
        times = {
            name: time_in_turns(graph, [batch] * CALLS, device)[graph[0].name].total
            for name, batch in batches.items()
        }
        answer(times=times)


def answer(**fields: Any) -> None:
    """A line for the parent; what others print goes elsewhere."""
    print(json.dumps(fields), file=REPLY, flush=True)


class Release:
    """The process of one release."""

    def __init__(self, name: str, site: str, geometry: str) -> None:
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
        self.name, self.times = name, {workload: [] for workload in WORKLOADS}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vitgraph.bench.triton_releases", "--serve", geometry],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )

    def read(self) -> dict[str, Any]:
        """Its next line.

        Raises:
            RuntimeError: it ended instead.
        """
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}")
        try:
            return json.loads(line)
        except json.JSONDecodeError:  # printed by something on its path
            raise RuntimeError(f"{self.name} answered {line!r:.200}") from None

    def round(self) -> None:
        """Let it measure every workload."""
        with contextlib.suppress(BrokenPipeError):  # it ended: `read` says so
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        for workload, times in self.read()["times"].items():
            self.times[workload] += times

    def summary(self) -> dict[str, list[float]]:
        """Quartiles of every workload, ms."""
        return {name: statistics.quantiles(times, n=4) for name, times in self.times.items()}


def overlaps(quartiles: list[list[float]]) -> bool:
    """Whether there is a time that lies between the quartiles of all."""
    return max(low for low, _, _ in quartiles) <= min(high for _, _, high in quartiles)


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="+", metavar="NAME=SITE")
    parser.add_argument("--geometry", type=checked_geometry, default="8b")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--save", type=output_file, default=None)
    args = parser.parse_args()
    names = [one.partition("=")[0] for one in args.releases]
    if wrong := [one for one in args.releases if "=" not in one[1:]]:
        parser.error(f"{wrong[0]!r} is not of the form NAME=SITE")
    if len(set(names)) < len(names):
        parser.error(f"a name comes twice in {' '.join(names)}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} must be at least 1")
    releases = [Release(*one.split("=", 1), args.geometry) for one in args.releases]
    result: dict[str, Any] = {"geometry": args.geometry, "rounds": args.rounds, "releases": {}}
    started = time.monotonic()
    try:
        for release in releases:
            result["releases"][release.name] = release.read()
        print(f"captured after {time.monotonic() - started:.0f} s", flush=True)
        for turn in range(args.rounds):
            for release in releases if turn % 2 == 0 else reversed(releases):
                release.round()
            for release in releases:
                result["releases"][release.name]["quartiles_ms"] = release.summary()
            if args.save:  # after every round: a run that is cut keeps what it has
                result["rounds"] = turn + 1
                args.save.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        for release in releases:
            release.process.kill()
    make_console().print(table(result))
    return 0


def table(result: dict[str, Any]) -> Table:
    """Medians, and whether the quartiles of all overlap."""
    releases = result["releases"]
    view = Table("our graph, ms", *releases, "quartiles overlap", box=None)
    for workload in WORKLOADS:
        quartiles = [one["quartiles_ms"][workload] for one in releases.values()]
        medians = (f"{median:.2f}" for _, median, _ in quartiles)
        view.add_row(workload, *medians, "yes" if overlaps(quartiles) else "no")
    return view


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        REPLY = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        serve(sys.argv[2])
    else:
        sys.exit(main())
