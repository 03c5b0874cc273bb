"""linear on the layers of the 8B tower, against cuBLAS with separate operations and, on a row of
its own, against the best fused cuBLAS call. Weights rotate: in the encoder, too, each is read once.
"""

import pytest
import torch
import torch.nn.functional as F

from vitgraph.bench.exactness import relative_error
from vitgraph.kernels.linear import linear, linear_reference

# (out, in) features, activation, residual
LAYERS = {
    "qkv": (3456, 1152, None, False),
    "proj": (1152, 1152, None, True),
    "fc1": (4304, 1152, "gelu_tanh", False),
    "fc2": (1152, 4304, None, True),
}
# (real rows, capacity)
ROWS = [(400, 400), (1024, 1024), (4096, 4096), (8160, 8160), (16384, 16384)]
ROWS += [(8400, 16384), (400, 24576)]


def separate_operations(x, weight, bias, residual, out, num_rows, activation):
    y = F.linear(x, weight, bias)
    y = F.gelu(y, approximate="tanh") if activation else y
    return y.add_(residual) if residual is not None else y


def fused_call(x, weight, bias, residual, out, num_rows, activation):
    """The GELU in cuBLASLt's epilogue; the residual as its C, which leaves no place for a bias."""
    if activation:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return torch.addmm(residual, x, weight.t())


@pytest.mark.parametrize(("real", "capacity"), ROWS)
@pytest.mark.parametrize("name", LAYERS)
def bench_linear(measure, rotate, name, real, capacity):
    out_features, in_features, activation, has_residual = LAYERS[name]

    def make():
        def randn(*shape, scale=1.0):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(scale)

        weight = randn(out_features, in_features, scale=in_features**-0.5)
        return x, weight, bias, residual, torch.empty_like(y), num_rows, activation

    x = torch.randn(capacity, in_features, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(capacity, out_features, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(out_features, device="cuda", dtype=torch.bfloat16)
    residual = y if has_residual else None
    num_rows = torch.tensor([real], dtype=torch.int32, device="cuda")

    def run(x, weight, bias, residual, out, num_rows, activation):
        return linear(
            x, weight, bias, activation=activation, residual=residual, num_rows=num_rows, out=out
        )

    buffers = rotate(make)

    def check():
        weight = buffers[0][1]
        actual = run(*buffers[0])[:real].float()
        added = None if residual is None else residual[:real].float()
        inputs = (t.float() for t in (x[:real], weight, bias))
        expected = linear_reference(*inputs, activation=activation, residual=added)
        error = relative_error(actual, expected)
        assert error < 1.8e-3, f"relative error {error:.2e}"

    sizes = real * (in_features + (1 + has_residual) * out_features) + out_features * in_features
    costs = {"flops": 2 * real * out_features * in_features, "bytes": 2 * sizes}
    filled = f"{real}" if real == capacity else f"{real} of {capacity}"
    baselines = {"cuBLAS + ops": separate_operations}
    if activation or has_residual:
        baselines["cuBLAS fused" if activation else "fused, no bias"] = fused_call
    for baseline_name, baseline in baselines.items():
        label = f"{name} {filled}" + "/fused" * (baseline is fused_call)
        measure(label, run, baseline=baseline, baseline_name=baseline_name,
                check=check, buffers=buffers, **costs)  # fmt: skip
