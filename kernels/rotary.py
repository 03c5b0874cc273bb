"""Two-dimensional rotary embedding on the q and k parts of a packed qkv, in place.

With D values a head there are D/4 frequencies theta^(-4j/D). The angles of a patch are [row * f,
col * f], D/2 in all, and value i is rotated with value i + D/2 (rotate-half over the whole head).
All layers turn by the same angles, so their cosines and sines are computed once a forward, in
float32. Source: transformers' Qwen3VLVisionModel (axial rotary, theta 10000).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitgraph.kernels.launch import cdiv, next_power_of_2, num_programs, row_count

PROGRAMS_PER_MULTIPROCESSOR = 32  # of one warp each: the most that fit
TABLE_ROWS = 16  # patches of one program of the table


def rotary_frequencies(
    head_dim: int, theta: float = 10000.0, device: torch.device | str | None = None
) -> Tensor:
    """Radians a patch, float32 [head_dim / 4], to the bit as transformers computes them."""
    exponent = torch.arange(0, head_dim, 4, dtype=torch.float32, device=device) / head_dim
    return 1.0 / theta**exponent


@triton.jit
def cos_sin(angle):
    """Cosine and sine to float32's precision for angles of 0 to 50,000; inlines into few
    instructions, where the library's functions carry a slow path (15 % more time on an H200)."""
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    # pi/2 in three parts, the first two so short that their products with `quarters` are exact
    angle = angle - quarters * 1.5703125
    angle = angle - quarters * 0.00048351287841796875
    angle = angle - quarters * 3.1391647326017846e-07
    square = angle * angle
    sin = 8.3321608736e-3 + square * -1.9515295891e-4
    sin = angle + angle * square * (-1.6666654611e-1 + square * sin)
    cos = -1.388731625493765e-3 + square * 2.443315711809948e-5
    cos = 1.0 - 0.5 * square + square * square * (4.166664568298827e-2 + square * cos)
    turn = quarters.to(tl.int32) & 3
    odd = (turn & 1) == 1
    turned_cos = tl.where(odd, sin, cos)
    turned_sin = tl.where(odd, cos, sin)
    turned_cos = tl.where((turn == 1) | (turn == 2), -turned_cos, turned_cos)
    return turned_cos, tl.where(turn >= 2, -turned_sin, turned_sin)


