"""Rotary in place on packed qkv against the same formula in torch operations."""

import pytest
import torch

from vitgraph.bench.exactness import relative_error
from vitgraph.kernels.layout import layout
from vitgraph.kernels.rotary import (
    rotary,
    rotary_frequencies,
    rotary_reference,
    rotary_table,
)


@pytest.mark.parametrize(
    ("grid", "head_dim", "capacity"),
    [
        pytest.param((1, 20, 20), 72, 400, id="one_small_image"),
        pytest.param((1, 80, 102), 72, 8160, id="one_large_image"),
        pytest.param((1, 80, 102), 72, 4 * 8160, id="quarter_of_the_capacity"),
        pytest.param((1, 80, 102), 64, 8160, id="narrow_tower"),
    ],
)
def bench_rotary(measure, rotate, grid, head_dim, capacity):
    batch = layout(torch.tensor([grid], dtype=torch.int32, device="cuda"), capacity, 1)
    frequencies = rotary_frequencies(head_dim, device="cuda")
    rows, shape = grid[1] * grid[2], (3, 16, head_dim)
    buffers = rotate(lambda: (torch.randn(capacity, *shape, device="cuda", dtype=torch.bfloat16),))
    table = rotary_table(batch.coords, frequencies, batch.num_patches)

    def check():
        qkv = buffers[0][0]
        expected = rotary_reference(qkv[:rows].double(), table[:rows])
        actual = rotary(qkv, table, batch.num_patches)[:rows]
        error = relative_error(actual, expected)
        assert error < 3e-3, f"relative error {error:.2e}"

    inside = f" in {capacity}" if capacity != rows else ""
    measure(
        f"rotary {rows}x16x{head_dim} bf16{inside}",
        lambda qkv: rotary(qkv, table, batch.num_patches),
        baseline=lambda qkv: rotary_reference(qkv[:rows], table[:rows]),
        bytes=2 * 4 * rows * 16 * head_dim,
        check=check,
        buffers=buffers,
    )


def bench_rotary_table(measure):
    """Once a forward."""
    batch = layout(torch.tensor([(1, 80, 102)], dtype=torch.int32, device="cuda"), 8160, 1)
    frequencies = rotary_frequencies(72, device="cuda")
    measure(
        "rotary table 8160x72",
        lambda: rotary_table(batch.coords, frequencies, batch.num_patches),
        bytes=8160 * (72 * 4 + 16),
    )


def bench_negation_of_the_same_size(measure, rotate):
    """What any kernel could hope for that changes as many bytes in place."""
    size = 8160 * 2 * 16 * 72
    buffers = rotate(lambda: (torch.randn(size, device="cuda", dtype=torch.bfloat16),))
    measure("rotary: neg_ 8160x2x16x72 bf16", lambda x: x.neg_(), bytes=4 * size, buffers=buffers)
