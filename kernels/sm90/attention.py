"""Hopper tier of the packed varlen attention, in Gluon (triton.experimental.gluon, no interpreter).

The same work table as the portable kernel. One producer warp draws units of work and feeds shared
memory by TMA; each consumer warpgroup owns ROWS query rows of the tile and computes both products
with wgmma, float32 softmax in between. They synchronise through mbarriers only: `ready` completes
when bytes (or the message of a unit) have arrived, `empty` when every consumer has released it.

A unit may be a part of an item, a range of its keys; the last part to finish joins them all.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vitgraph.kernels.launch import hopper_tier_unavailable
from vitgraph.kernels.sm90.attention_blocks import (
    attend_overlapped,
    attend_queued,
    issue_scores,
    release,
)
from vitgraph.kernels.sm90.attention_output import join_parts, store_rows
from vitgraph.kernels.sm90.attention_shared import (
    V_LAYOUT,
    V_TAIL_LAYOUT,
    Shared,
    Sizes,
    box_layout,
    make_barriers,
    ring_place,
)
from vitgraph.kernels.sm90.gluon_names import async_load, barrier

if TYPE_CHECKING:
    from vitgraph.kernels.attention_schedule import AttentionSchedule


@gluon.jit
def _copy(desc, tail_desc, plane, row, ready, buffer, tail_buffer, TAIL: gl.constexpr):
    async_load(desc, [plane, row, 0], ready, buffer)
    if TAIL:
        async_load(tail_desc, [plane, row, 64], ready, tail_buffer)


@gluon.jit
def _field(message, index, layout: gl.constexpr):
    """One value of a message, of which every thread has a full copy."""
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
        slot, parity = ring_place(count, 2)
        mbarrier.wait(shared.unit_empty.index(slot), parity ^ 1)
        shared.messages.index(slot).store(message)
        barrier()
        ready = shared.unit_ready.index(slot)
        mbarrier.expect(ready, q_bytes)
        for i in gl.static_range(sizes.CONSUMERS):
            place = slot * sizes.CONSUMERS + i
            _copy(q_desc, q_tail_desc, head, row + i * sizes.ROWS, ready, shared.q.index(place),
                  shared.q_tail.index(place), sizes.TAIL)  # fmt: skip
        count += 1

        for key in range(_field(message, 1, layout), _field(message, 2, layout), sizes.BLOCK_N):
            stage = block % sizes.STAGES
            ready = shared.k_ready.index(stage)
            mbarrier.expect(ready, kv_bytes)
            _copy(kv_desc, kv_tail_desc, sizes.HEADS + head, key, ready, shared.k.index(stage),
                  shared.k_tail.index(stage), sizes.TAIL)  # fmt: skip
            # Frees v of `block - STAGES`, and the k that the next turn overwrites.
            next_stage, parity = ring_place(block + 1, sizes.STAGES)
            mbarrier.wait(shared.empty.index(next_stage), parity ^ 1)
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

    slot, parity = ring_place(count, 2)
    mbarrier.wait(shared.unit_empty.index(slot), parity ^ 1)
    shared.messages.index(slot).store(gl.full([8], -1, gl.int32, layout))  # no more
    barrier()
    mbarrier.arrive(shared.unit_ready.index(slot), count=1)


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
            scores = issue_scores(sizes, shared, place, block)
            scores = warpgroup_mma_wait(0, [scores])
            valid = (keys - 1) % sizes.BLOCK_N + 1  # keys of the last block
            attend: gl.constexpr = attend_overlapped if sizes.OVERLAP else attend_queued
            acc, acc_tail, row_max, row_sum = attend(
                sizes, shared, place, block, last, valid, scores, acc, acc_tail, row_max, row_sum,
                scale_log2,
            )  # fmt: skip
            # Read again rather than kept in registers, which are short in the loop.
            message = shared.messages.index(slot).load(layout)
            mbarrier.arrive(shared.unit_empty.index(slot), count=1)
            piece, parts = _field(message, 5, layout), _field(message, 6, layout)
            done = True
            if parts > 1:
                acc, acc_tail, row_sum, done = join_parts(
                    sizes, acc, acc_tail, row_max, row_sum, partials_ptr, state_ptr + 2, piece,
                    parts, INDEX,
                )  # fmt: skip
            if done:
                row = _field(message, 0, layout) + INDEX * sizes.ROWS
                end, head = _field(message, 3, layout), _field(message, 4, layout)
                store_rows(sizes, out_ptr, acc, row_sum, row, end, head, 0, V_LAYOUT)
                if sizes.TAIL:
                    store_rows(sizes, out_ptr, acc_tail, row_sum, row, end, head, 64, V_TAIL_LAYOUT)
        else:  # no rows of the sequence here: only hand the buffers back
            mbarrier.arrive(shared.unit_empty.index(slot), count=1)
            for i in range(block, last + 1):
                stage, parity = ring_place(i, sizes.STAGES)
                mbarrier.wait(shared.k_ready.index(stage), parity)
                release(sizes, shared, i)
                mbarrier.wait(shared.v_ready.index(stage), parity)
        block = last + 1
        count += 1
        slot, parity = ring_place(count, 2)
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
        make_barriers(2, 1),
        make_barriers(2, CONSUMERS),
        make_barriers(STAGES, 1),
        make_barriers(STAGES, 1),
        make_barriers(STAGES, CONSUMERS),
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


# Small tiles; wide ones for many small images; tall ones, of three warpgroups, for the rest.
CONFIGS = {
    "small": AttentionSm90Config(64, 2, 128, 2),
    "wide": AttentionSm90Config(128, 2, 64, 3, overlap=True),
    "tall": AttentionSm90Config(64, 3, 128, 3),
}


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
        return CONFIGS["small"]
    return CONFIGS["wide" if num_patches <= 480 * num_sequences else "tall"]


def launch_attention_sm90(
    qkv: Tensor,  # [P, 3, H, D]
    out: Tensor,  # [P, H * D]
    schedule: "AttentionSchedule",
    scale_log2: float,
    programs: int,
) -> None:
    """Launch the kernel on `programs` multiprocessors."""
    num_patches, _, num_heads, head_dim = qkv.shape
    config = schedule.config
    dtype = gl.bfloat16 if qkv.dtype == torch.bfloat16 else gl.float16
    shape, strides = [3 * num_heads, num_patches, head_dim], [head_dim, qkv.stride(0), 1]
    descriptors = []
    for rows in (config.rows, config.block_n):
        for columns in (64, 16):
            box, layout = [1, rows, columns], box_layout(rows, columns, dtype)
            descriptors.append(TensorDescriptor(qkv, shape, strides, box, layout))
    attention_sm90_kernel[(programs,)](
        *descriptors, out, schedule.table, schedule.state, schedule.partials, scale_log2,
        HEADS=num_heads, HEAD_DIM=head_dim, TAIL=16 if head_dim > 64 else 0,
        ROWS=config.rows, CONSUMERS=config.consumers, BLOCK_N=config.block_n,
        STAGES=config.stages, OVERLAP=config.overlap, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
