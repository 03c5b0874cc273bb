"""quantize on the layers of the 8B tower, against a copy of the weight: what it costs to do so in
every forward."""

import pytest
import torch

from vitgraph.kernels.fp8.quantize import quantize, quantize_reference


@pytest.mark.parametrize(
    ("name", "rows", "depth", "folded"),
    [("qkv", 3456, 1152, True), ("fc1", 4304, 1152, True), ("fc2", 1152, 4304, False)],
)
def bench_quantize(measure, rotate, name, rows, depth, folded):
    def randn(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    norm = (randn(depth), randn(depth)) if folded else ()
    buffers = rotate(lambda: (randn(rows, depth), randn(rows), *norm))

    def check():
        actual, expected = quantize(*buffers[0]), quantize_reference(*buffers[0])
        torch.testing.assert_close(actual.scale, expected.scale)
        assert (actual.weight.float() != expected.weight.float()).float().mean() < 1e-3

    measure(
        f"quantize {name} {rows}x{depth}", quantize, baseline=lambda weight, *_: weight.clone(),
        baseline_name="clone", bytes=3 * rows * depth, check=check, buffers=buffers,
    )  # fmt: skip
