"""Hopper tier of the packed varlen attention, in Gluon (triton.experimental.gluon, no interpreter).

The same work table as the portable kernel. One producer warp draws units of work and feeds shared
memory by TMA; each consumer warpgroup owns ROWS query rows of the tile and computes both products
with wgmma, float32 softmax in between. They meet at mbarriers only: `ready` is complete when bytes
(or the message of a unit) have arrived, `empty` when every consumer has let go.

A unit may be a part of an item, a range of its keys; the last part to finish joins them all.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
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
from triton.language.core import _aggregate as aggregate

from vitgraph.kernels.launch import hopper_tier_unavailable

if TYPE_CHECKING:
    from vitgraph.kernels.attention_tiles import AttentionTiles

PARTIAL_WIDTH = gl.constexpr(96)  # floats of a row of a part: 64 + 16, its maximum, its sum
V_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
V_TAIL_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))

_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed after Triton 3.6


@aggregate
class Sizes:
    """What is known when the kernel is compiled."""

    HEADS: gl.constexpr
    HEAD_DIM: gl.constexpr
    TAIL: gl.constexpr  # columns beyond 64, padded to 16, or 0
    GROUPS: gl.constexpr  # wgmma groups of one product
    ROWS: gl.constexpr
    CONSUMERS: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    OVERLAP: gl.constexpr
    SCORES: gl.constexpr  # layout of a block of scores, and of half of one
    HALF_SCORES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, HEADS, HEAD_DIM, TAIL, ROWS, CONSUMERS, BLOCK_N, STAGES, OVERLAP):
        block_n = gl.constexpr(BLOCK_N).value
        self.HEADS = gl.constexpr(HEADS)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.TAIL = gl.constexpr(TAIL)
        self.GROUPS = gl.constexpr(2 if gl.constexpr(TAIL).value else 1)
        self.ROWS = gl.constexpr(ROWS)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.OVERLAP = gl.constexpr(OVERLAP)
        self.SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16]))
        self.HALF_SCORES = gl.constexpr(
            gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n // 2, 16])
        )


@aggregate
class Shared:
    """Rings in shared memory: two units of q with their messages, STAGES blocks of k and v."""

    q: gl.shared_memory_descriptor
    q_tail: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k_tail: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    v_tail: gl.shared_memory_descriptor
    messages: gl.shared_memory_descriptor
    unit_ready: gl.shared_memory_descriptor
    unit_empty: gl.shared_memory_descriptor
    k_ready: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, q_tail, k, k_tail, v, v_tail, messages, unit_ready, unit_empty, k_ready,
                 k_empty, v_ready, v_empty):  # fmt: skip
        self.q, self.q_tail = q, q_tail
        self.k, self.k_tail, self.v, self.v_tail = k, k_tail, v, v_tail
        self.messages, self.unit_ready, self.unit_empty = messages, unit_ready, unit_empty
        self.k_ready, self.k_empty = k_ready, k_empty
        self.v_ready, self.v_empty = v_ready, v_empty


@gluon.jit
def _barriers(PLACES: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def _place(count, PLACES: gl.constexpr):
    """Where the `count`-th use of a ring falls, and the parity of its barrier."""
    return count % PLACES, count // PLACES & 1


@gluon.jit
def _flat(buffer):
    """A box [1, ROWS, COLUMNS] as the matrix [ROWS, COLUMNS]."""
    layout: gl.constexpr = gl.NVMMASharedLayout(
        buffer.type.layout.swizzle_byte_width, buffer.type.layout.element_bitwidth, rank=2
    )
    return buffer._reinterpret(buffer.dtype, [buffer.shape[1], buffer.shape[2]], layout)


@gluon.jit
def _copy(desc, tail_desc, plane, row, ready, buffer, tail_buffer, TAIL: gl.constexpr):
    tma.async_copy_global_to_shared(desc, [plane, row, 0], ready, buffer)
    if TAIL:
        tma.async_copy_global_to_shared(tail_desc, [plane, row, 64], ready, tail_buffer)


@gluon.jit
def _field(message, index, layout: gl.constexpr):
    """One number of a message that every thread holds whole."""
    return gl.sum(gl.where(gl.arange(0, 8, layout) == index, message, 0), 0)


@gluon.jit
def _producer(sizes, shared, source):
    q_desc, q_tail_desc, kv_desc, kv_tail_desc, table_ptr, state_ptr = source
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    q_bytes: gl.constexpr = sizes.CONSUMERS * sizes.ROWS * (64 + sizes.TAIL) * 2
    kv_bytes: gl.constexpr = sizes.BLOCK_N * (64 + sizes.TAIL) * 2
    num_units = gl.load(state_ptr)
    unit = gl.program_id(0)
    count, block = 0, 0  # units and blocks so far
    while unit < num_units:
        message = gl.load(table_ptr + unit * 8 + gl.arange(0, 8, layout))
        row = _field(message, 0, layout)
        head = _field(message, 4, layout)
        slot, parity = _place(count, 2)
        mbarrier.wait(shared.unit_empty.index(slot), parity ^ 1)
        shared.messages.index(slot).store(message)
        _barrier()
        ready = shared.unit_ready.index(slot)
        mbarrier.expect(ready, q_bytes)
        for i in gl.static_range(sizes.CONSUMERS):
            place = slot * sizes.CONSUMERS + i
            _copy(q_desc, q_tail_desc, head, row + i * sizes.ROWS, ready, shared.q.index(place),
                  shared.q_tail.index(place), sizes.TAIL)  # fmt: skip
        count += 1

        for key in range(_field(message, 1, layout), _field(message, 2, layout), sizes.BLOCK_N):
            stage, parity = _place(block, sizes.STAGES)
            mbarrier.wait(shared.k_empty.index(stage), parity ^ 1)
            ready = shared.k_ready.index(stage)
            mbarrier.expect(ready, kv_bytes)
            _copy(kv_desc, kv_tail_desc, sizes.HEADS + head, key, ready, shared.k.index(stage),
                  shared.k_tail.index(stage), sizes.TAIL)  # fmt: skip
            mbarrier.wait(shared.v_empty.index(stage), parity ^ 1)
            ready = shared.v_ready.index(stage)
            mbarrier.expect(ready, kv_bytes)
            _copy(kv_desc, kv_tail_desc, 2 * sizes.HEADS + head, key, ready, shared.v.index(stage),
                  shared.v_tail.index(stage), sizes.TAIL)  # fmt: skip
            block += 1
        # As many draws as units: whoever draws the last one puts the counter back.
        ticket = gl.atomic_add(state_ptr + 1, 1, sem="relaxed")
        if ticket == num_units - 1:
            gl.store(state_ptr + 1, 0)
        unit = ticket + gl.num_programs(0)

    slot, parity = _place(count, 2)
    mbarrier.wait(shared.unit_empty.index(slot), parity ^ 1)
    shared.messages.index(slot).store(gl.full([8], -1, gl.int32, layout))  # no more
    _barrier()
    mbarrier.arrive(shared.unit_ready.index(slot), count=1)


@gluon.jit
def _zero_past(buffer, valid):
    """Zero the rows of a block of v from `valid` on: a weight of zero does not silence a NaN.

    Every consumer does this to the shared block; all write the same bytes.
    """
    CHUNK: gl.constexpr = 32
    ROWS: gl.constexpr = buffer.shape[0]
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
def _await_last_v(sizes, shared, block, valid):
    stage, parity = _place(block, sizes.STAGES)
    mbarrier.wait(shared.v_ready.index(stage), parity)
    if valid < sizes.BLOCK_N:
        _zero_past(_flat(shared.v.index(stage)), valid)
        if sizes.TAIL:
            _zero_past(_flat(shared.v_tail.index(stage)), valid)
        fence_async_shared()
        _barrier()


@gluon.jit
def _scores(sizes, shared, place, block):
    """Issue q @ k^T of a block; the caller waits."""
    stage, parity = _place(block, sizes.STAGES)
    mbarrier.wait(shared.k_ready.index(stage), parity)
    zeros = gl.zeros([sizes.ROWS, sizes.BLOCK_N], gl.float32, sizes.SCORES)
    k = _flat(shared.k.index(stage)).permute([1, 0])
    scores = warpgroup_mma(_flat(shared.q.index(place)), k, zeros, use_acc=False, is_async=True)
    if sizes.TAIL:
        k = _flat(shared.k_tail.index(stage)).permute([1, 0])
        scores = warpgroup_mma(_flat(shared.q_tail.index(place)), k, scores, is_async=True)
    return scores


@gluon.jit
def _add_values(sizes, shared, stage, weights, FIRST: gl.constexpr, acc, acc_tail):
    """Issue acc += weights @ v, v from row FIRST of the block on; the caller waits."""
    KEYS: gl.constexpr = weights.shape[1]
    weights = weights.to(shared.v.dtype)
    p = gl.convert_layout(weights, gl.DotOperandLayout(0, V_LAYOUT, 2))
    v = _flat(shared.v.index(stage)).slice(FIRST, KEYS, 0)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    if sizes.TAIL:
        p_tail = gl.convert_layout(weights, gl.DotOperandLayout(0, V_TAIL_LAYOUT, 2))
        v = _flat(shared.v_tail.index(stage)).slice(FIRST, KEYS, 0)
        acc_tail = warpgroup_mma(p_tail, v, acc_tail, is_async=True)
    return p, acc, acc_tail


@gluon.jit
def _mask(scores, valid, layout: gl.constexpr):
    BLOCK_N: gl.constexpr = scores.shape[1]
    if valid < BLOCK_N:
        keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        scores = gl.where((keys < valid)[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def _rescale(acc, factor, layout: gl.constexpr):
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _attend(sizes, shared, block, valid, scores, acc, acc_tail, row_max, row_sum, scale_log2):
    """Softmax and values of a block, in two halves: the first multiplies while the second is
    exponentiated, and its weights' registers are free again when this returns."""
    HALF: gl.constexpr = sizes.BLOCK_N // 2
    layout: gl.constexpr = sizes.HALF_SCORES
    scores = _mask(scores, valid, sizes.SCORES)
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    correction = gl.exp2(row_max - new_max)
    acc = _rescale(acc, correction, V_LAYOUT)
    acc_tail = _rescale(acc_tail, correction, V_TAIL_LAYOUT)
    left, right = scores.reshape([sizes.ROWS, 2, HALF]).permute(0, 2, 1).split()
    left = gl.convert_layout(left, layout, assert_trivial=True)
    right = gl.convert_layout(right, layout, assert_trivial=True)
    shift = gl.convert_layout(new_max, gl.SliceLayout(1, layout))[:, None]

    stage, parity = _place(block, sizes.STAGES)
    left = gl.exp2(left * scale_log2 - shift)
    mbarrier.wait(shared.v_ready.index(stage), parity)
    p_left, acc, acc_tail = _add_values(sizes, shared, stage, left, 0, acc, acc_tail)
    right = gl.exp2(right * scale_log2 - shift)
    p, acc, acc_tail = _add_values(sizes, shared, stage, right, HALF, acc, acc_tail)
    block_sum = gl.sum(left, 1) + gl.sum(right, 1)
    block_sum = gl.convert_layout(block_sum, gl.SliceLayout(1, sizes.SCORES))
    warpgroup_mma_wait(sizes.GROUPS, [p_left])
    return p, acc, acc_tail, new_max, row_sum * correction + block_sum


