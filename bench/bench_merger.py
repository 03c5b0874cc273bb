"""merger on the 8B tower, norm before (trunk) and after (deepstack) the shuffle, against torch."""

import functools

import pytest
import torch

from vitgraph.kernels.merger import merger, merger_reference

HIDDEN, OUT = 1152, 4096
TOKEN = 4 * HIDDEN


@pytest.mark.parametrize(
    ("real", "capacity"), [(100, 100), (1024, 1024), (2040, 2040), (100, 6144), (3100, 6144)]
)
@pytest.mark.parametrize("norm_width", [HIDDEN, TOKEN], ids=["trunk", "deepstack"])
def bench_merger(measure, rotate, norm_width, real, capacity):
    def randn(*shape, scale=1.0):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(scale)

    x = randn(4 * capacity, HIDDEN)
    counts = torch.tensor([4 * real, real], dtype=torch.int32, device="cuda")

    def make():
        norm = randn(norm_width), randn(norm_width)
        fc1 = randn(TOKEN, TOKEN, scale=TOKEN**-0.5), randn(TOKEN)
        return x, *norm, *fc1, randn(OUT, TOKEN, scale=TOKEN**-0.5), randn(OUT)

    buffers = rotate(make)
    run = functools.partial(merger, num_patches=counts[:1], num_tokens=counts[1:])

    def check():
        x, *weights = (t.float() for t in buffers[0])
        expected = merger_reference(x[: 4 * real], *weights)
        error = (run(*buffers[0])[:real].float() - expected).norm() / expected.norm()
        assert error < 3.5e-3, f"relative error {error:.2e}"

    where = "trunk" if norm_width == HIDDEN else "deepstack"
    filled = f"{real}" if real == capacity else f"{real} of {capacity}"
    measure(f"merger {where} {filled}", run, baseline=merger_reference, check=check,
            buffers=buffers, flops=2 * real * TOKEN * (TOKEN + OUT))  # fmt: skip
