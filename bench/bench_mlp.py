"""mlp on the 8B tower, against torch: cuBLASLt with the GELU fused, the residual added apart."""

import pytest
import torch
import torch.nn.functional as F

from vitgraph.bench.exactness import relative_error
from vitgraph.kernels.mlp import mlp, mlp_reference

HIDDEN, INTERMEDIATE = 1152, 4304


def torch_mlp(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, residual, num_rows):
    inner = torch._addmm_activation(fc1_bias, x, fc1_weight.t(), use_gelu=True)
    return F.linear(inner, fc2_weight, fc2_bias).add_(residual)


@pytest.mark.parametrize(
    ("real", "capacity"), [(400, 400), (4096, 4096), (8160, 8160), (8400, 16384), (400, 24576)]
)
def bench_mlp(measure, rotate, real, capacity):
    def randn(*shape, scale=1.0):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(scale)

    x, residual = randn(capacity, HIDDEN), randn(capacity, HIDDEN)
    num_rows = torch.tensor([real], dtype=torch.int32, device="cuda")

    def make():
        fc1 = randn(INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5), randn(INTERMEDIATE)
        fc2 = randn(HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5), randn(HIDDEN)
        return x, *fc1, *fc2, residual, num_rows

    buffers = rotate(make)

    def check():
        x, *layers, residual, _ = buffers[0]
        expected = mlp_reference(
            x[:real].float(), *(t.float() for t in layers), residual[:real].float()
        )
        actual = mlp(x, *layers, residual.clone(), buffers[0][-1])
        error = relative_error(actual[:real], expected)
        assert error < 3e-3, f"relative error {error:.2e}"

    filled = f"{real}" if real == capacity else f"{real} of {capacity}"
    measure(f"mlp {filled}", mlp, baseline=torch_mlp, check=check, buffers=buffers,
            flops=4 * real * HIDDEN * INTERMEDIATE)  # fmt: skip
