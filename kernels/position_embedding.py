"""Learned position embedding, resampled to each item's grid and added to the patch embeddings.

The table is a square of side N (48 for Qwen3-VL). Patch (row, col) of an h x w grid reads it at

    y = row * (N - 1) / (h - 1),   x = col * (N - 1) / (w - 1)      (0 where h == 1 or w == 1)

with bilinear weights (align-corners, as transformers' Qwen3VLVisionModel). Weights and sums are
float32.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitgraph.kernels.launch import next_power_of_2, num_programs, row_count


@triton.jit
def lower_and_fraction(index, length, SIDE: tl.constexpr):
    """Table row (or column) below patch `index` of `length`, and how far past it the patch lies."""
    last = tl.maximum(length - 1, 1).to(tl.float32)
    position = index.to(tl.float32) * tl.div_rn(SIDE - 1.0, last)
    lower = tl.minimum(position.to(tl.int32), SIDE - 1)
    return lower, position - lower.to(tl.float32)


@triton.jit(do_not_specialize=["max_rows"])
def position_embedding_kernel(
    hidden_ptr,
    table_ptr,
    coords_ptr,
    num_rows_ptr,
    hidden_stride,
    max_rows,
    SIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    for row in tl.range(tl.program_id(0), row_count(num_rows_ptr, max_rows), tl.num_programs(0)):
        row_start = tl.cast(row, tl.int64)
        coords = coords_ptr + row_start * 4
        top, down = lower_and_fraction(tl.load(coords), tl.load(coords + 2), SIDE)
        left, right = lower_and_fraction(tl.load(coords + 1), tl.load(coords + 3), SIDE)
        below = tl.minimum(top + 1, SIDE - 1)
        beside = tl.minimum(left + 1, SIDE - 1)

        hidden = hidden_ptr + row_start * hidden_stride + column
        x = tl.load(hidden, mask=mask).to(tl.float32)
        top_row = table_ptr + top * SIDE * WIDTH + column
        bottom_row = table_ptr + below * SIDE * WIDTH + column
        x += (1 - down) * (1 - right) * tl.load(top_row + left * WIDTH, mask=mask).to(tl.float32)
        x += (1 - down) * right * tl.load(top_row + beside * WIDTH, mask=mask).to(tl.float32)
        x += down * (1 - right) * tl.load(bottom_row + left * WIDTH, mask=mask).to(tl.float32)
        x += down * right * tl.load(bottom_row + beside * WIDTH, mask=mask).to(tl.float32)
        tl.store(hidden, x.to(hidden_ptr.dtype.element_ty), mask=mask)


def position_embedding(
    hidden: Tensor,  # [P, C], rows may be strided
    table: Tensor,  # [N * N, C]
    coords: Tensor,  # [P, 4]
    num_rows: Tensor | None = None,
) -> Tensor:
    """`position_embedding_reference` as one kernel: adds to `hidden` in place and returns it."""
    max_rows, width = hidden.shape
    side = math.isqrt(table.shape[0])
    if side * side != table.shape[0] or table.shape[1] != width or not table.is_contiguous():
        raise ValueError(
            f"position_embedding: table {tuple(table.shape)} must be a contiguous square of rows "
            f"{width} wide"
        )
    if hidden.stride(1) != 1 or not coords.is_contiguous() or coords.shape != (max_rows, 4):
        raise ValueError(
            f"position_embedding: hidden {tuple(hidden.shape)} needs adjacent values in a row and "
            f"contiguous coords [{max_rows}, 4], got {tuple(coords.shape)}"
        )
    if max_rows == 0:
        return hidden
    position_embedding_kernel[(num_programs(hidden.device, max_rows, 16),)](
        hidden,
        table,
        coords,
        num_rows,
        hidden.stride(0),
        max_rows,
        SIDE=side,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        num_warps=2,
        enable_fp_fusion=True,
    )
    return hidden


def position_embedding_reference(
    hidden: Tensor,  # [P, C]
    table: Tensor,  # [N * N, C]
    coords: Tensor,  # [P, 4]
    num_rows: Tensor | None = None,
) -> Tensor:
    """Add the resampled table to `hidden` in place and return it.

    Args:
        hidden: patch embeddings [P, C]; the sum is rounded once to its dtype.
        table: learned embeddings [N * N, C], row-major.
        coords: int32 [P, 4], (row, col, h, w) of each patch.
        num_rows: int32 [1] on the device; rows past it need not be computed.
    """
    side = math.isqrt(table.shape[0])
    row, col, height, width = coords.float().unbind(1)
    # a tensor over a tensor: torch takes a number over one as its reciprocal, and rounds twice
    steps = torch.full_like(row, side - 1)
    y = row * (steps / (height - 1).clamp(min=1))
    x = col * (steps / (width - 1).clamp(min=1))
    top, left = y.floor().clamp(max=side - 1), x.floor().clamp(max=side - 1)
    down, right = y - top, x - left
    top, left = top.long(), left.long()
    bottom, far = (top + 1).clamp(max=side - 1), (left + 1).clamp(max=side - 1)

    corners = (
        (top * side + left, (1 - down) * (1 - right)),
        (top * side + far, (1 - down) * right),
        (bottom * side + left, down * (1 - right)),
        (bottom * side + far, down * right),
    )
    embedding = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for index, weight in corners:
        embedding += table[index].float() * weight[:, None]
    return hidden.copy_(hidden.float() + embedding)
