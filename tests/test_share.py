"""Shares of a batch: every row exactly once, the keys they attend to, rows moved there and back."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitgraph.kernels.layout import layout_reference
from vitgraph.kernels.share import (
    collect_rows,
    collect_rows_reference,
    own_layout,
    share,
    take_rows,
    take_rows_reference,
)

GRIDS = {
    "one_image": [(1, 6, 10)],
    "several": [(1, 4, 4), (3, 4, 6), (1, 8, 6), (1, 2, 2)],
    "fewer_tokens_than_ranks": [(1, 2, 2)],
    "no_items": [],
}
DTYPES = [torch.float32, torch.float16, torch.uint8, torch.int32]


def make_layout(grids, device="cpu", spare=5):
    """In more rows and slots than there are."""
    slots = torch.zeros(len(grids) + 2, 3, dtype=torch.int32)
    for slot, grid in enumerate(grids):
        slots[slot] = torch.tensor(grid)
    patches, frames = sum(t * h * w for t, h, w in grids), sum(t for t, _, _ in grids)
    return layout_reference(slots.to(device), patches + 4 * spare, frames + 3)


grids = st.lists(st.tuples(*[st.integers(1, 4)] * 3).map(lambda g: (g[0], 2 * g[1], 2 * g[2])))


@settings(deadline=None)
@given(grids, st.integers(1, 5))
def test_every_row_is_in_one_share_with_its_keys(grids, ranks) -> None:
    layout = make_layout(grids)
    shares = [share(layout, rank, ranks) for rank in range(ranks)]
    queries = [tuple(one.queries.tolist()) for one in shares]
    total = layout.num_patches.item()
    owned = [row for first, end in queries for row in range(first, end)]
    assert owned == list(range(total))
    sizes = [end - first for first, end in queries]
    assert all(size % 4 == 0 for size in sizes)
    full = -(-max(total // 4, 1) // ranks) * 4
    assert {one.per_rank.item() for one in shares} == {full}
    assert sizes == [min(full, max(total - rank * full, 0)) for rank in range(ranks)]
    starts = layout.cu_seqlens.tolist()
    for one, (first, end) in zip(shares, queries, strict=True):
        touched = [
            a for a in itertools.pairwise(starts) if a[0] < a[1] and a[0] < end > first < a[1]
        ]
        expected = [touched[0][0], touched[-1][1]] if touched else [0, 0]
        assert one.keys.tolist() == expected
        assert one.tokens.tolist() == [0, total // 4]


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [4, 1100])
@pytest.mark.parametrize("take, collect", [
    (take_rows, collect_rows), (take_rows_reference, collect_rows_reference),
], ids=["kernel", "reference"])  # fmt: skip
def test_there_and_back(take, collect, width, dtype, grids, device, rng) -> None:
    """Rows outside a range stay as they were, in the shares and in the batch."""
    ranks, layout = 3, make_layout(grids, device)
    total, capacity = layout.num_patches.item(), len(layout.coords)
    x = torch.randint(0, 100, (capacity, width), generator=rng, device=device).to(dtype)
    shares = [share(layout, rank, ranks) for rank in range(ranks)]
    rows = -(-(capacity // 4) // ranks) * 4
    parts = torch.full((ranks, rows, width), 111, dtype=dtype, device=device)
    for rank, one in enumerate(shares):
        assert take(x, one.queries, parts[rank]) is not None
        first, end = one.queries.tolist()
        assert parts[rank][: end - first].equal(x[first:end])
        assert (parts[rank][end - first :] == 111).all()
    for one in shares:
        out = torch.full_like(x, 77)
        assert collect(parts, one.per_rank, one.keys, out) is out
        first, end = one.keys.tolist()
        assert out[first:end].equal(x[first:end])
        assert (out[:first] == 77).all() and (out[end:] == 77).all()
    assert total == sum(one.num_patches.item() for one in shares)


def test_own_layout(device) -> None:
    """A share's rows, of everyone's sequences."""
    layout = make_layout(GRIDS["several"], device)
    one = share(layout, 1, 2)
    coords = take_rows(layout.coords, one.queries, torch.empty_like(layout.coords))
    own = own_layout(layout, one, coords)
    first, end = one.queries.tolist()
    assert own.num_patches.tolist() == [end - first] == [4 * own.num_tokens.item()]
    assert own.cu_seqlens is layout.cu_seqlens
    assert own.coords[: end - first].equal(layout.coords[first:end])


def test_a_range_past_the_buffer_is_cut(device) -> None:
    """Whatever the device's numbers say, nothing is written behind the last row."""
    x = torch.ones(8, 16, device=device)
    out = torch.zeros(6, 16, device=device)
    take_rows(x, torch.tensor([0, 8], dtype=torch.int32, device=device), out[:4])
    assert out[:4].all() and not out[4:].any()


def test_refuses_what_does_not_fit(device) -> None:
    between = torch.tensor([0, 4], dtype=torch.int32, device=device)
    x = torch.zeros(4, 8, device=device)
    with pytest.raises(ValueError, match="out must be contiguous, strides are"):
        take_rows(x, between, x.new_zeros(4, 16)[:, ::2])
    with pytest.raises(ValueError, match=r"rows of 8 torch\.float32 do not fit into \(4, 9\)"):
        take_rows(x, between, x.new_zeros(4, 9))
    with pytest.raises(ValueError, match=r"do not fit into \(4, 8\) torch\.float16"):
        take_rows(x, between, x.new_zeros(4, 8).half())


@pytest.mark.gpu
def test_gpu_addresses_past_int32(device) -> None:
    """More than 2^31 elements; rows at both ends."""
    rows, width = 640_000, 3456
    parts = torch.zeros(2, rows // 2, width, dtype=torch.float16, device=device)
    parts[0, :3], parts[1, -3:] = 1, 2
    out = torch.zeros(rows, width, dtype=torch.float16, device=device)
    per_rank = torch.tensor([rows // 2], dtype=torch.int32, device=device)
    between = torch.tensor([0, rows], dtype=torch.int32, device=device)
    collect_rows(parts, per_rank, between, out)
    assert (out[:3] == 1).all() and (out[-3:] == 2).all() and not out[3:-3].any()
