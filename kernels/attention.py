"""Packed varlen attention: softmax(q k^T / sqrt(D)) v inside each sequence, non-causal, all heads.

The kernel is persistent over a table of work (attention_schedule.py), built on the device once
per forward, from the offsets of the sequences: rows and sequence slots that a batch does not use
cost nothing, and no length is ever read on the host. This file is the portable kernel and the
entrance; on Hopper most launches go to sm90/attention.py. attention_config.py chooses the tiles.

A head of D values is computed as a power of two and a tail (72 = 64 + 16 with 8 columns of zeros).

Legend: P patches, S sequences, H heads, D head_dim.
"""

import itertools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitgraph.kernels.attention_config import AttentionConfig, attention_config
from vitgraph.kernels.attention_schedule import AttentionSchedule, attention_schedule
from vitgraph.kernels.launch import next_power_of_2, num_multiprocessors

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def attention_reference(
    qkv: Tensor,  # [P, 3, H, D]
    cu_seqlens: Tensor,  # [S + 1]
    queries: Tensor | None = None,  # [2]
) -> Tensor:
    """Attend inside each sequence, in the dtype of `qkv` (give it float64 for the truth). Reads the
    offsets on the host.

    Args:
        queries: the first row that attends and the end; None for all.

    Returns:
        [P, H * D]; rows outside every sequence, and those that do not attend, are zero.
    """
    num_patches, _, num_heads, head_dim = qkv.shape
    out = qkv.new_zeros(num_patches, num_heads, head_dim)
    first, last = (0, num_patches) if queries is None else queries.tolist()
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        rows = slice(max(start, first), min(end, last))
        if rows.start >= rows.stop:
            continue
        q = qkv[rows, 0].transpose(0, 1)  # [H, L, D] each
        k, v = qkv[start:end, 1:].permute(1, 2, 0, 3)
        scores = q @ k.transpose(-1, -2) / head_dim**0.5
        out[rows] = (torch.softmax(scores, dim=-1) @ v).transpose(0, 1)
    return out.flatten(1)


