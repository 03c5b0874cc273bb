"""Hopper tier of the packed varlen attention, in Gluon (triton.experimental.gluon, no interpreter).

Same tile table, same work items as the portable kernel. One producer warp draws items and feeds
shared memory by TMA; each consumer warpgroup owns ROWS query rows of the tile and runs both matrix
products as wgmma. The only link between them are mbarriers: `ready` counts bytes (or the message of
an item), `empty` counts consumers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vitgraph.kernels.launch import capability_of

if TYPE_CHECKING:
    from vitgraph.kernels.attention import AttentionTiles

TESTED_RELEASES = ("3.6.",)

_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed after Triton 3.6


@gluon.jit
def _place(count, PLACES: gl.constexpr):
    """Where the `count`-th use of a ring falls, and the parity of its barrier."""
    return count % PLACES, count // PLACES & 1


@gluon.jit
def _flat(buffer):
    """The rows of a box [1, ROWS, COLUMNS] as the matrix [ROWS, COLUMNS]."""
    layout: gl.constexpr = gl.NVMMASharedLayout(
        buffer.type.layout.swizzle_byte_width, buffer.type.layout.element_bitwidth, rank=2
    )
    return buffer._reinterpret(buffer.dtype, [buffer.shape[1], buffer.shape[2]], layout)


@gluon.jit
def _producer(
    descs, buffers, barriers, messages, table_ptr, state_ptr,
    HEADS: gl.constexpr, ROWS: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    q_desc, q_tail_desc, kv_desc, kv_tail_desc = descs
    q_buffers, q_tails, k_buffers, k_tails, v_buffers, v_tails = buffers
    item_ready, item_empty, k_ready, k_empty, v_ready, v_empty = barriers
    field = gl.arange(0, 8, gl.BlockedLayout([8], [32], [1], [0]))
    q_bytes: gl.constexpr = CONSUMERS * ROWS * (64 + TAIL) * 2
    kv_bytes: gl.constexpr = BLOCK_N * (64 + TAIL) * 2

    num_items = gl.load(state_ptr) * HEADS
    first_split = gl.load(state_ptr + 2)
    num_split = gl.load(state_ptr + 3)
    parts = gl.load(state_ptr + 4)
    num_units = num_items + num_split * (parts - 1)
    unit = gl.program_id(0)
    count, block = 0, 0  # units and blocks so far
    while unit < num_units:
        # Items before the split ones, their parts, the items after them.
        piece = unit - first_split
        is_part = (piece >= 0) & (piece < num_split * parts)
        item = gl.where(is_part, first_split + piece // parts, unit)
        item = gl.where(piece >= num_split * parts, unit - num_split * (parts - 1), item)
        piece = gl.where(is_part, piece, -1)

        tile = item // HEADS
        row = gl.load(table_ptr + tile * 3)
        start = gl.load(table_ptr + tile * 3 + 1)
        end = gl.load(table_ptr + tile * 3 + 2)
        # The items of a sequence are dealt head by head: fewer keys and values in use at a time.
        TILE: gl.constexpr = CONSUMERS * ROWS
        tiles = (end - start + TILE - 1) // TILE
        local = item - (tile - (row - start) // TILE) * HEADS
        head = local // tiles
        row = start + local % tiles * TILE
        first_key, last_key = start, end
        if is_part:
            blocks = (end - start + BLOCK_N - 1) // BLOCK_N
            part = piece % parts
            first_key = start + part * blocks // parts * BLOCK_N
            last_key = gl.minimum(start + (part + 1) * blocks // parts * BLOCK_N, end)

        slot, slot_phase = _place(count, 2)
        mbarrier.wait(item_empty.index(slot), slot_phase ^ 1)
        message = gl.where(field == 0, row, gl.where(field == 1, first_key, last_key))
        message = gl.where(field == 3, end, gl.where(field == 4, head, message))
        messages.index(slot).store(gl.where(field == 5, piece, message))
        _barrier()
        mbarrier.expect(item_ready.index(slot), q_bytes)
        for i in gl.static_range(CONSUMERS):
            tma.async_copy_global_to_shared(
                q_desc, [head, row + i * ROWS, 0], item_ready.index(slot),
                q_buffers.index(slot * CONSUMERS + i),
            )  # fmt: skip
            if TAIL:
                tma.async_copy_global_to_shared(
                    q_tail_desc, [head, row + i * ROWS, 64], item_ready.index(slot),
                    q_tails.index(slot * CONSUMERS + i),
                )  # fmt: skip
        count += 1

        for key in range(first_key, last_key, BLOCK_N):
            stage, phase = _place(block, STAGES)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_ready.index(stage), kv_bytes)
            tma.async_copy_global_to_shared(
                kv_desc, [HEADS + head, key, 0], k_ready.index(stage), k_buffers.index(stage)
            )
            if TAIL:
                tma.async_copy_global_to_shared(
                    kv_tail_desc, [HEADS + head, key, 64], k_ready.index(stage),
                    k_tails.index(stage),
                )  # fmt: skip
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_ready.index(stage), kv_bytes)
            tma.async_copy_global_to_shared(
                kv_desc, [2 * HEADS + head, key, 0], v_ready.index(stage), v_buffers.index(stage)
            )
            if TAIL:
                tma.async_copy_global_to_shared(
                    kv_tail_desc, [2 * HEADS + head, key, 64], v_ready.index(stage),
                    v_tails.index(stage),
                )  # fmt: skip
            block += 1
        # As many draws as units: whoever draws the last one puts the counter back.
        ticket = gl.atomic_add(state_ptr + 1, 1, sem="relaxed")
        if ticket == num_units - 1:
            gl.store(state_ptr + 1, 0)
        unit = ticket + gl.num_programs(0)

    slot, slot_phase = _place(count, 2)
    mbarrier.wait(item_empty.index(slot), slot_phase ^ 1)
    messages.index(slot).store(gl.where(field == 0, -1, 0))
    _barrier()
    mbarrier.arrive(item_ready.index(slot), count=1)


@gluon.jit
def _read(messages, slot):
    """A unit of work: (first row of the tile or -1: no more, first key, last key, end of the
    sequence, head, piece or -1: not split)."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    message = messages.index(slot).load(layout)
    field = gl.arange(0, 8, layout)
    row = gl.sum(gl.where(field == 0, message, 0), 0)
    first_key = gl.sum(gl.where(field == 1, message, 0), 0)
    last_key = gl.sum(gl.where(field == 2, message, 0), 0)
    end = gl.sum(gl.where(field == 3, message, 0), 0)
    head = gl.sum(gl.where(field == 4, message, 0), 0)
    piece = gl.sum(gl.where(field == 5, message, 0), 0)
    return row, first_key, last_key, end, head, piece


