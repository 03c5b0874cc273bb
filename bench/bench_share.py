"""Rows moved between a rank's share and the batch: what sequence parallelism adds to each layer."""

import pytest
import torch

from vitgraph.kernels.layout import layout
from vitgraph.kernels.share import (
    collect_rows,
    collect_rows_reference,
    share,
    take_rows,
    take_rows_reference,
)

RANKS, WIDTH = 2, 3 * 16 * 72


@pytest.mark.parametrize("grid", [(1, 48, 64), (1, 68, 120), (1, 128, 180)], ids=str)
def bench_collect_rows(measure, rotate, grid):
    """q, k and v of all ranks into the order of the batch."""
    batch, rows = make_batch(grid)
    own = share(batch, 0, RANKS)

    def buffers():
        parts = torch.randn(RANKS, rows // RANKS, WIDTH, device="cuda").bfloat16()
        return parts, torch.empty(rows, WIDTH, device="cuda", dtype=torch.bfloat16)

    def check():
        parts, out = buffers()
        expected = collect_rows_reference(parts, own.per_rank, own.keys, out.clone().zero_())
        assert collect_rows(parts, own.per_rank, own.keys, out.zero_()).equal(expected)

    measure(
        f"collect {rows} rows of {RANKS} ranks",
        lambda parts, out: collect_rows(parts, own.per_rank, own.keys, out),
        baseline=lambda parts, out: collect_rows_reference(parts, own.per_rank, own.keys, out),
        bytes=4 * rows * WIDTH,
        check=check,
        buffers=rotate(buffers),
    )


@pytest.mark.parametrize("grid", [(1, 48, 64), (1, 68, 120), (1, 128, 180)], ids=str)
def bench_take_rows(measure, rotate, grid):
    """What a rank's queries attended to, to the front of its own buffer."""
    batch, rows = make_batch(grid)
    own = share(batch, 1, RANKS)

    def buffers():
        x = torch.randn(rows, WIDTH // 3, device="cuda").bfloat16()
        return x, torch.empty(rows // RANKS, WIDTH // 3, device="cuda", dtype=torch.bfloat16)

    def check():
        x, out = buffers()
        expected = take_rows_reference(x, own.queries, out.clone().zero_())
        assert take_rows(x, own.queries, out.zero_()).equal(expected)

    measure(
        f"take {rows // RANKS} of {rows} rows",
        lambda x, out: take_rows(x, own.queries, out),
        baseline=lambda x, out: take_rows_reference(x, own.queries, out),
        bytes=4 * rows // RANKS * WIDTH // 3,
        check=check,
        buffers=rotate(buffers),
    )


def bench_share(measure):
    """Once a forward."""
    batch, rows = make_batch((1, 68, 120))
    measure(f"share of {rows} rows", lambda: share(batch, 1, RANKS), bytes=64)


def make_batch(grid):
    rows = grid[1] * grid[2]
    return layout(torch.tensor([grid], dtype=torch.int32, device="cuda"), rows, 1), rows
