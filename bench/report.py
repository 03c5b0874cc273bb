"""Statistics and tables of a measurement, for the terminal and Markdown."""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODULES = ("torch", "triton", "transformers", "vllm", "sglang", "flashinfer")


def header(device: torch.device | None = None) -> dict[str, str]:
    """Hardware and versions of a result; the GPU's where it is not told otherwise.

    Versions are those of the modules that are loaded, so call it when everything has run: what pip
    knows of may be another copy, further down the path.
    """
    on_gpu = device.type == "cuda" if device else torch.cuda.is_available()
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    loaded = {name: sys.modules[name] for name in MODULES if name in sys.modules}
    return {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "none",
        "driver": (_output(*driver).splitlines() or ["unknown"])[0] if on_gpu else "none",
        "cuda": torch.version.cuda or "none",
        "ptxas": _ptxas(device) if on_gpu else "none",
        **{name: getattr(module, "__version__", "unknown") for name, module in loaded.items()},
        "python": platform.python_version(),
        "commit": os.environ.get("VITGRAPH_COMMIT")
        or _output("git", "rev-parse", "--short", "HEAD")
        or "unknown",
    }


def _ptxas(device: torch.device | None) -> str:
    """Which release assembles Triton's kernels here."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        major, minor = torch.cuda.get_device_capability(device)
        return get_ptxas(10 * major + minor).version
    except (ImportError, RuntimeError):  # a Triton that names it otherwise, or has none
        return "unknown"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def percentiles_of(samples: Sequence[float]) -> list[float]:
    """The 1st to the 99th."""
    samples = list(samples) if len(samples) > 1 else [*samples] * 2
    return statistics.quantiles(samples, n=100, method="inclusive")


def summarise(samples: Sequence[float]) -> dict[str, Any]:
    """Mean, median, 99th percentile and quartiles of milliseconds."""
    percentiles = percentiles_of(samples)
    return {
        "mean_ms": statistics.fmean(samples),
        "p50_ms": percentiles[49],
        "p99_ms": percentiles[98],
        "quartiles_ms": [percentiles[24], percentiles[74]],
    }


def ratio(others: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """How many times as long the others took, turn by turn: median and quartiles."""
    turns = [other / own for other, own in zip(others, ours, strict=True)]
    percentiles = percentiles_of(turns)
    return {"ratio": percentiles[49], "ratio_quartiles": [percentiles[24], percentiles[74]]}


@dataclass(frozen=True)
class Sheet:
    """A table of strings, its first column aligned to the left; long ones are only saved."""

    title: str
    head: list[str]
    rows: list[list[str]]
    printed: bool = True

    def print(self, console: Console) -> None:
        """On the terminal."""
        view = Table(title=self.title, title_justify="left", box=None, padding=(0, 1))
        for index, name in enumerate(self.head):
            view.add_column(name, justify="right" if index else "left", no_wrap=not index)
        for row in self.rows:
            view.add_row(*row)
        console.print(view)

    def markdown(self) -> str:
        """In Markdown, its title above it."""
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return f"{self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def encoder_sheets(result: dict[str, Any]) -> list[Sheet]:
    """Median times, ratios to ours, and everything else of `vitgraph bench encoder`."""
    names = [name for name, about in result["systems"].items() if "missing" not in about]
    times, ratios, details = [], [], []
    for workload, row in result["workloads"].items():
        start = [workload, str(row["tokens"])]
        found = row["systems"]
        cells = (number(found.get(name, {}).get("p50_ms")) for name in names)
        times.append([*start, *cells, number(row["floor_ms"])])
        ratios.append([*start, *(_ratio_cell(found.get(name, {})) for name in names)])
        for name, one in found.items():
            fill = one.get("fill")
            details.append(
                [
                    workload,
                    name,
                    *(number(one.get(f"{key}_ms")) for key in ("mean", "p50", "p99")),
                    number(one.get("replay_ms")),
                    number(one.get("host_ms")),
                    "-" if fill is None else f"{fill:.0%}",
                    number(one.get("peak_mib"), 0),
                    "failed" if one["error"] is None else f"{one['error']:.1e}",
                ]
            )
    systems = [
        [name, number(about["capture_s"], 1), number(about["memory_mib"], 0)]
        for name, about in result["systems"].items()
        if "missing" not in about
    ]
    head = ["workload", "tokens", *names]
    detail = ["mean", "P50", "P99", "replay", "host", "fill", "peak MiB", "error"]
    return [
        Sheet("Median time to the synchronised result, ms", [*head, "floor"], times),
        Sheet(f"Times as long as {result['baseline']}: median (quartiles)", head, ratios),
        Sheet("Every number, ms", ["workload", "system", *detail], details, False),
        Sheet("Capture", ["system", "seconds", "MiB"], systems, False),
    ]


def _ratio_cell(one: dict[str, Any]) -> str:
    if "ratio" not in one:
        return "-"
    low, high = one["ratio_quartiles"]
    return f"{one['ratio']:.2f} ({low:.2f}-{high:.2f})"


def serving_sheets(experiment: dict[str, Any], *, graphs: bool = True) -> list[Sheet]:
    """Mean, P50 and P99 of every system of one experiment, and what graphs changed; without
    graphs, on a CPU, what packing did."""
    rows = []
    for name, one in experiment["systems"].items():
        eager = experiment["systems"].get(name.replace(" graph", " eager"))
        gain = 1 - one["mean_ms"] / eager["mean_ms"] if eager and name.endswith("graph") else None
        times = (number(one[f"{key}_ms"]) for key in ("mean", "p50", "p99"))
        scaling = [number(one.get("speedup")), number(one.get("efficiency"))]
        saved = "-" if gain is None else f"{gain:+.1%}"
        rows.append([name, *times, _ratio_cell(one), saved, *scaling * ("ranks" in experiment)])
    head = ["system", "mean", "P50", "P99", f"times {experiment['baseline']}"]
    head += ["graphs save (mean)" if graphs else "packing saves (no graphs on a CPU)"]
    head += ["speed over 1 rank", "a rank"] * ("ranks" in experiment)
    return [Sheet(f"{experiment['title']}: encoder time, ms", head, rows)]


def missing_lines(systems: dict[str, dict[str, Any]], not_run: Sequence[str] = ()) -> list[str]:
    """What is not in the tables, and why."""
    lines = [f"not here: {name}: {s['missing']}" for name, s in systems.items() if "missing" in s]
    return lines + [f"left out: {what}" for what in not_run]


def title_of(result: dict[str, Any]) -> str:
    """One line that says where the numbers are from."""
    gpu = result["gpu"] if result["gpu"] != "none" else "CPU (no graphs: times mean nothing)"
    versions = ", ".join(
        f"{name} {result[name]}"
        for name in ("driver", "cuda", "ptxas", *MODULES)
        if result.get(name, "none") != "none"
    )
    tower = f"{result['geometry']} tower, {result['dtype']}, " if "geometry" in result else ""
    return f"{tower}{gpu}, {versions}, commit {result['commit']}, {result['date']}"


def save(
    result: dict[str, Any], path: Path, sheets: Sequence[Sheet] = (), lines: Sequence[str] = ()
) -> None:
    """Write PATH as JSON, and beside it the tables as .md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    text = [title_of(result), *(sheet.markdown() for sheet in sheets), *(f"- {x}" for x in lines)]
    path.with_suffix(".md").write_text("\n\n".join(text).rstrip() + "\n")


def publish(
    result: dict[str, Any],
    sheets: Sequence[Sheet],
    lines: Sequence[str],
    picture: "Figure | None",
    path: Path | None,
    console: Console,
) -> None:
    """Print what matters; save everything where there is a path."""
    console.print(title_of(result), highlight=False)
    for sheet in sheets:
        if sheet.printed:
            sheet.print(console)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    if path:
        save(result, path, sheets, lines)
        if picture is not None:
            picture.savefig(path.with_suffix(".png"), dpi=110)
        console.print(f"wrote {path.with_suffix('')}.json, .md, .png", markup=False)