@gluon.jit
def _zero_past(buffer, valid, ROWS: gl.constexpr):
    """Zero the rows of a v block from `valid` on: a weight of zero does not silence a NaN.

    Every consumer does this to the shared block; all write the same bytes.
    """
    CHUNK: gl.constexpr = 32
    COLUMNS: gl.constexpr = buffer.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // (COLUMNS // 8), COLUMNS // 8], [4, 1], [1, 0]
    )
    rows = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    for i in gl.static_range(ROWS // CHUNK):
        if valid < (i + 1) * CHUNK:
            part = buffer.slice(i * CHUNK, CHUNK, 0)
            values = part.load(layout)
            part.store(gl.where((rows + i * CHUNK < valid)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _scores(
    q, q_tail, k_buffers, k_tails, k_ready, stage, phase, S_LAYOUT: gl.constexpr, TAIL: gl.constexpr
):
    mbarrier.wait(k_ready.index(stage), phase)
    k = _flat(k_buffers.index(stage))
    ROWS: gl.constexpr = q.shape[0]
    BLOCK_N: gl.constexpr = k.shape[0]
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
    if TAIL:
        k_tail = _flat(k_tails.index(stage))
        scores = warpgroup_mma(q_tail, k_tail.permute([1, 0]), scores, is_async=True)
    return scores


@gluon.jit
def _weights(scores, row_max, row_sum, valid, scale_log2, S_LAYOUT: gl.constexpr):
    """The online softmax of one block of scores, in float32."""
    BLOCK_N: gl.constexpr = scores.shape[1]
    if valid < BLOCK_N:
        keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        scores = gl.where((keys < valid)[None, :], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_max[:, None])
    correction = gl.exp2(row_max - new_max)
    row_sum = row_sum * correction + gl.sum(weights, 1)
    return weights, correction, new_max, row_sum


@gluon.jit
def _await_v(v_buffers, v_tails, v_ready, stage, phase, valid, TAIL: gl.constexpr):
    mbarrier.wait(v_ready.index(stage), phase)
    v = _flat(v_buffers.index(stage))
    v_tail = _flat(v_tails.index(stage))
    BLOCK_N: gl.constexpr = v.shape[0]
    if valid < BLOCK_N:
        _zero_past(v, valid, BLOCK_N)
        if TAIL:
            _zero_past(v_tail, valid, BLOCK_N)
        fence_async_shared()
        _barrier()


@gluon.jit
def _rescale(acc, correction, LAYOUT: gl.constexpr):
    return acc * gl.convert_layout(correction, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def _add_values(
    p, v_buffers, v_tails, stage, acc, acc_tail, PT_LAYOUT: gl.constexpr, TAIL: gl.constexpr
):  # fmt: skip
    """Issue acc += p @ v; the caller waits."""
    acc = warpgroup_mma(p, _flat(v_buffers.index(stage)), acc, is_async=True)
    if TAIL:
        p_tail = gl.convert_layout(p, PT_LAYOUT)
        acc_tail = warpgroup_mma(p_tail, _flat(v_tails.index(stage)), acc_tail, is_async=True)
    return acc, acc_tail


@gluon.jit
def _halves(x, LAYOUT: gl.constexpr):
    """Left and right half of the columns, which every thread already holds."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    left, right = x.reshape([ROWS, 2, COLUMNS // 2]).permute(0, 2, 1).split()
    return (
        gl.convert_layout(left, LAYOUT, assert_trivial=True),
        gl.convert_layout(right, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def _attend(
    scores, acc, acc_tail, row_max, row_sum, v_buffers, v_tails, v_ready, stage, phase, valid,
    scale_log2, BLOCK_N: gl.constexpr, TAIL: gl.constexpr, S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr, T_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Softmax of a block and its values, issued in two halves: the first multiplies while the
    second is exponentiated, and its weights' registers are free when this returns."""
    HALF: gl.constexpr = BLOCK_N // 2
    H_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    PT_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, T_LAYOUT, 2)
    VALUES: gl.constexpr = 2 if TAIL else 1
    dtype: gl.constexpr = v_buffers.dtype
    if valid < BLOCK_N:
        keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        scores = gl.where((keys < valid)[None, :], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    correction = gl.exp2(row_max - new_max)
    acc = _rescale(acc, correction, O_LAYOUT)
    acc_tail = _rescale(acc_tail, correction, T_LAYOUT)
    left, right = _halves(scores, H_LAYOUT)
    half_max = gl.convert_layout(new_max, gl.SliceLayout(1, H_LAYOUT))
    v = _flat(v_buffers.index(stage))
    v_tail = _flat(v_tails.index(stage))

    left = gl.exp2(left * scale_log2 - half_max[:, None])
    p_left = gl.convert_layout(left.to(dtype), P_LAYOUT)
    mbarrier.wait(v_ready.index(stage), phase)
    acc = warpgroup_mma(p_left, v.slice(0, HALF, 0), acc, is_async=True)
    if TAIL:
        p_tail = gl.convert_layout(p_left, PT_LAYOUT)
        acc_tail = warpgroup_mma(p_tail, v_tail.slice(0, HALF, 0), acc_tail, is_async=True)

    right = gl.exp2(right * scale_log2 - half_max[:, None])
    p_right = gl.convert_layout(right.to(dtype), P_LAYOUT)
    acc = warpgroup_mma(p_right, v.slice(HALF, HALF, 0), acc, is_async=True)
    if TAIL:
        p_tail = gl.convert_layout(p_right, PT_LAYOUT)
        acc_tail = warpgroup_mma(p_tail, v_tail.slice(HALF, HALF, 0), acc_tail, is_async=True)
    block_sum = gl.convert_layout(gl.sum(left, 1) + gl.sum(right, 1), gl.SliceLayout(1, S_LAYOUT))
    warpgroup_mma_wait(VALUES, [p_left])
    return acc, acc_tail, p_right, new_max, row_sum * correction + block_sum


@gluon.jit
def _store(
    out_ptr, acc, row_sum, row, end, column, HEAD_END, ROW_STRIDE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    inverse = 1.0 / gl.convert_layout(row_sum, gl.SliceLayout(1, LAYOUT))
    pointers = out_ptr + rows.to(gl.int64)[:, None] * ROW_STRIDE + columns[None, :]
    mask = (rows < end)[:, None] & (columns < HEAD_END)[None, :]
    gl.store(pointers, (acc * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _partial_pointers(
    work_ptr, index, column, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr
):
    rows = index * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return work_ptr + (rows * 96)[:, None] + columns[None, :]


@gluon.jit
def _join(
    acc, acc_tail, row_max, row_sum, work_ptr, arrivals_ptr, piece, parts,
    INDEX: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, T_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Leave this part of an item in memory; the last part to come joins all, in their order.

    A partial row is 96 floats: 64 and 16 of the head, then its maximum and its sum.
    """
    index = piece * CONSUMERS + INDEX
    max_ptrs = work_ptr + (index * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))) * 96 + 80
    gl.store(_partial_pointers(work_ptr, index, 0, ROWS, 64, O_LAYOUT), acc)
    gl.store(_partial_pointers(work_ptr, index, 64, ROWS, 16, T_LAYOUT), acc_tail)
    gl.store(max_ptrs, row_max)
    gl.store(max_ptrs + 1, row_sum)
    _barrier()
    first = piece - piece % parts
    arrived_ptr = arrivals_ptr + first * CONSUMERS + INDEX
    arrived = gl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
    _barrier()
    is_last = arrived == parts - 1
    if is_last:
        gl.store(arrived_ptr, 0)
        acc = gl.zeros([ROWS, 64], gl.float32, O_LAYOUT)
        acc_tail = gl.zeros([ROWS, 16], gl.float32, T_LAYOUT)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        for other in range(first, first + parts):
            index = other * CONSUMERS + INDEX
            max_ptrs = (
                work_ptr
                + (index * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))) * 96
                + 80
            )
            part_max = gl.load(max_ptrs, cache_modifier=".cg")
            part_sum = gl.load(max_ptrs + 1, cache_modifier=".cg")
            new_max = gl.maximum(row_max, part_max)
            ours, theirs = gl.exp2(row_max - new_max), gl.exp2(part_max - new_max)
            part = gl.load(
                _partial_pointers(work_ptr, index, 0, ROWS, 64, O_LAYOUT), cache_modifier=".cg"
            )
            acc = _rescale(acc, ours, O_LAYOUT) + _rescale(part, theirs, O_LAYOUT)
            part = gl.load(
                _partial_pointers(work_ptr, index, 64, ROWS, 16, T_LAYOUT), cache_modifier=".cg"
            )
            acc_tail = _rescale(acc_tail, ours, T_LAYOUT) + _rescale(part, theirs, T_LAYOUT)
            row_sum = row_sum * ours + part_sum * theirs
            row_max = new_max
    return acc, acc_tail, row_sum, is_last


@gluon.jit
def _consumer(
    buffers, barriers, messages, out_ptr, state_ptr, work_ptr, scale_log2,
    INDEX: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, TAIL: gl.constexpr,
    ROWS: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    q_buffers, q_tails, k_buffers, k_tails, v_buffers, v_tails = buffers
    item_ready, item_empty, k_ready, k_empty, v_ready, v_empty = barriers
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    T_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    PT_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, T_LAYOUT, 2)
    VALUES: gl.constexpr = 2 if TAIL else 1  # wgmma groups of one product
    dtype: gl.constexpr = q_buffers.dtype

    count, block = 0, 0  # units and blocks so far
    slot, slot_phase = _place(count, 2)
    mbarrier.wait(item_ready.index(slot), slot_phase)
    row, first_key, last_key, end, head, piece = _read(messages, slot)
    while row >= 0:
        last_block = block + (last_key - first_key - 1) // BLOCK_N
        row += INDEX * ROWS
        if row < end:
            q = _flat(q_buffers.index(slot * CONSUMERS + INDEX))
            q_tail = _flat(q_tails.index(slot * CONSUMERS + INDEX))
            acc = gl.zeros([ROWS, 64], gl.float32, O_LAYOUT)
            acc_tail = gl.zeros([ROWS, 16], gl.float32, T_LAYOUT)
            row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
            row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
            stage, phase = _place(block, STAGES)
            scores = _scores(q, q_tail, k_buffers, k_tails, k_ready, stage, phase, S_LAYOUT, TAIL)
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            if OVERLAP:
                # The values of a block are added while the next block goes through the softmax.
                weights, correction, row_max, row_sum = _weights(
                    scores, row_max, row_sum, last_key - first_key, scale_log2, S_LAYOUT
                )
                p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
                for i in range(block, last_block):
                    stage, phase = _place(i, STAGES)
                    next_stage, next_phase = _place(i + 1, STAGES)
                    scores = _scores(
                        q, q_tail, k_buffers, k_tails, k_ready, next_stage, next_phase, S_LAYOUT,
                        TAIL,
                    )  # fmt: skip
                    mbarrier.wait(v_ready.index(stage), phase)
                    acc, acc_tail = _add_values(
                        p, v_buffers, v_tails, stage, acc, acc_tail, PT_LAYOUT, TAIL
                    )
                    scores = warpgroup_mma_wait(VALUES, [scores])
                    mbarrier.arrive(k_empty.index(next_stage), count=1)
                    valid = last_key - first_key - (i + 1 - block) * BLOCK_N
                    weights, correction, row_max, row_sum = _weights(
                        scores, row_max, row_sum, valid, scale_log2, S_LAYOUT
                    )
                    acc, acc_tail, p = warpgroup_mma_wait(0, [acc, acc_tail, p])
                    mbarrier.arrive(v_empty.index(stage), count=1)
                    acc = _rescale(acc, correction, O_LAYOUT)
                    acc_tail = _rescale(acc_tail, correction, T_LAYOUT)
                    p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
            else:
                # The scores of the next block are queued behind the values of this one.
                for i in range(block, last_block):
                    stage, phase = _place(i, STAGES)
                    acc, acc_tail, p, row_max, row_sum = _attend(
                        scores, acc, acc_tail, row_max, row_sum, v_buffers, v_tails, v_ready,
                        stage, phase, BLOCK_N, scale_log2, BLOCK_N, TAIL, S_LAYOUT, O_LAYOUT,
                        T_LAYOUT,
                    )  # fmt: skip
                    next_stage, next_phase = _place(i + 1, STAGES)
                    scores = _scores(
                        q, q_tail, k_buffers, k_tails, k_ready, next_stage, next_phase, S_LAYOUT,
                        TAIL,
                    )  # fmt: skip
                    acc, acc_tail, p = warpgroup_mma_wait(VALUES, [acc, acc_tail, p])
                    mbarrier.arrive(v_empty.index(stage), count=1)
                    scores = warpgroup_mma_wait(0, [scores])
                    mbarrier.arrive(k_empty.index(next_stage), count=1)

            # Read again rather than kept in registers, which are short in the loop.
            row, first_key, last_key, end, head, piece = _read(messages, slot)
            row += INDEX * ROWS
            mbarrier.arrive(item_empty.index(slot), count=1)
            stage, phase = _place(last_block, STAGES)
            valid = (last_key - first_key - 1) % BLOCK_N + 1
            _await_v(v_buffers, v_tails, v_ready, stage, phase, valid, TAIL)
            if OVERLAP:
                acc, acc_tail = _add_values(
                    p, v_buffers, v_tails, stage, acc, acc_tail, PT_LAYOUT, TAIL
                )
                acc, acc_tail, p = warpgroup_mma_wait(0, [acc, acc_tail, p])
            else:
                acc, acc_tail, p, row_max, row_sum = _attend(
                    scores, acc, acc_tail, row_max, row_sum, v_buffers, v_tails, v_ready, stage,
                    phase, valid, scale_log2, BLOCK_N, TAIL, S_LAYOUT, O_LAYOUT, T_LAYOUT,
                )  # fmt: skip
                acc, acc_tail, p = warpgroup_mma_wait(0, [acc, acc_tail, p])
            mbarrier.arrive(v_empty.index(stage), count=1)

            is_last = True
            if piece >= 0:
                acc, acc_tail, row_sum, is_last = _join(
                    acc, acc_tail, row_max, row_sum, work_ptr, state_ptr + 8, piece,
                    gl.load(state_ptr + 4), INDEX, CONSUMERS, ROWS, S_LAYOUT, O_LAYOUT, T_LAYOUT,
                )  # fmt: skip
            if is_last:
                column = head * HEAD_DIM
                WIDTH: gl.constexpr = HEADS * HEAD_DIM
                _store(out_ptr, acc, row_sum, row, end, column, column + 64, WIDTH, O_LAYOUT)
                if TAIL:
                    _store(
                        out_ptr, acc_tail, row_sum, row, end, column + 64, column + HEAD_DIM,
                        WIDTH, T_LAYOUT,
                    )  # fmt: skip
        else:  # no rows in this tile: only hand the buffers back
            mbarrier.arrive(item_empty.index(slot), count=1)
            for i in range(block, last_block + 1):
                stage, phase = _place(i, STAGES)
                mbarrier.wait(k_ready.index(stage), phase)
                mbarrier.arrive(k_empty.index(stage), count=1)
                mbarrier.wait(v_ready.index(stage), phase)
                mbarrier.arrive(v_empty.index(stage), count=1)
        block = last_block + 1
        count += 1
        slot, slot_phase = _place(count, 2)
        mbarrier.wait(item_ready.index(slot), slot_phase)
        row, first_key, last_key, end, head, piece = _read(messages, slot)


@gluon.jit
def attention_sm90_kernel(
    q_desc,  # [3 * HEADS, P, HEAD_DIM], boxes [1, ROWS, 64]
    q_tail_desc,  # the same, boxes [1, ROWS, 16]
    kv_desc,  # boxes [1, BLOCK_N, 64]
    kv_tail_desc,  # boxes [1, BLOCK_N, 16]
    out_ptr,  # [P, HEADS * HEAD_DIM]
    table_ptr,  # int32 [tiles, 3]
    state_ptr,  # int32 [8 + pieces * CONSUMERS]
    work_ptr,  # float32 [pieces, CONSUMERS * ROWS, 96]
    scale_log2,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TAIL: gl.constexpr,
    ROWS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """Persistent and warp-specialised: one producer warp, CONSUMERS warpgroups."""
    dtype: gl.constexpr = q_desc.dtype
    q_buffers = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, 1, ROWS, 64], q_desc.layout)
    q_tails = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, 1, ROWS, 16], q_tail_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 64], kv_desc.layout)
    k_tails = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 16], kv_tail_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 64], kv_desc.layout)
    v_tails = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 16], kv_tail_desc.layout)
    messages = gl.allocate_shared_memory(
        gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    item_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(item_ready.index(i), count=1)
        mbarrier.init(item_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)

    descs = (q_desc, q_tail_desc, kv_desc, kv_tail_desc)
    buffers = (q_buffers, q_tails, k_buffers, k_tails, v_buffers, v_tails)
    barriers = (item_ready, item_empty, k_ready, k_empty, v_ready, v_empty)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        buffers,
                        barriers,
                        messages,
                        out_ptr,
                        state_ptr,
                        work_ptr,
                        scale_log2,
                        0,
                        HEADS,
                        HEAD_DIM,
                        TAIL,
                        ROWS,
                        CONSUMERS,
                        BLOCK_N,
                        STAGES,
                        OVERLAP,
                    ),
                ),
                (
                    _consumer,
                    (
                        buffers,
                        barriers,
                        messages,
                        out_ptr,
                        state_ptr,
                        work_ptr,
                        scale_log2,
                        1,
                        HEADS,
                        HEAD_DIM,
                        TAIL,
                        ROWS,
                        CONSUMERS,
                        BLOCK_N,
                        STAGES,
                        OVERLAP,
                    ),
                ),
                (
                    _producer,
                    (
                        descs,
                        buffers,
                        barriers,
                        messages,
                        table_ptr,
                        state_ptr,
                        HEADS,
                        ROWS,
                        CONSUMERS,
                        BLOCK_N,
                        STAGES,
                        TAIL,
                    ),
                ),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        buffers,
                        barriers,
                        messages,
                        out_ptr,
                        state_ptr,
                        work_ptr,
                        scale_log2,
                        0,
                        HEADS,
                        HEAD_DIM,
                        TAIL,
                        ROWS,
                        CONSUMERS,
                        BLOCK_N,
                        STAGES,
                        OVERLAP,
                    ),
                ),
                (
                    _consumer,
                    (
                        buffers,
                        barriers,
                        messages,
                        out_ptr,
                        state_ptr,
                        work_ptr,
                        scale_log2,
                        1,
                        HEADS,
                        HEAD_DIM,
                        TAIL,
                        ROWS,
                        CONSUMERS,
                        BLOCK_N,
                        STAGES,
                        OVERLAP,
                    ),
                ),
                (
                    _consumer,
                    (
                        buffers,
                        barriers,
                        messages,
                        out_ptr,
                        state_ptr,
                        work_ptr,
                        scale_log2,
                        2,
                        HEADS,
                        HEAD_DIM,
                        TAIL,
                        ROWS,
                        CONSUMERS,
                        BLOCK_N,
                        STAGES,
                        OVERLAP,
                    ),
                ),
                (
                    _producer,
                    (
                        descs,
                        buffers,
                        barriers,
                        messages,
                        table_ptr,
                        state_ptr,
                        HEADS,
                        ROWS,
                        CONSUMERS,
                        BLOCK_N,
                        STAGES,
                        TAIL,
                    ),
                ),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )


@dataclass(frozen=True)
class AttentionSm90Config:
    """How one launch is tiled.

    Attributes:
        rows: query rows of a consumer warpgroup, 64 or 128.
        consumers: warpgroups of a tile, 2 or 3.
        block_n: keys of a step.
        stages: depth of the rings of k and v.
        overlap: the softmax runs under the values of the block before (needs more registers), else
            the scores of the next block are only queued behind the values of this one.
    """

    rows: int
    consumers: int
    block_n: int
    stages: int
    overlap: bool = False
    can_split: ClassVar[bool] = True

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return self.rows * self.consumers


def _supported(device: torch.device) -> bool:
    tested = triton.__version__.startswith(TESTED_RELEASES)
    return tested and capability_of(device) == (9, 0)


def attention_sm90_config(
    num_patches: int, num_sequences: int, head_dim: int, device: torch.device
) -> AttentionSm90Config | None:
    """Choose for a capacity; None where the portable kernel serves, or serves better."""
    if not _supported(device) or head_dim not in (64, 72, 80) or num_patches <= 640:
        return None
    if num_patches <= 2560:
        return AttentionSm90Config(64, 2, 128, 2)
    if num_patches <= 480 * num_sequences:
        return AttentionSm90Config(128, 2, 64, 3, overlap=True)
    return AttentionSm90Config(64, 3, 128, 3)


def launch_attention_sm90(
    qkv: Tensor,  # [P, 3, H, D]
    out: Tensor,  # [P, H * D]
    tiles: "AttentionTiles",
    scale_log2: float,
    programs: int,
) -> None:
    """Launch the kernel on `programs` multiprocessors."""
    num_patches, _, num_heads, head_dim = qkv.shape
    config = tiles.config
    dtype = gl.bfloat16 if qkv.dtype == torch.bfloat16 else gl.float16
    shape, strides = [3 * num_heads, num_patches, head_dim], [head_dim, qkv.stride(0), 1]
    descriptors = []
    for rows in (config.rows, config.block_n):
        for columns in (64, 16):
            box = [1, rows, columns]
            layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
            descriptors.append(TensorDescriptor(qkv, shape, strides, box, layout))
    registers = (240, 24) if config.consumers == 2 else (160, 32)
    attention_sm90_kernel[(programs,)](
        *descriptors, out, tiles.table, tiles.state, tiles.partials, scale_log2,
        HEADS=num_heads, HEAD_DIM=head_dim, TAIL=16 if head_dim > 64 else 0,
        ROWS=config.rows, CONSUMERS=config.consumers, BLOCK_N=config.block_n, STAGES=config.stages,
        OVERLAP=config.overlap, CONSUMER_REGS=registers[0], PRODUCER_REGS=registers[1], num_warps=4,
    )  # fmt: skip
