"""Find the tiles of kernels/linear_config.py on this GPU.

    python -m vitgraph.bench.tune_linear [--layers qkv] [--rows 400] [--seconds N] [--save FILE]

Layer by layer of the 8B tower every candidate is compiled (in parallel), checked against float32
and timed inside a captured graph whose launches rotate the weights, for several row counts. Prints
the fastest three of each beside the table's own choice. Near one another means noise: prefer one
row of the table that is good at many counts to many rows that are best at one.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from vitgraph.bench.console import make_console
from vitgraph.bench.exactness import relative_error
from vitgraph.bench.options import require
from vitgraph.bench.outputs import output_file
from vitgraph.bench.report import header
from vitgraph.bench.tuning import compile_all, microseconds
from vitgraph.kernels.linear import linear_reference
from vitgraph.kernels.linear_config import LinearConfig, Tile, linear_config
from vitgraph.kernels.linear_triton import linear_triton

# (out, in) features, activation, residual
LAYERS = {
    "qkv": (3456, 1152, None, False),
    "proj": (1152, 1152, None, True),
    "fc1": (4304, 1152, "gelu_tanh", False),
    "fc2": (1152, 4304, None, True),
    "merger fc1": (4608, 4608, "gelu", False),
    "merger fc2": (4096, 4608, None, False),
}
ROWS = (400, 1024, 4096, 8160, 16384)
WEIGHTS = 8  # copies the launches of a graph take in turn
TOLERANCE = 1.9e-3  # of bf16 outputs


@dataclass
class Problem:
    x: Tensor
    weights: list[Tensor]
    bias: Tensor
    activation: str | None
    residual: Tensor | None
    num_rows: Tensor
    out: Tensor

    @classmethod
    def make(cls, layer: str, rows: int) -> "Problem":
        out_features, in_features, activation, residual = LAYERS[layer]

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        return cls(
            x=randn(rows, in_features),
            weights=[randn(out_features, in_features) * in_features**-0.5 for _ in range(WEIGHTS)],
            bias=randn(out_features),
            activation=activation,
            residual=randn(rows, out_features) if residual else None,
            num_rows=torch.tensor([rows], dtype=torch.int32, device="cuda"),
            out=torch.empty(rows, out_features, device="cuda", dtype=torch.bfloat16),
        )

    def run(self, config: LinearConfig, weight: Tensor) -> None:
        linear_triton(
            self.x, weight, self.bias, self.activation, self.residual, self.num_rows, self.out,
            None, config,
        )  # fmt: skip

    def error(self, config: LinearConfig, expected: Tensor) -> float:
        self.out.fill_(float("nan"))
        self.run(config, self.weights[0])
        return relative_error(self.out, expected)

    def reference(self) -> Tensor:
        inputs = [t.float() for t in (self.x, self.weights[0], self.bias)]
        residual = None if self.residual is None else self.residual.float()
        return linear_reference(*inputs, activation=self.activation, residual=residual)

    def microseconds(self, config: LinearConfig) -> float:
        return microseconds([partial(self.run, config, weight) for weight in self.weights])


def candidates(shared_bytes: int, descriptors: bool) -> list[LinearConfig]:
    """Tiles whose stages fit the shared memory, on their own or in pairs; on Hopper all that the
    table has are among them."""
    found = []
    depths = (64, 128) if descriptors else (32, 64)
    shapes = itertools.product((64, 128), (64, 128, 256), depths, (3, 4, 5, 6, 8), (4, 8))
    for rows, cols, depth, stages, warps in shapes:
        accumulators = rows * cols // (32 * warps)
        used = (rows + cols) * depth * 2 * stages + 8192
        if not 16 <= accumulators <= 128 or used > shared_bytes:
            continue
        for parts in (1, 2, 4) if cols >= 128 else (1,):
            tile = Tile(rows, cols, depth, stages, parts)
            for programs in (1, 2) if 2 * used <= shared_bytes else (1,):
                found.append(LinearConfig(tile, None, 0, warps, programs, descriptors))
    return found


def compile_one(layer: str, config: LinearConfig) -> LinearConfig | None:
    """Compile and run once, in a process of the pool; None if that fails: then it is no
    candidate."""
    problem = Problem.make(layer, 64)
    try:
        problem.run(config, problem.weights[0])
        torch.cuda.synchronize()
    except Exception:  # of the compiler, or shared memory that does not suffice
        return None
    return config


def time_all(
    layer: str, rows: int, configs: list[LinearConfig], bar: Progress
) -> dict[LinearConfig, float]:
    """Microseconds of the candidates that are right."""
    problem = Problem.make(layer, rows)
    expected, times = problem.reference(), {}
    task = bar.add_task(f"{layer}, {rows} rows: timing", total=len(configs))
    for config in configs:
        if problem.error(config, expected) < TOLERANCE:
            times[config] = problem.microseconds(config)
        bar.advance(task)
    bar.remove_task(task)
    return times


def main() -> None:
    """Compile, time, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300, help="nothing starts after these")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="that compile")
    parser.add_argument("--save", type=output_file, default=None, help="all of them, as JSON")
    args = parser.parse_args()
    require(torch.cuda.is_available(), "a CUDA GPU, and torch sees none")
    deadline = time.monotonic() + args.seconds

    gpu = torch.cuda.get_device_properties(0)
    capability = (gpu.major, gpu.minor)
    configs = candidates(gpu.shared_memory_per_block_optin, gpu.major >= 9)
    table = Table("layer", "rows", "us", "tiles", "warps", "programs", title=gpu.name, box=None)
    results, left_out = [], []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=spawn) as pool, Progress() as bar:
        for layer in args.layers:
            compiled = None
            for rows in args.rows:
                if time.monotonic() > deadline:
                    left_out.append(f"{layer} with {rows} rows")
                    continue
                if compiled is None:
                    compile_layer = partial(compile_one, layer)
                    compiled = compile_all(pool, compile_layer, f"{layer}: compiling", configs, bar)
                    compiled = [config for config in compiled if config is not None]
                own = linear_config(capability, torch.bfloat16, rows, *LAYERS[layer][:2])
                times = time_all(layer, rows, [own, *compiled], bar)
                for config in [*sorted(times, key=times.get)[:3], own]:
                    table.add_row(*describe(layer, rows, config, times, own))
                results += [
                    {"layer": layer, "rows": rows, "us": us, "of_table": config == own}
                    | asdict(config)
                    | {"large": named(config.large), "small": named(config.small)}
                    for config, us in times.items()
                ]
    console = make_console()
    console.print(table)
    for what in left_out:
        console.print(f"left out: {what} (no time left of {args.seconds:g} s)")
    if args.save:
        args.save.write_text(json.dumps(header() | {"results": results}, indent=1) + "\n")


def named(tile: Tile | None) -> dict[str, int] | None:
    """A tile for JSON, which would write a plain list of numbers."""
    return tile and tile._asdict()


def describe(
    layer: str, rows: int, config: LinearConfig, times: dict[LinearConfig, float], own: LinearConfig
) -> list[str]:
    """A line of the table. Up to `small_rows` rows a configuration uses its small tile."""
    small = config.small is not None and rows <= config.small_rows
    tile = config.small if small else config.large
    cells = f"{tile.rows}x{tile.cols}x{tile.depth}, {tile.stages} stages, {tile.parts} parts"
    us = f"{times[config]:.1f}" if config in times else "wrong"
    mark = " (table)" if config == own else ""
    return [layer, str(rows), us, cells + mark, str(config.num_warps), str(config.programs_per_sm)]


if __name__ == "__main__":
    main()
