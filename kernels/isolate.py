"""Keep a value that is not finite inside its item, for attention libraries that load whole tiles.

    v[r, h] = 0 and k[r, h] = NaN, where v[r, h] has a NaN or an infinity, of the real rows r
    v[r] = 0 for the `tail` rows behind them

Such a library weighs the values of the rows behind a sequence, its neighbour's, by zero, and zero
times NaN is NaN. Scores are masked by selection instead, so a NaN in k reaches the queries of its
own item only: their outputs are NaN, as they ought to be.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitgraph.kernels.launch import cdiv, next_power_of_2, num_programs

BLOCK = 32  # heads of rows that a program looks at together


@triton.jit(do_not_specialize=["max_rows", "tail"])
def isolate_kernel(
    qkv_ptr,  # [P, 3, HEADS, HEAD_DIM]
    num_rows_ptr,
    max_rows,
    tail,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    num_rows = tl.minimum(tl.load(num_rows_ptr), max_rows).to(tl.int64)
    real = num_rows * HEADS
    end = tl.minimum(num_rows + tail, max_rows) * HEADS
    column = tl.arange(0, COLUMNS)[None, :]
    inside = column < HEAD_DIM
    for first in tl.range(tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        unit = (first + tl.arange(0, BLOCK)).to(tl.int64)  # row * HEADS + head
        offset = unit // HEADS * (3 * HEADS * HEAD_DIM) + unit % HEADS * HEAD_DIM
        k_pointers = qkv_ptr + HEADS * HEAD_DIM + offset[:, None] + column
        v_pointers = k_pointers + HEADS * HEAD_DIM
        is_real = unit < real
        v = tl.load(v_pointers, mask=is_real[:, None] & inside, other=0.0).to(tl.float32)
        finite = tl.abs(v) < float("inf")
        broken = is_real & (tl.min(finite.to(tl.int32), 1) == 0)
        cleared = broken | ((unit >= real) & (unit < end))
        if tl.max(cleared.to(tl.int32), 0) > 0:
            tl.store(v_pointers, 0.0, mask=cleared[:, None] & inside)
            tl.store(k_pointers, float("nan"), mask=broken[:, None] & inside)


def isolate(
    qkv: Tensor,  # [P, 3, H, D]
    num_rows: Tensor,  # [1]
    tail: int,
) -> Tensor:
    """`isolate_reference` as one kernel.

    Raises:
        ValueError: `qkv` is not contiguous [P, 3, H, D].
    """
    max_rows, parts, heads, head_dim = qkv.shape
    if parts != 3 or not qkv.is_contiguous():
        raise ValueError(f"isolate: qkv must be contiguous [P, 3, H, D], got {tuple(qkv.shape)}")
    if max_rows:
        blocks = cdiv(max_rows * heads, BLOCK)
        isolate_kernel[(num_programs(qkv.device, blocks, 16),)](
            qkv,
            num_rows,
            max_rows,
            tail,
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK=BLOCK,
            COLUMNS=next_power_of_2(head_dim),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return qkv


def isolate_reference(qkv: Tensor, num_rows: Tensor, tail: int) -> Tensor:
    """Let no value be read that is not finite, in place; see above.

    Args:
        qkv: [P, 3, H, D].
        num_rows: int32 [1] on the device, the real rows.
        tail: how many rows behind them have their values zeroed, as far as there are any.
    """
    _, k, v = qkv.unbind(1)
    row = torch.arange(qkv.shape[0], device=qkv.device)
    broken = ~v.isfinite().all(-1) & (row < num_rows)[:, None]
    k[broken] = float("nan")
    v[broken] = 0
    v[(row >= num_rows) & (row < num_rows + tail)] = 0
    return qkv
