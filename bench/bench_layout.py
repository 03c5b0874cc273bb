"""The layout of a batch from its grids, against the same in torch operations."""

import pytest
import torch

from vitgraph.kernels.layout import layout, layout_reference


@pytest.mark.parametrize(
    ("grids", "slots", "capacity", "sequences"),
    [
        pytest.param([(1, 20, 20)], 1, 400, 1, id="one_small_image"),
        pytest.param([(1, 80, 90)], 8, 32768, 64, id="one_large_image"),
        pytest.param([(1, 16, 16)] * 256, 256, 65536, 1024, id="many_small_images"),
        pytest.param([(256, 16, 16)], 256, 65536, 1024, id="one_long_video"),
    ],
)
def bench_layout(measure, grids, slots, capacity, sequences):
    grid_thw = torch.zeros(slots, 3, dtype=torch.int32)
    grid_thw[: len(grids)] = torch.tensor(grids)
    arguments = grid_thw.cuda(), capacity, sequences

    def check():
        actual, expected = layout(*arguments), layout_reference(*arguments)
        rows = expected.num_patches.item()
        assert actual.num_patches.item() == rows
        assert torch.equal(actual.cu_seqlens, expected.cu_seqlens)
        assert torch.equal(actual.coords[:rows], expected.coords[:rows])

    rows = sum(t * h * w for t, h, w in grids)
    measure(
        f"layout {len(grids)} items in {slots} slots, {rows} patches in {capacity}",
        lambda: layout(*arguments),
        baseline=lambda: layout_reference(*arguments),
        bytes=16 * rows + 4 * sequences + 12 * slots,
        check=check,
    )