@triton.jit
def _load_rows(
    head_ptr,  # of a head's first q
    PART: tl.constexpr,  # 0 for q, 1 for k, 2 for v
    first_row,
    end,
    COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """[ROWS, COLUMNS] of one part from (first_row, COLUMN); zero past `end` and past the head."""
    rows = tl.arange(0, ROWS)
    columns = COLUMN + tl.arange(0, COLUMNS)
    # One long offset for all and short ones from there: registers are what 128 rows lack.
    block_ptr = head_ptr + tl.cast(first_row, tl.int64) * (3 * HEADS * HEAD_DIM)
    block_ptr += PART * HEADS * HEAD_DIM
    pointers = block_ptr + rows[:, None] * (3 * HEADS * HEAD_DIM) + columns[None, :]
    mask = rows[:, None] < end - first_row
    if COLUMN + COLUMNS > HEAD_DIM:
        mask = mask & (columns[None, :] < HEAD_DIM)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _attend(
    q,  # [BLOCK_M, HEAD]
    q_tail,  # [BLOCK_M, TAIL]
    acc,  # float32 [BLOCK_M, HEAD]
    acc_tail,  # float32 [BLOCK_M, TAIL]
    row_max,  # float32 [BLOCK_M], scaled
    row_sum,  # float32 [BLOCK_M]
    head_ptr,
    first_key,
    end,
    scale_log2,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One step of the online softmax, over BLOCK_N keys."""
    k = _load_rows(head_ptr, 1, first_key, end, 0, BLOCK_N, HEAD, HEADS, HEAD_DIM)
    scores = tl.dot(q, k.T, input_precision="ieee")
    if HEAD_DIM > HEAD:
        k_tail = _load_rows(head_ptr, 1, first_key, end, HEAD, BLOCK_N, TAIL, HEADS, HEAD_DIM)
        scores = tl.dot(q_tail, k_tail.T, scores, input_precision="ieee")
    if first_key + BLOCK_N > end:  # the last step alone
        keys = first_key + tl.arange(0, BLOCK_N)
        scores = tl.where(keys[None, :] < end, scores, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_max[:, None])
    correction = tl.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(weights, 1)

    # 0 * NaN is NaN: v is zero past the end, not merely unweighted.
    v = _load_rows(head_ptr, 2, first_key, end, 0, BLOCK_N, HEAD, HEADS, HEAD_DIM)
    weights = weights.to(v.dtype)
    acc = tl.dot(weights, v, acc * correction[:, None], input_precision="ieee")
    if HEAD_DIM > HEAD:
        v_tail = _load_rows(head_ptr, 2, first_key, end, HEAD, BLOCK_N, TAIL, HEADS, HEAD_DIM)
        acc_tail = tl.dot(weights, v_tail, acc_tail * correction[:, None], input_precision="ieee")
    return acc, acc_tail, new_max, row_sum


@triton.jit
def attention_kernel(
    qkv_ptr,  # [P, 3, HEADS, HEAD_DIM]
    out_ptr,  # [P, HEADS * HEAD_DIM]
    table_ptr,  # int32 [units, 8]
    state_ptr,  # int32 [2], number of units and counter
    scale_log2,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Persistent: attend the units (tiles of one head) that this program draws."""
    num_units = tl.load(state_ptr)
    unit = tl.program_id(0)
    while unit < num_units:
        # Drawn early, so that its latency hides behind the unit. There are as many draws as units.
        ticket = tl.atomic_add(state_ptr + 1, 1, sem="relaxed")
        if ticket == num_units - 1:
            tl.store(state_ptr + 1, 0)

        unit_ptr = table_ptr + unit * 8
        first_row = tl.load(unit_ptr)
        start = tl.load(unit_ptr + 1)
        end = tl.load(unit_ptr + 2)
        head = tl.load(unit_ptr + 4)

        head_ptr = qkv_ptr + head * HEAD_DIM
        q = _load_rows(head_ptr, 0, first_row, end, 0, BLOCK_M, HEAD, HEADS, HEAD_DIM)
        q_tail = q
        if HEAD_DIM > HEAD:
            q_tail = _load_rows(head_ptr, 0, first_row, end, HEAD, BLOCK_M, TAIL, HEADS, HEAD_DIM)
        acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
        acc_tail = tl.zeros([BLOCK_M, TAIL], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)

        for first_key in range(start, end, BLOCK_N):
            acc, acc_tail, row_max, row_sum = _attend(
                q, q_tail, acc, acc_tail, row_max, row_sum, head_ptr, first_key, end, scale_log2,
                HEADS, HEAD_DIM, HEAD, TAIL, BLOCK_N,
            )  # fmt: skip

        inverse_sum = 1.0 / row_sum
        # To the end of the sequence, also where the queries end before: one more number would not
        # fit the registers of an A100.
        rows = first_row + tl.arange(0, BLOCK_M)
        row_mask = rows[:, None] < end
        out_rows = out_ptr + rows.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM
        columns = tl.arange(0, HEAD)[None, :]
        tl.store(out_rows + columns, acc * inverse_sum[:, None], mask=row_mask)
        if HEAD_DIM > HEAD:
            columns = HEAD + tl.arange(0, TAIL)[None, :]
            tl.store(
                out_rows + columns,
                acc_tail * inverse_sum[:, None],
                mask=row_mask & (columns < HEAD_DIM),
            )
        unit = ticket + tl.num_programs(0)


def attention(
    qkv: Tensor,  # [P, 3, H, D]
    cu_seqlens: Tensor,  # [S + 1]
    *,
    schedule: AttentionSchedule | None = None,
    out: Tensor | None = None,  # [P, H * D]
) -> Tensor:
    """Attend inside each sequence; rows outside every sequence are neither used nor written.

    Args:
        qkv: contiguous [P, 3, H, D], float16, bfloat16 or float32; D a multiple of 8 from 16.
        cu_seqlens: int32 [S + 1] on the device of `qkv`, never falling.
        schedule: the table of `attention_schedule` for these offsets, built here if None. Of a
            range of queries, rows of the sequence behind its end may be written, too.
        out: where to store, contiguous [P, H * D].

    Raises:
        ValueError: shapes, strides or dtypes do not fit.
    """
    num_patches, parts, num_heads, head_dim = qkv.shape
    if parts != 3 or not qkv.is_contiguous():
        raise ValueError(f"qkv must be contiguous [P, 3, H, D], got {tuple(qkv.shape)}")
    if head_dim < 16 or head_dim % 8:
        raise ValueError(f"head_dim must be a multiple of 8 from 16 on, got {head_dim}")
    if qkv.dtype not in DTYPES:
        raise ValueError(f"qkv is {qkv.dtype}, none of {', '.join(map(str, DTYPES))}")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or not cu_seqlens.is_contiguous():
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)} with strides "
            f"{cu_seqlens.stride()}, not contiguous int32 [S + 1]"
        )
    shape = num_patches, num_heads * head_dim
    if out is None:
        out = qkv.new_empty(shape)
    if tuple(out.shape) != shape or out.dtype != qkv.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {qkv.dtype} {shape}, got {out.dtype} {tuple(out.shape)} with "
            f"strides {out.stride()}"
        )
    if num_patches == 0:
        return out
    if schedule is None:
        num_sequences = cu_seqlens.shape[0] - 1
        config = attention_config(
            num_patches, num_sequences, num_heads, head_dim, qkv.dtype, qkv.device
        )
        schedule = attention_schedule(cu_seqlens, num_patches, num_heads, config)
    config = schedule.config

    scale_log2 = math.log2(math.e) / head_dim**0.5
    programs = num_multiprocessors(qkv.device)
    if not isinstance(config, AttentionConfig):
        from vitgraph.kernels.sm90.attention import launch_attention_sm90

        launch_attention_sm90(qkv, out, schedule, scale_log2, programs)
        return out
    head = 1 << (head_dim.bit_length() - 1)
    tail = max(16, next_power_of_2(head_dim - head))
    programs = min(programs * config.programs_per_sm, schedule.table.shape[0])
    attention_kernel[(programs,)](
        qkv, out, schedule.table, schedule.state, scale_log2,
        HEADS=num_heads, HEAD_DIM=head_dim, HEAD=head, TAIL=tail,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out
