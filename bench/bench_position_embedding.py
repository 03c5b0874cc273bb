"""The resampled position embedding, added in place, against the same formula in torch."""

import pytest
import torch

from vitgraph.bench.exactness import relative_error
from vitgraph.kernels.layout import layout
from vitgraph.kernels.position_embedding import position_embedding, position_embedding_reference


@pytest.mark.parametrize(
    ("grid", "capacity"),
    [
        pytest.param((1, 20, 20), 400, id="one_small_image"),
        pytest.param((1, 80, 102), 8160, id="one_large_image"),
        pytest.param((1, 80, 102), 4 * 8160, id="quarter_of_the_capacity"),
    ],
)
def bench_position_embedding(measure, rotate, grid, capacity):
    batch = layout(torch.tensor([grid], dtype=torch.int32, device="cuda"), capacity, 1)
    rows, width = grid[1] * grid[2], 1152
    table = torch.randn(48 * 48, width, device="cuda", dtype=torch.bfloat16)
    buffers = rotate(lambda: (torch.randn(capacity, width, device="cuda", dtype=torch.bfloat16),))
    coords = batch.coords[:rows]

    def check():
        hidden = buffers[0][0]
        expected = position_embedding_reference(hidden[:rows].float(), table.float(), coords)
        actual = position_embedding(hidden, table, batch.coords, batch.num_patches)[:rows]
        error = relative_error(actual, expected)
        assert error < 3e-3, f"relative error {error:.2e}"

    inside = f" in {capacity}" if capacity != rows else ""
    measure(
        f"position_embedding {rows}x{width} bf16{inside}",
        lambda hidden: position_embedding(hidden, table, batch.coords, batch.num_patches),
        baseline=lambda hidden: position_embedding_reference(hidden[:rows], table, coords),
        bytes=4 * rows * width + table.nbytes,
        check=check,
        buffers=buffers,
    )
