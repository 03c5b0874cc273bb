"""LayerNorm against torch's, at the widths of the blocks (C) and of the deepstack mergers (4 C)."""

import pytest
import torch

from vitgraph.bench.exactness import relative_error
from vitgraph.kernels.layer_norm import layer_norm, layer_norm_e4m3, layer_norm_reference


@pytest.mark.parametrize(
    ("rows", "width", "capacity"),
    [
        pytest.param(400, 1152, 400, id="one_small_image"),
        pytest.param(8160, 1152, 8160, id="one_large_image"),
        pytest.param(8160, 1152, 4 * 8160, id="quarter_of_the_capacity"),
        pytest.param(8160, 1024, 8160, id="narrow_tower"),
        pytest.param(2040, 4608, 2040, id="deepstack_merger"),
    ],
)
def bench_layer_norm(measure, rotate, rows, width, capacity):
    device, dtype = "cuda", torch.bfloat16
    weight, bias = torch.randn(2, width, device=device, dtype=dtype).unbind()
    num_rows = torch.tensor([rows], dtype=torch.int32, device=device)
    # inputs and outputs are as large; twice the limit keeps both out of L2
    buffers = rotate(lambda: (torch.randn(capacity, width, device=device, dtype=dtype),))

    def check():
        x = buffers[0][0]
        actual = layer_norm(x, weight, bias, num_rows=num_rows)[:rows]
        expected = layer_norm_reference(x.double(), weight.double(), bias.double())[:rows]
        error = relative_error(actual, expected)
        assert error < 3e-3, f"relative error {error:.2e}"

    inside = f" in {capacity}" if capacity != rows else ""
    measure(
        f"layer_norm {rows}x{width} bf16{inside}",
        lambda x: layer_norm(x, weight, bias, num_rows=num_rows),
        baseline=lambda x: layer_norm_reference(x[:rows], weight, bias),
        bytes=4 * rows * width,
        check=check,
        buffers=buffers,
    )


def bench_layer_norm_e4m3(measure, rotate):
    """Half of the bytes to write, no parameters to read."""
    weight, bias = torch.randn(2, 1152, device="cuda", dtype=torch.bfloat16).unbind()
    buffers = rotate(lambda: (torch.randn(8160, 1152, device="cuda", dtype=torch.bfloat16),))
    measure(
        "layer_norm 8160x1152 bf16 to e4m3",
        lambda x: layer_norm_e4m3(x),
        baseline=lambda x: layer_norm(x, weight, bias),
        baseline_name="bf16 to bf16",
        bytes=3 * 8160 * 1152,
        buffers=buffers,
    )


def bench_copy_of_the_same_size(measure, rotate):
    """What any kernel of 8160 x 1152 bf16 rows in and out could hope for."""
    buffers = rotate(lambda: (torch.randn(8160, 1152, device="cuda", dtype=torch.bfloat16),))
    measure(
        "layer_norm: copy 8160x1152 bf16",
        lambda x: torch.neg(x),
        baseline=lambda x: x.clone(),
        baseline_name="clone",
        bytes=4 * 8160 * 1152,
        buffers=buffers,
    )


def bench_hot(measure):
    """The same buffers at each launch, as after the kernel that wrote them: mostly in L2."""
    x = torch.randn(8160, 1152, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(2, 1152, device="cuda", dtype=torch.bfloat16).unbind()
    measure(
        "layer_norm 8160x1152 bf16, hot",
        lambda: layer_norm(x, weight, bias),
        baseline=lambda: layer_norm_reference(x, weight, bias),
        bytes=4 * x.numel(),
    )
