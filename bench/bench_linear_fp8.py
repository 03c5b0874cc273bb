"""linear_fp8 on the layers of the 8B tower, against our own linear in bf16 and, on a row of its
own, against torch._scaled_mm (scales of rows and channels, bf16 out) with separate operations:
cuBLAS writes no e4m3, so its fc1 is not followed by what fc2 would need. Weights rotate.
"""

import pytest
import torch
import torch.nn.functional as F

from vitgraph.bench.exactness import relative_error
from vitgraph.kernels.fp8.linear_fp8 import (
    dequantize,
    linear_fp8,
    linear_fp8_reference,
    quantize_tiles,
    scales_of,
)
from vitgraph.kernels.fp8.quantize import E4M3, quantize, to_e4m3
from vitgraph.kernels.layer_norm import normalized_scale
from vitgraph.kernels.linear import linear

# (out, in) features, activation, residual
LAYERS = {
    "qkv": (3456, 1152, None, False),
    "fc1": (4304, 1152, "gelu_tanh", False),
    "fc2": (1152, 4304, None, True),
}
# (real rows, capacity)
ROWS = [(400, 400), (1024, 1024), (4096, 4096), (8160, 8160), (16384, 16384), (8400, 16384)]
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


@pytest.mark.parametrize(("real", "capacity"), ROWS)
@pytest.mark.parametrize("name", LAYERS)
def bench_linear_fp8(measure, rotate, name, real, capacity):
    problem = Problem(name, real, capacity)
    buffers = rotate(problem.layer)
    n, k = problem.out_features, problem.in_features
    wide = 1 if problem.activation else 2  # bytes of an output
    bytes = real * (k + n * (wide + 2 * (problem.residual is not None))) + n * k
    filled = f"{real}" if real == capacity else f"{real} of {capacity}"
    for label, baseline in (("bf16 linear", problem.bf16), ("_scaled_mm + ops", problem.cublas)):
        measure(
            f"fp8 {name} {filled}" + "/cuBLAS" * (baseline == problem.cublas),
            problem.fp8, baseline=baseline, baseline_name=label,
            check=lambda: problem.check(buffers[0]), buffers=buffers,
            flops=2 * real * n * k, bytes=bytes,
        )  # fmt: skip
