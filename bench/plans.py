"""What ways to plan a capture cost, the same budgets captured in each.

Plans are measured, or have the table's provider for every layer and our own attention, or are
batch-invariant.

    python -m vitgraph.bench.plans [--geometry 8b] [--seconds 120] [--save FILE]

Every batch of `vitgraph bench`, all captures taking turns. The result also holds what was measured
for the plans, by budget, layer and candidate: what a better table would be made of.
"""

import argparse
import json
import statistics

import torch
from rich.table import Table

from vitgraph.bench.console import make_console
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
WAYS = ("measured", "table", "batch-invariant")


class Measured(Qwen3VLGraphModel):
    """Every budget's plan is measured, also where the tables serve."""

    def _plan(self, patches: int, max_sequences: int) -> Plan:
        return self._measured_plan(patches, max_sequences)


class ByTable(Qwen3VLGraphModel):
    """The encoder's own plan for every budget: nothing is measured."""

    def _plan(self, patches: int, max_sequences: int) -> Plan:
        return self.module.plan


def capture(name: str, model: Qwen3VLGraphModel) -> System:
    """Budgets of `vitgraph bench`, captured."""
    manager = EncoderCudaGraphManager(model, CompilationConfig(True, BUDGETS, MAX_ITEMS))
    captured = measure_capture(manager.capture, model.device)
    return System(name, lambda batch: manager.execute(batch.mm_kwargs), **captured)


def invariant(encoder: Qwen3VLVisionEncoder) -> Qwen3VLVisionEncoder:
    """The same weights, batch-invariant."""
    other = Qwen3VLVisionEncoder(
        encoder.config, device="meta", dtype=encoder.dtype, ops="triton", batch_invariant=True
    )
    other.share_weights(encoder)
    return other


def row(name: str, times: dict[str, Times]) -> dict[str, float | str]:
    """Medians of one workload, and every other way's over the measured plans'."""
    medians = {system: statistics.median(of.total) for system, of in times.items()}
    ratios = {f"{way} ratio": medians[way] / medians["measured"] for way in WAYS[1:]}
    return {"workload": name, **medians, **ratios}


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
    measured = Measured(encoder)
    models = measured, ByTable(encoder), ByTable(invariant(encoder))
    systems = [capture(way, model) for way, model in zip(WAYS, models, strict=True)]
    result = header() | {
        "geometry": args.geometry,
        "capture_s": {system.name: system.capture_s for system in systems},
        "rows": [],
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
    view = Table("batch", *(f"{way} ms" for way in WAYS), *WAYS[1:], box=None)
    for name, grids in ALL_WORKLOADS.items():
        batch = make_batch(encoder, grids)
        time_in_turns(systems, [batch] * 3, device)
        share = args.seconds / len(ALL_WORKLOADS)
        times = row(name, time_in_turns(systems, [batch] * TURNS, device, seconds=share))
        result["rows"].append(times)
        numbers = (f"{value:.3f}" for value in times.values() if isinstance(value, float))
        view.add_row(name, *numbers)
        if args.save:
            args.save.write_text(json.dumps(result, indent=1) + "\n")
    console = make_console()
    console.print(view)
    for system in systems:
        console.print(f"capture, {system.name}: {system.capture_s:.1f} s")


if __name__ == "__main__":
    main()
