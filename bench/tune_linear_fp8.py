"""Time the candidates of kernels/fp8/linear_fp8_config.py on this GPU.

    python -m vitgraph.bench.tune_linear_fp8 [--layers qkv] [--rows 8160] [--save FILE]

Every candidate is checked against the reference, then timed inside a captured graph whose launches
rotate the weights. Candidates may spill some registers; what the table takes must not.
"""

import argparse
import json
from dataclasses import asdict
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from vitgraph.bench.bench_linear_fp8 import LAYERS, Problem
from vitgraph.bench.options import require
from vitgraph.bench.outputs import output_file
from vitgraph.bench.tune_linear import named
from vitgraph.bench.tuning import microseconds
from vitgraph.kernels.fp8.linear_fp8_config import CANDIDATES, linear_fp8_config

ROWS = (400, 1024, 4096, 8160, 16384)
WEIGHTS = 8  # copies the launches of a graph take in turn


def time_all(name: str, rows: int, table: Table) -> list[dict]:
    """A line and a row of the result for every candidate of a layer."""
    problem = Problem(name, rows, rows)
    buffers = [problem.layer() for _ in range(WEIGHTS)]
    capability = torch.cuda.get_device_capability()
    own = linear_fp8_config(capability, rows, problem.out_features, problem.in_features)
    results = []
    for label, config in CANDIDATES.items():
        us, reason = None, ""
        try:
            problem.check(buffers[0], config=config)
            us = microseconds([partial(problem.fp8, *each, config=config) for each in buffers])
        except Exception as error:  # wrong, or too large for this GPU
            reason = f"{type(error).__name__}: {error}"[:60]
        flops = 2 * rows * problem.out_features * problem.in_features
        numbers = (f"{us:.1f}", f"{flops / us / 1e6:.0f}") if us else (reason, "")
        table.add_row(name, str(rows), *numbers, label + " (table)" * (config == own))
        large = {"large": named(config.large), "small": named(config.small)}
        results.append({"layer": name, "rows": rows, "us": us} | asdict(config) | large)
    return results


def main() -> None:
    """Time, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--save", type=output_file, default=None, help="all of them, as JSON")
    args = parser.parse_args()
    require(torch.cuda.is_available(), "a CUDA GPU, and torch sees none")
    gpu = torch.cuda.get_device_name()
    table = Table("layer", "rows", "us", "TFLOP/s", "tiles", title=gpu, box=None)
    results = [one for n in args.layers for rows in args.rows for one in time_all(n, rows, table)]
    Console(width=120).print(table)
    if args.save:
        args.save.write_text(json.dumps({"gpu": gpu, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
