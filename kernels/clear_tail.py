"""Zeros behind the last real row: tail[total : total + rows] = 0.

Attention libraries that load whole tiles of keys multiply the values past the last sequence by a
weight of zero, and zero times a stray NaN is NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["max_rows"])
def clear_tail_kernel(
    x_ptr,  # [P, ...], a row is WIDTH consecutive values
    num_rows_ptr,
    row_stride,
    max_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.load(num_rows_ptr).to(tl.int64) + tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = (columns < WIDTH) & (row < max_rows)
    tl.store(x_ptr + row * row_stride + columns, 0.0, mask=mask)


def clear_tail(
    x: Tensor,  # [P, H, D], rows may be strided
    num_rows: Tensor,  # [1]
    rows: int,
) -> Tensor:
    """`clear_tail_reference` as one kernel."""
    max_rows, heads, head_dim = x.shape
    if x.stride()[1:] != (head_dim, 1):
        raise ValueError(f"clear_tail: the heads of a row must be packed, strides {x.stride()}")
    if max_rows:
        width = heads * head_dim
        clear_tail_kernel[(min(rows, max_rows),)](
            x,
            num_rows,
            x.stride(0),
            max_rows,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return x


def clear_tail_reference(x: Tensor, num_rows: Tensor, rows: int) -> Tensor:
    """Zero the `rows` rows that follow the real ones, in place, as far as there are any.

    Args:
        x: [P, H, D].
        num_rows: int32 [1] on the device, the real rows.
        rows: how many to zero.
    """
    row = torch.arange(x.shape[0], device=x.device)
    x[(row >= num_rows) & (row < num_rows + rows)] = 0
    return x