@triton.jit(do_not_specialize=["max_rows"])
def rotary_table_kernel(
    coords_ptr,
    frequencies_ptr,
    table_ptr,
    num_rows_ptr,
    max_rows,
    HALF: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    pair = tl.arange(0, BLOCK_PAIRS)
    pair_mask = pair < HALF
    along_row = pair < HALF // 2
    frequency_index = tl.where(along_row, pair, pair - HALF // 2)
    frequency = tl.load(frequencies_ptr + frequency_index, mask=pair_mask, other=0.0)
    num_rows = row_count(num_rows_ptr, max_rows)
    for first in tl.range(tl.program_id(0) * BLOCK_ROWS, num_rows, tl.num_programs(0) * BLOCK_ROWS):
        patch = first + tl.arange(0, BLOCK_ROWS)
        row = tl.load(coords_ptr + patch * 4, mask=patch < num_rows, other=0)
        col = tl.load(coords_ptr + patch * 4 + 1, mask=patch < num_rows, other=0)
        position = tl.where(along_row[None, :], row[:, None], col[:, None]).to(tl.float32)
        cos, sin = cos_sin(position * frequency[None, :])
        mask = (patch < num_rows)[:, None] & pair_mask[None, :]
        cos_ptr = table_ptr + patch.to(tl.int64)[:, None] * (2 * HALF) + pair[None, :]
        tl.store(cos_ptr, cos, mask=mask)
        tl.store(cos_ptr + HALF, sin, mask=mask)


def rotary_table(
    coords: Tensor,  # [P, 4]
    frequencies: Tensor,  # [D / 4]
    num_rows: Tensor | None = None,
) -> Tensor:
    """`rotary_table_reference` as one kernel.

    Raises:
        ValueError: shapes, strides or dtypes do not fit.
    """
    if coords.ndim != 2 or coords.shape[1] != 4 or not coords.is_contiguous():
        raise ValueError(f"rotary: coords must be contiguous [P, 4], got {tuple(coords.shape)}")
    if frequencies.dtype != torch.float32 or frequencies.ndim != 1:
        raise ValueError(
            f"rotary: frequencies are {frequencies.dtype} {tuple(frequencies.shape)}, not float32 "
            f"[head_dim / 4]"
        )
    max_rows, half = coords.shape[0], 2 * frequencies.shape[0]
    table = torch.empty(max_rows, 2, half, dtype=torch.float32, device=coords.device)
    if max_rows == 0:
        return table
    blocks = cdiv(max_rows, TABLE_ROWS)
    rotary_table_kernel[(num_programs(coords.device, blocks, 8),)](
        coords,
        frequencies,
        table,
        num_rows,
        max_rows,
        HALF=half,
        BLOCK_PAIRS=next_power_of_2(half),
        BLOCK_ROWS=TABLE_ROWS,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return table


def rotary_table_reference(
    coords: Tensor,  # [P, 4]
    frequencies: Tensor,  # [D / 4]
    num_rows: Tensor | None = None,
) -> Tensor:
    """Cosines and sines of the angles of each patch.

    Args:
        coords: int32 [P, 4], (row, col, h, w) of each patch.
        frequencies: float32 [D / 4], `rotary_frequencies`.
        num_rows: int32 [1] on the device; rows past it need not be computed.

    Returns:
        float32 [P, 2, D / 2], cosines first.
    """
    angles = (coords[:, :2].float()[:, :, None] * frequencies).flatten(1)  # [P, D / 2]
    return torch.stack([angles.cos(), angles.sin()], dim=1)


@triton.jit(do_not_specialize=["max_rows"])
def rotary_kernel(
    qkv_ptr,
    table_ptr,
    num_rows_ptr,
    qkv_stride,
    max_rows,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    mask = (head < HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    is_first = dim < HALF
    pair = tl.where(is_first, dim, dim - HALF)
    to_partner = tl.where(is_first, HALF, -HALF)

    num_parts = 2 * row_count(num_rows_ptr, max_rows)  # q and k of each patch
    for part in tl.range(tl.program_id(0), num_parts, tl.num_programs(0)):
        patch = tl.cast(part // 2, tl.int64)
        part_ptr = qkv_ptr + patch * qkv_stride + part % 2 * HEADS * HEAD_DIM
        ptr = part_ptr + head[:, None] * HEAD_DIM + dim[None, :]
        # Whole heads in one contiguous load; the partners, just read, come from L1.
        x = tl.load(ptr, mask=mask).to(tl.float32)
        partner = tl.load(ptr + to_partner[None, :], mask=mask).to(tl.float32)
        cos_ptr = table_ptr + patch * HEAD_DIM + pair
        cos = tl.load(cos_ptr, mask=dim < HEAD_DIM, other=0.0)
        sin = tl.load(cos_ptr + HALF, mask=dim < HEAD_DIM, other=0.0)
        sin = tl.where(is_first, -sin, sin)
        tl.debug_barrier()  # every partner has been read
        rotated = x * cos[None, :] + partner * sin[None, :]
        tl.store(ptr, rotated.to(qkv_ptr.dtype.element_ty), mask=mask)


def rotary(
    qkv: Tensor,  # [P, 3, H, D], rows may be strided
    table: Tensor,  # [P, 2, D / 2]
    num_rows: Tensor | None = None,
) -> Tensor:
    """`rotary_reference` as one kernel, in place; returns `qkv`.

    Raises:
        ValueError: shapes, strides or dtypes do not fit.
    """
    max_rows, _, num_heads, head_dim = qkv.shape
    if qkv.stride()[1:] != (num_heads * head_dim, head_dim, 1):
        raise ValueError(f"rotary: q, k and v of a patch must be packed, strides {qkv.stride()}")
    expected = (max_rows, 2, head_dim // 2)
    if table.shape != expected or table.dtype != torch.float32 or not table.is_contiguous():
        raise ValueError(
            f"rotary: the table is {table.dtype} {tuple(table.shape)}, head_dim {head_dim} needs "
            f"contiguous float32 {expected}"
        )
    if max_rows == 0:
        return qkv
    rotary_kernel[(num_programs(qkv.device, 2 * max_rows, PROGRAMS_PER_MULTIPROCESSOR),)](
        qkv,
        table,
        num_rows,
        qkv.stride(0),
        max_rows,
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=next_power_of_2(num_heads),
        BLOCK_DIM=next_power_of_2(head_dim),
        num_warps=1,
        enable_fp_fusion=True,
    )
    return qkv


def rotary_reference(
    qkv: Tensor,  # [P, 3, H, D]
    table: Tensor,  # [P, 2, D / 2]
    num_rows: Tensor | None = None,
) -> Tensor:
    """Rotate q and k of `qkv` in place and return it.

    Args:
        qkv: packed projections [P, 3, H, D]; D a multiple of 4.
        table: float32 [P, 2, D / 2], `rotary_table`.
        num_rows: int32 [1] on the device; rows past it need not be computed.
    """
    cos, sin = table[:, :, None, None].unbind(1)  # [P, 1, 1, D / 2]
    first, second = qkv[:, :2].float().chunk(2, dim=-1)
    qkv[:, :2] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return qkv
