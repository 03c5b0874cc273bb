"""Time the candidates of kernels/fp8/linear_fp8_config.py on this GPU, beside bf16.

    python -m vitgraph.bench.tune_linear_fp8 [--layers qkv] [--rows 8160] [--kernels gluon] \
        [--save FILE]

Every candidate, of the portable kernel ("triton") and of the one for Hopper ("gluon"), is checked
against the reference, then timed inside a captured graph whose launches rotate the weights; so is
our own linear in bf16. Candidates may spill some registers; what the table takes must not.
"""

import argparse
import json
from dataclasses import asdict
from functools import partial

import torch
import torch.nn.functional as F
from rich.table import Table

from vitgraph.bench.console import make_console
from vitgraph.bench.exactness import relative_error
from vitgraph.bench.options import require
from vitgraph.bench.outputs import output_file
from vitgraph.bench.report import header
from vitgraph.bench.tune_linear import named
from vitgraph.bench.tuning import microseconds
from vitgraph.kernels.fp8.linear_fp8 import (
    dequantize,
    linear_fp8,
    linear_fp8_reference,
    quantize_tiles,
    scales_of,
)
from vitgraph.kernels.fp8.linear_fp8_config import (
    CANDIDATES,
    HOPPER_CANDIDATES,
    hopper_fp8_config,
    linear_fp8_config,
)
from vitgraph.kernels.fp8.quantize import E4M3, quantize, to_e4m3
from vitgraph.kernels.launch import hopper_tier_unavailable
from vitgraph.kernels.layer_norm import normalized_scale
from vitgraph.kernels.linear import linear

# (out, in) features, activation, residual
LAYERS = {
    "qkv": (3456, 1152, None, False),
    "fc1": (4304, 1152, "gelu_tanh", False),
    "fc2": (1152, 4304, None, True),
}
ROWS = (400, 1024, 4096, 8160, 16384)
KERNELS = {"triton": CANDIDATES, "gluon": HOPPER_CANDIDATES}
WEIGHTS = 8  # copies the launches of a graph take in turn
TOLERANCE = {torch.bfloat16: 2.5e-3, E4M3: 3.5e-2}  # of outputs; in e4m3 half a step is 2^-4