@gluon.jit
def _attend_queued(
    sizes, shared, place, block, last, valid, scores, acc, acc_tail, row_max, row_sum, scale_log2
):  # fmt: skip
    """Blocks `block`..`last`: the next scores are queued behind the values of a block."""
    for i in range(block, last):
        p, acc, acc_tail, row_max, row_sum = _attend(
            sizes, shared, i, sizes.BLOCK_N, scores, acc, acc_tail, row_max, row_sum, scale_log2
        )
        scores = _scores(sizes, shared, place, i + 1)
        acc, acc_tail, p = warpgroup_mma_wait(sizes.GROUPS, [acc, acc_tail, p])
        mbarrier.arrive(shared.v_empty.index(i % sizes.STAGES), count=1)
        scores = warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(shared.k_empty.index((i + 1) % sizes.STAGES), count=1)
    _await_last_v(sizes, shared, last, valid)
    p, acc, acc_tail, row_max, row_sum = _attend(
        sizes, shared, last, valid, scores, acc, acc_tail, row_max, row_sum, scale_log2
    )
    acc, acc_tail, p = warpgroup_mma_wait(0, [acc, acc_tail, p])
    return acc, acc_tail, row_max, row_sum


@gluon.jit
def _softmax(sizes, valid, scores, row_max, row_sum, scale_log2):
    scores = _mask(scores, valid, sizes.SCORES)
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_max[:, None])
    correction = gl.exp2(row_max - new_max)
    return weights, correction, new_max, row_sum * correction + gl.sum(weights, 1)


