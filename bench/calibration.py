"""What calibration gains over the table: the same budgets captured with measured plans and with the
default provider of every layer, and our own attention.

    python -m vitgraph.bench.calibration [--geometry 8b] [--seconds 120] [--save FILE]

Every batch of `vitgraph bench` that graphs serve, both captures taking turns. The result also holds
what calibration measured, by budget, layer and candidate: what a better table would be made of.
"""

import argparse
import json
import statistics

import torch
from rich.console import Console
from rich.table import Table

from vitgraph.bench.options import checked_geometry, require
from vitgraph.bench.outputs import output_file
from vitgraph.bench.report import header
from vitgraph.bench.systems import System, measure_capture
from vitgraph.bench.timing import Times, time_in_turns
from vitgraph.bench.workloads import ALL_WORKLOADS, BUDGETS, MAX_ITEMS, make_batch
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.encoder.operations import Plan
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager
from vitgraph.graphs.qwen3_vl import Qwen3VLGraphModel

TURNS = 40


class ByTable(Qwen3VLGraphModel):
    """The encoder's own plan for every budget: nothing is measured."""

    def _calibrated_plan(self, patches: int, max_sequences: int) -> Plan:
        return self.module.plan


def capture(name: str, model: Qwen3VLGraphModel) -> System:
    """Budgets of `vitgraph bench`, captured."""
    manager = EncoderCudaGraphManager(model, CompilationConfig(True, BUDGETS, MAX_ITEMS))
    captured = measure_capture(manager.capture, model.device)
    return System(name, lambda batch: manager.execute(batch.mm_kwargs), **captured)


def row(name: str, times: dict[str, Times]) -> dict[str, float | str]:
    """Medians of one workload, and the table's over the calibrated one's."""
    medians = {system: statistics.median(of.total) for system, of in times.items()}
    return {"workload": name, **medians, "ratio": medians["table"] / medians["calibrated"]}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", type=checked_geometry, default="8b")
    parser.add_argument("--seconds", type=float, default=120, help="for all workloads")
    parser.add_argument("--save", type=output_file, default=None)
    args = parser.parse_args()
    require(torch.cuda.is_available(), "a CUDA GPU, and torch sees none")
    device = torch.device("cuda")
    encoder = Qwen3VLVisionEncoder.random(
        GEOMETRIES[args.geometry], device=device, dtype=torch.bfloat16
    )
    measured = Qwen3VLGraphModel(encoder)
    systems = [capture("calibrated", measured), capture("table", ByTable(encoder))]
    view = Table("batch", "calibrated ms", "table ms", "table / calibrated", box=None)
    rows = []
    for name, grids in ALL_WORKLOADS.items():
        batch = make_batch(encoder, grids)
        time_in_turns(systems, [batch] * 3, device)
        share = args.seconds / len(ALL_WORKLOADS)
        rows.append(row(name, time_in_turns(systems, [batch] * TURNS, device, seconds=share)))
        numbers = (f"{rows[-1][key]:.3f}" for key in ("calibrated", "table", "ratio"))
        view.add_row(name, *numbers)
    result = header() | {
        "geometry": args.geometry,
        "capture_s": {system.name: system.capture_s for system in systems},
        "rows": rows,
        "plans": {
            budget: {
                "attention": plan.attention,
                "providers": plan.providers,
                "microseconds": plan.microseconds,
                "left_out": plan.left_out,
            }
            for budget, plan in measured.plans.items()
        },
    }
    console = Console(width=120)
    console.print(view)
    for system in systems:
        console.print(f"capture, {system.name}: {system.capture_s:.1f} s")
    if args.save:
        args.save.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