class Problem:
    """Rows and layers of both dtypes; the layers are what rotates."""

    def __init__(self, name: str, real: int, capacity: int) -> None:
        self.out_features, self.in_features, self.activation, has_residual = LAYERS[name]
        rows = self.randn(capacity, self.in_features)
        self.x16 = rows
        if has_residual:
            self.x = torch.empty(rows.shape, dtype=E4M3, device="cuda")
            self.x_scale = scales_of(capacity, self.in_features, rows.device)
            quantize_tiles(rows.float(), self.x, self.x_scale)
        else:
            self.x16 = F.layer_norm(rows, (self.in_features,))
            self.x_scale = normalized_scale(self.in_features)
            self.x = to_e4m3(self.x16.float() / self.x_scale)
        self.row_scales = torch.rand(capacity, 1, device="cuda")  # of cuBLAS
        self.bias = self.randn(self.out_features)
        self.residual = self.randn(capacity, self.out_features) if has_residual else None
        self.num_rows = torch.tensor([real], dtype=torch.int32, device="cuda")
        self.capacity = capacity

    @staticmethod
    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(scale)

    def layer(self) -> tuple:
        """A weight in bf16 and in e4m3, and memory for what comes out of either."""
        weight = self.randn(self.out_features, self.in_features, scale=self.in_features**-0.5)
        out16 = torch.empty(self.capacity, self.out_features, dtype=weight.dtype, device="cuda")
        out, out_scale = out16, None
        if self.activation:
            out = torch.empty(out16.shape, dtype=E4M3, device="cuda")
            out_scale = scales_of(self.capacity, self.out_features, out.device)
        return weight, quantize(weight, self.bias), out16, out, out_scale

    def fp8(self, weight, layer, out16, out, out_scale, run=linear_fp8, **options):
        return run(
            self.x, self.x_scale, layer, activation=self.activation, residual=self.residual,
            num_rows=self.num_rows, out=out, out_scale=out_scale, **options,
        )  # fmt: skip

    def portable(self, weight, layer, out16, out, out_scale):
        shape = (self.capacity, self.out_features, self.in_features)
        config = linear_fp8_config(torch.cuda.get_device_capability(), *shape)
        return self.fp8(weight, layer, out16, out, out_scale, config=config)

    def bf16(self, weight, layer, out16, out, out_scale):
        return linear(
            self.x16, weight, self.bias, activation=self.activation, residual=self.residual,
            num_rows=self.num_rows, out=out16,
        )  # fmt: skip

    def cublas(self, weight, layer, out16, out, out_scale):
        y = torch._scaled_mm(
            self.x, layer.weight.t(), self.row_scales, layer.scale[None, :], self.bias,
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip
        y = F.gelu(y, approximate="tanh") if self.activation else y
        return y.add_(self.residual) if self.residual is not None else y

    def check(self, buffers: tuple, **options) -> None:
        """Of one layer, against float32 sums of the same operands."""
        real = self.num_rows.item()
        out, out_scale = buffers[3:]
        self.fp8(*buffers, **options)
        actual = out if out_scale is None else dequantize(out, out_scale, torch.float32)
        expected = torch.empty_like(buffers[2], dtype=torch.float32)
        residual = None if self.residual is None else self.residual.float()
        linear_fp8_reference(
            self.x, self.x_scale, buffers[1], activation=self.activation, residual=residual,
            out=expected,
        )  # fmt: skip
        error = relative_error(actual[:real], expected[:real])
        assert error < TOLERANCE[out.dtype], f"relative error {error:.2e}"


def time_all(name: str, rows: int, kernels: list[str], table: Table) -> list[dict]:
    """A line and a row of the result for every candidate of a layer, and for bf16."""
    problem = Problem(name, rows, rows)
    buffers = [problem.layer() for _ in range(WEIGHTS)]
    flops = 2 * rows * problem.out_features * problem.in_features
    own = config_of_table(rows, problem.out_features, problem.in_features)
    results = []

    def add(label: str, us: float | None, reason: str = "", **fields: object) -> None:
        numbers = (f"{us:.1f}", f"{flops / us / 1e6:.0f}") if us else (reason, "")
        table.add_row(name, str(rows), *numbers, label)
        results.append({"layer": name, "rows": rows, "tiles": label, "us": us} | fields)

    add("bf16 linear", microseconds([partial(problem.bf16, *each) for each in buffers]))
    for label, config in (pair for kernel in kernels for pair in KERNELS[kernel].items()):
        us, reason = None, ""
        try:
            problem.check(buffers[0], config=config)
            us = microseconds([partial(problem.fp8, *each, config=config) for each in buffers])
        except Exception as error:  # wrong, or too large for this GPU
            reason = f"{type(error).__name__}: {error}"[:60]
        fields = asdict(config)
        fields |= {key: named(fields[key]) for key in ("large", "small") if key in fields}
        add(label + " (table)" * (config == own), us, reason, **fields)
    return results


def config_of_table(rows: int, out_features: int, in_features: int) -> object:
    """What `linear_fp8` takes by itself on this GPU."""
    own = None
    if not hopper_tier_unavailable(torch.device("cuda")):
        own = hopper_fp8_config(rows)
    capability = torch.cuda.get_device_capability()
    return own or linear_fp8_config(capability, rows, out_features, in_features)


def main() -> None:
    """Time, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--save", type=output_file, default=None, help="all of them, as JSON")
    args = parser.parse_args()
    require(torch.cuda.is_available(), "a CUDA GPU, and torch sees none")
    gpu = torch.cuda.get_device_name()
    table = Table("layer", "rows", "us", "TFLOP/s", "tiles", title=gpu, box=None)
    results = [
        one
        for name in args.layers
        for rows in args.rows
        for one in time_all(name, rows, args.kernels, table)
    ]
    make_console().print(table)
    if args.save:
        args.save.write_text(json.dumps(header() | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
