"""Find the tiles of kernels/tiles.py on this GPU: `python bench/tune_linear.py [--seconds 120]`.

Every candidate is compiled (in parallel), checked against float32 and timed inside a captured graph
whose launches rotate the weights, for each layer of the 8B tower and several row counts. Prints the
fastest few of each and writes all of them to JSON. Near one another means noise: prefer one row of
the table that is good at many counts to many rows that are best at one.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from vitgraph.graphs.benchmark.options import require
from vitgraph.kernels.linear import linear_reference
from vitgraph.kernels.linear_triton import linear_triton
from vitgraph.kernels.tiles import LinearConfig, Tile

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
        return float((self.out.float() - expected).norm() / expected.norm())

    def reference(self) -> Tensor:
        inputs = [t.float() for t in (self.x, self.weights[0], self.bias)]
        residual = None if self.residual is None else self.residual.float()
        return linear_reference(*inputs, activation=self.activation, residual=residual)

    def microseconds(self, config: LinearConfig) -> float:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for weight in self.weights:
                self.run(config, weight)
        times = []
        for _ in range(9):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / len(self.weights) * 1e3)
        return statistics.median(times[2:])


def candidates(shared_bytes: int, descriptors: bool) -> list[LinearConfig]:
    """Tiles whose stages fit the shared memory, on their own or in pairs."""
    found = []
    shapes = itertools.product((64, 128, 256), (64, 128, 256), (32, 64, 128), (3, 4, 6), (4, 8))
    for rows, cols, depth, stages, warps in shapes:
        accumulators = rows * cols // (32 * warps)
        used = (rows + cols) * depth * 2 * stages + 8192
        if not 16 <= accumulators <= 128 or used > shared_bytes:
            continue
        tile = Tile(rows, cols, depth, stages, parts=2 if cols >= 128 else 1)
        for programs in (1, 2) if 2 * used <= shared_bytes else (1,):
            found.append(LinearConfig(tile, None, 0, warps, programs, descriptors))
    return found


def compile_one(job: tuple[str, LinearConfig]) -> str | None:
    layer, config = job
    problem = Problem.make(layer, 64)
    try:
        problem.run(config, problem.weights[0])
        torch.cuda.synchronize()
    except Exception as error:  # a candidate that does not compile or fit is no candidate
        return repr(error)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120, help="stop after this time")
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--json", default="tune_linear.json")
    arguments = parser.parse_args()
    require(torch.cuda.is_available(), "a CUDA GPU, and torch sees none")
    deadline = time.monotonic() + arguments.seconds

    gpu = torch.cuda.get_device_properties(0)
    configs = candidates(gpu.shared_memory_per_block_optin, gpu.major >= 9)
    jobs = list(itertools.product(arguments.layers, configs))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=spawn) as pool:
        failed = dict(zip(jobs, pool.map(compile_one, jobs, chunksize=4), strict=True))

    results = []
    for layer, rows in itertools.product(arguments.layers, arguments.rows):
        problem = Problem.make(layer, rows)
        expected, times = problem.reference(), {}
        for config in configs:
            if time.monotonic() > deadline:
                break
            if failed[layer, config] is None and problem.error(config, expected) < 1.9e-3:
                times[config] = problem.microseconds(config)
        results += [
            {"layer": layer, "rows": rows, "us": us, **asdict(config)}
            for config, us in times.items()
        ]
        for config in sorted(times, key=times.get)[:3]:
            print(f"{layer:10} {rows:6} {times[config]:8.1f} us  {config}", flush=True)
    with open(arguments.json, "w") as file:
        json.dump({"gpu": gpu.name, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
