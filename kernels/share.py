"""Rows of a batch in equal shares, one a rank: what is whose, and rows moved to and from shares.

    n = ceil(T / ranks) tokens: rank r has tokens r * n to min((r + 1) * n, T), and their patches

The keys that a rank's queries attend to are those of all sequences that its rows are part of.
Shares follow from the real rows on the device; buffers have the capacity of a full share.

Legend: P patches, T tokens, S capacity of a share in rows, C columns.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitgraph.kernels.launch import num_programs
from vitgraph.kernels.layout import Layout

COLUMNS = 1024  # copied at a time


@dataclass(frozen=True)
class Share:
    """One rank's rows. All tensors are int32, live on the device and are not read by the host.

    Attributes:
        queries: [2], the share's first patch and its end.
        keys: [2], the same for the sequences that these patches are part of.
        per_rank: [1], patches of a full share.
        tokens: [2], zero and the tokens of all ranks.
        tokens_per_rank: [1], of a full share.
    """

    queries: Tensor
    keys: Tensor
    per_rank: Tensor
    tokens: Tensor
    tokens_per_rank: Tensor

    @property
    def num_patches(self) -> Tensor:
        """[1], real rows of this rank."""
        return self.queries[1:] - self.queries[:1]


def share(layout: Layout, rank: int, ranks: int, merge_size: int = 2) -> Share:
    """Derive a rank's share of a batch."""
    tokens, unit, offsets = layout.num_tokens, merge_size**2, layout.cu_seqlens
    per_rank = ((tokens + ranks - 1) // ranks).clamp(min=1)
    edges = torch.cat([per_rank * rank, per_rank * (rank + 1)])
    queries = torch.minimum(edges, tokens) * unit
    # Sequences start where offsets rise: the last start that is not behind the first patch, and the
    # first end that is not before the last one.
    start = torch.searchsorted(offsets, queries[:1], right=True) - 1
    end = torch.searchsorted(offsets, queries[1:]).clamp(max=len(offsets) - 1)
    keys = offsets[torch.cat([start, end])]
    keys = torch.where(queries[1:] > queries[:1], keys, 0)
    tokens = torch.cat([torch.zeros_like(tokens), tokens])
    return Share(queries, keys, per_rank * unit, tokens, per_rank)


def own_layout(layout: Layout, share: Share, coords: Tensor, merge_size: int = 2) -> Layout:
    """The layout of a rank's rows, given their coordinates; its sequences are everyone's."""
    patches = share.num_patches
    tokens = patches // merge_size**2
    return replace(layout, num_patches=patches, num_tokens=tokens, coords=coords)


@triton.jit(do_not_specialize=["capacity", "max_rows"])
def move_rows_kernel(
    parts_ptr,  # [ranks, capacity, WIDTH]
    out_ptr,  # [max_rows, WIDTH]
    per_rank_ptr,  # int32 [1], or None: one part
    between_ptr,  # int32 [2]
    capacity,
    max_rows,
    WIDTH: tl.constexpr,
    TO_FRONT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first = tl.load(between_ptr)
    end = tl.load(between_ptr + 1)
    skipped = 0
    if TO_FRONT:
        skipped = first
    # Never past the buffers, whatever the device's numbers say.
    end = tl.minimum(end, skipped + max_rows)
    for row in range(first + tl.program_id(0), end, tl.num_programs(0)):
        source = tl.cast(row, tl.int64)
        if per_rank_ptr is not None:
            per_rank = tl.load(per_rank_ptr)
            rank = row // per_rank
            source += tl.cast(rank, tl.int64) * (capacity - per_rank)
        target = tl.cast(row - skipped, tl.int64)
        for column in range(0, WIDTH, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            mask = columns < WIDTH
            values = tl.load(parts_ptr + source * WIDTH + columns, mask=mask)
            tl.store(out_ptr + target * WIDTH + columns, values, mask=mask)


def _move(
    parts: Tensor, per_rank: Tensor | None, between: Tensor, out: Tensor, to_front: bool
) -> Tensor:
    for name, rows in (("parts", parts), ("out", out)):
        if not rows.is_contiguous():
            raise ValueError(f"share: {name} must be contiguous, strides are {rows.stride()}")
    capacity, width = parts.shape[1:]
    if out.ndim != 2 or out.shape[1] != width or out.dtype != parts.dtype:
        raise ValueError(
            f"share: rows of {width} {parts.dtype} do not fit into {tuple(out.shape)} {out.dtype}"
        )
    if len(out) == 0 or capacity == 0:
        return out
    move_rows_kernel[(num_programs(out.device, len(out), 8),)](
        parts, out, per_rank, between, capacity, len(out),
        WIDTH=width, TO_FRONT=to_front, COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def collect_rows(
    parts: Tensor,  # [ranks, S, C]
    per_rank: Tensor,  # [1]
    between: Tensor,  # [2]
    out: Tensor,  # [P, C]
) -> Tensor:
    """`collect_rows_reference` as one kernel.

    Raises:
        ValueError: shapes, strides or dtypes do not fit.
    """
    return _move(parts, per_rank, between, out, to_front=False)


def take_rows(
    x: Tensor,  # [P, C]
    between: Tensor,  # [2]
    out: Tensor,  # [S, C]
) -> Tensor:
    """`take_rows_reference` as one kernel.

    Raises:
        ValueError: shapes, strides or dtypes do not fit.
    """
    return _move(x[None], None, between, out, to_front=True)


def collect_rows_reference(parts: Tensor, per_rank: Tensor, between: Tensor, out: Tensor) -> Tensor:
    """Write the rows of a range, from the parts of all ranks, where they are in the batch.

    Args:
        parts: each rank's rows, at the front of its part.
        per_rank: int32, rows of a full part.
        between: int32, first row and end of the range.
        out: rows outside the range stay as they are.
    """
    ranks, capacity, _ = parts.shape
    row = torch.arange(len(out), device=out.device)
    source = (row // per_rank).clamp(max=ranks - 1) * capacity + row % per_rank
    values = parts.flatten(0, 1)[source.clamp(max=max(ranks * capacity - 1, 0))]
    inside = (row >= between[0]) & (row < between[1])
    return out.copy_(torch.where(inside[:, None], values, out))


def take_rows_reference(x: Tensor, between: Tensor, out: Tensor) -> Tensor:
    """Write the rows of a range to the front of `out`, whose other rows stay as they are.

    Args:
        x: all rows.
        between: int32, first row and end of the range.
        out: of the same width and dtype, with room for the range.
    """
    row = torch.arange(len(out), device=out.device)
    values = x[(row + between[0]).clamp(max=max(len(x) - 1, 0))]
    inside = row < between[1] - between[0]
    return out.copy_(torch.where(inside[:, None], values, out))