@gluon.jit
def _attend_overlapped(
    sizes, shared, place, block, last, valid, scores, acc, acc_tail, row_max, row_sum, scale_log2
):  # fmt: skip
    """Blocks `block`..`last`: the values of a block are added under the softmax of the next."""
    BLOCK_N: gl.constexpr = sizes.BLOCK_N
    only = gl.where(block == last, valid, BLOCK_N)
    weights, correction, row_max, row_sum = _softmax(
        sizes, only, scores, row_max, row_sum, scale_log2
    )
    weights = weights.to(shared.v.dtype)
    for i in range(block, last):
        stage, parity = _place(i, sizes.STAGES)
        scores = _scores(sizes, shared, place, i + 1)
        mbarrier.wait(shared.v_ready.index(stage), parity)
        p, acc, acc_tail = _add_values(sizes, shared, stage, weights, 0, acc, acc_tail)
        scores = warpgroup_mma_wait(sizes.GROUPS, [scores])
        mbarrier.arrive(shared.k_empty.index((i + 1) % sizes.STAGES), count=1)
        weights, correction, row_max, row_sum = _softmax(
            sizes, gl.where(i + 1 == last, valid, BLOCK_N), scores, row_max, row_sum, scale_log2
        )
        acc, acc_tail, p = warpgroup_mma_wait(0, [acc, acc_tail, p])
        mbarrier.arrive(shared.v_empty.index(stage), count=1)
        acc = _rescale(acc, correction, V_LAYOUT)
        acc_tail = _rescale(acc_tail, correction, V_TAIL_LAYOUT)
        weights = weights.to(shared.v.dtype)
    _await_last_v(sizes, shared, last, valid)
    p, acc, acc_tail = _add_values(sizes, shared, last % sizes.STAGES, weights, 0, acc, acc_tail)
    acc, acc_tail, p = warpgroup_mma_wait(0, [acc, acc_tail, p])
    return acc, acc_tail, row_max, row_sum


@gluon.jit
def _partial(partials_ptr, index, column, acc, layout: gl.constexpr):
    """Pointers to the columns of `acc` in the `index`-th block of partial rows."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    rows = index * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return partials_ptr + (rows * PARTIAL_WIDTH)[:, None] + columns[None, :]


@gluon.jit
def _join(
    sizes, acc, acc_tail, row_max, row_sum, partials_ptr, arrivals_ptr, piece, parts,
    INDEX: gl.constexpr,
):  # fmt: skip
    """Leave this part of an item in memory; the last part to come joins all, in their order."""
    layout: gl.constexpr = gl.SliceLayout(1, sizes.SCORES)
    index = piece * sizes.CONSUMERS + INDEX
    rows = gl.arange(0, sizes.ROWS, layout) * PARTIAL_WIDTH + 80
    max_ptrs = partials_ptr + index * sizes.ROWS * PARTIAL_WIDTH + rows
    gl.store(_partial(partials_ptr, index, 0, acc, V_LAYOUT), acc)
    gl.store(_partial(partials_ptr, index, 64, acc_tail, V_TAIL_LAYOUT), acc_tail)
    gl.store(max_ptrs, row_max)
    gl.store(max_ptrs + 1, row_sum)
    _barrier()
    first = piece - piece % parts
    arrivals_ptr += first * sizes.CONSUMERS + INDEX
    is_last = gl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == parts - 1
    _barrier()
    if is_last:
        gl.store(arrivals_ptr, 0)
        acc = gl.zeros_like(acc)
        acc_tail = gl.zeros_like(acc_tail)
        row_max = gl.full([sizes.ROWS], float("-inf"), gl.float32, layout)
        row_sum = gl.zeros([sizes.ROWS], gl.float32, layout)
        for other in range(first, first + parts):
            index = other * sizes.CONSUMERS + INDEX
            max_ptrs = partials_ptr + index * sizes.ROWS * PARTIAL_WIDTH + rows
            part_max = gl.load(max_ptrs, cache_modifier=".cg")
            part_sum = gl.load(max_ptrs + 1, cache_modifier=".cg")
            new_max = gl.maximum(row_max, part_max)
            ours, theirs = gl.exp2(row_max - new_max), gl.exp2(part_max - new_max)
            part = gl.load(_partial(partials_ptr, index, 0, acc, V_LAYOUT), cache_modifier=".cg")
            acc = _rescale(acc, ours, V_LAYOUT) + _rescale(part, theirs, V_LAYOUT)
            part = gl.load(
                _partial(partials_ptr, index, 64, acc_tail, V_TAIL_LAYOUT), cache_modifier=".cg"
            )
            acc_tail = _rescale(acc_tail, ours, V_TAIL_LAYOUT)
            acc_tail += _rescale(part, theirs, V_TAIL_LAYOUT)
            row_sum = row_sum * ours + part_sum * theirs
            row_max = new_max
    return acc, acc_tail, row_sum, is_last


@gluon.jit
def _store(sizes, out_ptr, acc, row_sum, row, end, head, column, layout: gl.constexpr):
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    row_ptrs = out_ptr + rows.to(gl.int64) * (sizes.HEADS * sizes.HEAD_DIM) + head * sizes.HEAD_DIM
    mask = (rows < end)[:, None] & (columns < sizes.HEAD_DIM)[None, :]
    values = _rescale(acc, 1.0 / row_sum, layout).to(out_ptr.dtype.element_ty)
    gl.store(row_ptrs[:, None] + columns[None, :], values, mask=mask)


@gluon.jit
def _consumer(sizes, shared, target, INDEX: gl.constexpr):
    out_ptr, state_ptr, partials_ptr, scale_log2 = target
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    count, block = 0, 0  # units and blocks so far
    mbarrier.wait(shared.unit_ready.index(0), 0)
    message = shared.messages.index(0).load(layout)
    while _field(message, 0, layout) >= 0:
        slot = count % 2
        keys = _field(message, 2, layout) - _field(message, 1, layout)
        last = block + (keys - 1) // sizes.BLOCK_N
        if _field(message, 0, layout) + INDEX * sizes.ROWS < _field(message, 3, layout):
            place = slot * sizes.CONSUMERS + INDEX
            acc = gl.zeros([sizes.ROWS, 64], gl.float32, V_LAYOUT)
            acc_tail = gl.zeros([sizes.ROWS, 16], gl.float32, V_TAIL_LAYOUT)
            row_layout: gl.constexpr = gl.SliceLayout(1, sizes.SCORES)
            row_max = gl.full([sizes.ROWS], float("-inf"), gl.float32, row_layout)
            row_sum = gl.zeros([sizes.ROWS], gl.float32, row_layout)
            scores = _scores(sizes, shared, place, block)
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(shared.k_empty.index(block % sizes.STAGES), count=1)
            valid = (keys - 1) % sizes.BLOCK_N + 1  # keys of the last block
            attend: gl.constexpr = _attend_overlapped if sizes.OVERLAP else _attend_queued
            acc, acc_tail, row_max, row_sum = attend(
                sizes, shared, place, block, last, valid, scores, acc, acc_tail, row_max, row_sum,
                scale_log2,
            )  # fmt: skip
            mbarrier.arrive(shared.v_empty.index(last % sizes.STAGES), count=1)

            # Read again rather than kept in registers, which are short in the loop.
            message = shared.messages.index(slot).load(layout)
            mbarrier.arrive(shared.unit_empty.index(slot), count=1)
            piece, parts = _field(message, 5, layout), _field(message, 6, layout)
            done = True
            if parts > 1:
                acc, acc_tail, row_sum, done = _join(
                    sizes, acc, acc_tail, row_max, row_sum, partials_ptr, state_ptr + 2, piece,
                    parts, INDEX,
                )  # fmt: skip
            if done:
                row = _field(message, 0, layout) + INDEX * sizes.ROWS
                end, head = _field(message, 3, layout), _field(message, 4, layout)
                _store(sizes, out_ptr, acc, row_sum, row, end, head, 0, V_LAYOUT)
                if sizes.TAIL:
                    _store(sizes, out_ptr, acc_tail, row_sum, row, end, head, 64, V_TAIL_LAYOUT)
        else:  # no rows of the sequence here: only hand the buffers back
            mbarrier.arrive(shared.unit_empty.index(slot), count=1)
            for i in range(block, last + 1):
                stage, parity = _place(i, sizes.STAGES)
                mbarrier.wait(shared.k_ready.index(stage), parity)
                mbarrier.arrive(shared.k_empty.index(stage), count=1)
                mbarrier.wait(shared.v_ready.index(stage), parity)
                mbarrier.arrive(shared.v_empty.index(stage), count=1)
        block = last + 1
        count += 1
        slot, parity = _place(count, 2)
        mbarrier.wait(shared.unit_ready.index(slot), parity)
        message = shared.messages.index(slot).load(layout)


@gluon.jit
def attention_sm90_kernel(
    q_desc,  # [3 * HEADS, P, HEAD_DIM], boxes [1, ROWS, 64]
    q_tail_desc,  # the same, boxes [1, ROWS, 16]
    kv_desc,  # boxes [1, BLOCK_N, 64]
    kv_tail_desc,  # boxes [1, BLOCK_N, 16]
    out_ptr,  # [P, HEADS * HEAD_DIM]
    table_ptr,  # int32 [units, 8]
    state_ptr,  # int32 [2 + arrivals]
    partials_ptr,  # float32 [parts, CONSUMERS * ROWS, 96]
    scale_log2,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TAIL: gl.constexpr,
    ROWS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Persistent and warp-specialised: CONSUMERS warpgroups and one producer warp."""
    sizes = Sizes(HEADS, HEAD_DIM, TAIL, ROWS, CONSUMERS, BLOCK_N, STAGES, OVERLAP)
    dtype: gl.constexpr = q_desc.dtype
    shared = Shared(
        gl.allocate_shared_memory(dtype, [2 * CONSUMERS, 1, ROWS, 64], q_desc.layout),
        gl.allocate_shared_memory(dtype, [2 * CONSUMERS, 1, ROWS, 16], q_tail_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 64], kv_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 16], kv_tail_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 64], kv_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 16], kv_tail_desc.layout),
        gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        _barriers(2, 1),
        _barriers(2, CONSUMERS),
        _barriers(STAGES, 1),
        _barriers(STAGES, CONSUMERS),
        _barriers(STAGES, 1),
        _barriers(STAGES, CONSUMERS),
    )
    source = (q_desc, q_tail_desc, kv_desc, kv_tail_desc, table_ptr, state_ptr)
    target = (out_ptr, state_ptr, partials_ptr, scale_log2)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (sizes, shared, target, 0)),
                (_consumer, (sizes, shared, target, 1)),
                (_producer, (sizes, shared, source)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (sizes, shared, target, 0)),
                (_consumer, (sizes, shared, target, 1)),
                (_consumer, (sizes, shared, target, 2)),
                (_producer, (sizes, shared, source)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


@dataclass(frozen=True)
class AttentionSm90Config:
    """How one launch is tiled.

    Attributes:
        rows: query rows of a consumer warpgroup, 64 or 128.
        consumers: warpgroups of a tile, 2 or 3.
        block_n: keys of a step.
        stages: depth of the rings of k and v.
        overlap: values of a block are added under the softmax of the next (needs more registers);
            otherwise scores of the next block are only queued behind the values of this one.
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


def attention_sm90_config(
    num_patches: int, num_sequences: int, head_dim: int, device: torch.device
) -> AttentionSm90Config | None:
    """Choose for a capacity; None where the portable kernel serves, or serves better.

    From one H200, 16 heads of 72, us: 1x400 portable 9.8, small 13.3; 1x1024 small 18.1, tall 21.7,
    portable 23.4; 1x2048 small 53.8, tall 60.7; 1x3072 tall 95.2, small 107.6, wide 119.0; 20x400
    wide 72.6, small 81.2, tall 88.6; 8x1024 tall 102.7, wide 107.4.
    """
    if head_dim not in (64, 72, 80) or num_patches <= 640 or hopper_tier_unavailable(device):
        return None
    if num_patches <= 2560:
        return AttentionSm90Config(64, 2, 128, 2)  # small
    if num_patches <= 480 * num_sequences:  # many small images
        return AttentionSm90Config(128, 2, 64, 3, overlap=True)  # wide
    return AttentionSm90Config(64, 3, 128, 3)  # tall


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
    attention_sm90_kernel[(programs,)](
        *descriptors, out, tiles.table, tiles.state, tiles.partials, scale_log2,
        HEADS=num_heads, HEAD_DIM=head_dim, TAIL=16 if head_dim > 64 else 0,
        ROWS=config.rows, CONSUMERS=config.consumers, BLOCK_N=config.block_n,
        STAGES=config.stages, OVERLAP=config.overlap, num_warps=4,
    )  # fmt: skip
