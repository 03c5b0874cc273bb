"""What a consumer of sm90/attention.py does with its blocks of keys: scores, softmax, values."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vitgraph.kernels.sm90.attention_shared import (
    V_LAYOUT,
    V_TAIL_LAYOUT,
    as_matrices,
    as_matrix,
    ring_place,
)
from vitgraph.kernels.sm90.gluon_names import barrier


@gluon.jit
def _zero_past(buffer, valid):
    """Zero the rows of a block of v from `valid` on: 0 * NaN is NaN.

    Every consumer does this to the shared block; all write the same bytes.
    """
    CHUNK: gl.constexpr = 16
    ROWS: gl.constexpr = buffer.shape[1]
    COLUMNS: gl.constexpr = buffer.shape[2]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // (COLUMNS // 8), COLUMNS // 8], [4, 1], [1, 0]
    )
    rows = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    chunks = as_matrices(buffer, ROWS // CHUNK)
    for i in range(valid // CHUNK, ROWS // CHUNK):
        part = chunks.index(i)
        values = part.load(layout)
        part.store(gl.where((rows < valid - i * CHUNK)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _await_last_v(sizes, shared, block, valid):
    stage, parity = ring_place(block, sizes.STAGES)
    mbarrier.wait(shared.v_ready.index(stage), parity)
    if valid < sizes.BLOCK_N:
        _zero_past(shared.v.index(stage), valid)
        if sizes.TAIL:
            _zero_past(shared.v_tail.index(stage), valid)
        fence_async_shared()
        barrier()


@gluon.jit
def release(sizes, shared, block):
    """Release k of `block` and v of the block before.

    All warps of the warpgroup meet here and again at the next wait: with a release right before a
    wait, they meet once a block.
    """
    mbarrier.arrive(shared.empty.index(block % sizes.STAGES), count=1)


@gluon.jit
def issue_scores(sizes, shared, place, block):
    """Issue q @ k^T of a block; the caller waits."""
    stage, parity = ring_place(block, sizes.STAGES)
    mbarrier.wait(shared.k_ready.index(stage), parity)
    zeros = gl.zeros([sizes.ROWS, sizes.BLOCK_N], gl.float32, sizes.SCORES)
    k = as_matrix(shared.k.index(stage)).permute([1, 0])
    scores = warpgroup_mma(as_matrix(shared.q.index(place)), k, zeros, use_acc=False, is_async=True)
    if sizes.TAIL:
        k = as_matrix(shared.k_tail.index(stage)).permute([1, 0])
        scores = warpgroup_mma(as_matrix(shared.q_tail.index(place)), k, scores, is_async=True)
    return scores


@gluon.jit
def _add_values(sizes, shared, stage, weights, FIRST: gl.constexpr, acc, acc_tail):
    """Issue acc += weights @ v, v from row FIRST of the block on; the caller waits."""
    KEYS: gl.constexpr = weights.shape[1]
    weights = weights.to(shared.v.dtype)
    p = gl.convert_layout(weights, gl.DotOperandLayout(0, V_LAYOUT, 2))
    v = as_matrix(shared.v.index(stage)).slice(FIRST, KEYS, 0)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    if sizes.TAIL:
        p_tail = gl.convert_layout(weights, gl.DotOperandLayout(0, V_TAIL_LAYOUT, 2))
        v = as_matrix(shared.v_tail.index(stage)).slice(FIRST, KEYS, 0)
        acc_tail = warpgroup_mma(p_tail, v, acc_tail, is_async=True)
    return p, acc, acc_tail


@gluon.jit
def _mask(scores, valid, layout: gl.constexpr):
    """Scores of the keys from `valid` on become -inf.

    Looked up in a word of bits for each 8 keys. Compared with `valid`, the numbers of a thread's 32
    keys would be kept in registers from one unit of work to the next (LLVM and ptxas 13 move them
    out of every loop), and registers are short.
    """
    ROWS: gl.constexpr = scores.shape[0]
    BLOCK_N: gl.constexpr = scores.shape[1]
    if valid < BLOCK_N:
        # Key 8 i + 2 pair + odd; `pair` is the thread's, the others are known when compiled.
        keys = scores.reshape([ROWS, BLOCK_N // 8, 4, 2])
        row: gl.constexpr = gl.SliceLayout(0, keys.type.layout)
        i = gl.arange(0, BLOCK_N // 8, gl.SliceLayout(1, gl.SliceLayout(2, row)))
        pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, row)))
        odd = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, row)))
        words = (1 << gl.minimum(gl.maximum(valid - 8 * i, 0), 8)) - 1
        words = words[:, None, None] >> 2 * pair[None, :, None] >> odd[None, None, :]
        keys = gl.where((words & 1)[None, :, :, :] != 0, keys, float("-inf"))
        scores = gl.convert_layout(keys.reshape([ROWS, BLOCK_N]), layout, assert_trivial=True)
    return scores


@gluon.jit
def rescale(acc, factor, layout: gl.constexpr):
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
    acc = rescale(acc, correction, V_LAYOUT)
    acc_tail = rescale(acc_tail, correction, V_TAIL_LAYOUT)
    left, right = scores.reshape([sizes.ROWS, 2, HALF]).permute(0, 2, 1).split()
    left = gl.convert_layout(left, layout, assert_trivial=True)
    right = gl.convert_layout(right, layout, assert_trivial=True)
    shift = gl.convert_layout(new_max, gl.SliceLayout(1, layout))[:, None]

    stage, parity = ring_place(block, sizes.STAGES)
    left = gl.exp2(left * scale_log2 - shift)
    release(sizes, shared, block)
    mbarrier.wait(shared.v_ready.index(stage), parity)
    p_left, acc, acc_tail = _add_values(sizes, shared, stage, left, 0, acc, acc_tail)
    right = gl.exp2(right * scale_log2 - shift)
    p, acc, acc_tail = _add_values(sizes, shared, stage, right, HALF, acc, acc_tail)
    block_sum = gl.sum(left, 1) + gl.sum(right, 1)
    block_sum = gl.convert_layout(block_sum, gl.SliceLayout(1, sizes.SCORES))
    warpgroup_mma_wait(sizes.GROUPS, [p_left])
    return p, acc, acc_tail, new_max, row_sum * correction + block_sum


@gluon.jit
def attend_queued(
    sizes, shared, place, block, last, valid, scores, acc, acc_tail, row_max, row_sum, scale_log2
):  # fmt: skip
    """Blocks `block`..`last`: the next scores are queued behind the values of a block."""
    for i in range(block, last):
        p, acc, acc_tail, row_max, row_sum = _attend(
            sizes, shared, i, sizes.BLOCK_N, scores, acc, acc_tail, row_max, row_sum, scale_log2
        )
        scores = issue_scores(sizes, shared, place, i + 1)
        scores, acc, acc_tail, p = warpgroup_mma_wait(0, [scores, acc, acc_tail, p])
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
def _overlap(
    sizes, shared, place, block, valid, weights, acc, acc_tail, row_max, row_sum, scale_log2
):  # fmt: skip
    """Add the values of the block before `block` under the softmax of `block`."""
    scores = issue_scores(sizes, shared, place, block)
    stage, parity = ring_place(block - 1, sizes.STAGES)
    mbarrier.wait(shared.v_ready.index(stage), parity)
    p, acc, acc_tail = _add_values(sizes, shared, stage, weights, 0, acc, acc_tail)
    scores = warpgroup_mma_wait(sizes.GROUPS, [scores])
    weights, correction, row_max, row_sum = _softmax(
        sizes, valid, scores, row_max, row_sum, scale_log2
    )
    acc, acc_tail, p = warpgroup_mma_wait(0, [acc, acc_tail, p])
    release(sizes, shared, block)
    acc = rescale(acc, correction, V_LAYOUT)
    acc_tail = rescale(acc_tail, correction, V_TAIL_LAYOUT)
    return weights.to(shared.v.dtype), acc, acc_tail, row_max, row_sum


@gluon.jit
def attend_overlapped(
    sizes, shared, place, block, last, valid, scores, acc, acc_tail, row_max, row_sum, scale_log2
):  # fmt: skip
    """Blocks `block`..`last`: the values of a block are added under the softmax of the next."""
    release(sizes, shared, block)
    only = gl.where(block == last, valid, sizes.BLOCK_N)
    weights, _, row_max, row_sum = _softmax(sizes, only, scores, row_max, row_sum, scale_log2)
    weights = weights.to(shared.v.dtype)
    for i in range(block + 1, last):
        weights, acc, acc_tail, row_max, row_sum = _overlap(
            sizes, shared, place, i, sizes.BLOCK_N, weights, acc, acc_tail, row_max, row_sum,
            scale_log2,
        )  # fmt: skip
    if block < last:
        weights, acc, acc_tail, row_max, row_sum = _overlap(
            sizes, shared, place, last, valid, weights, acc, acc_tail, row_max, row_sum, scale_log2
        )
    _await_last_v(sizes, shared, last, valid)
    p, acc, acc_tail = _add_values(sizes, shared, last % sizes.STAGES, weights, 0, acc, acc_tail)
    acc, acc_tail, p = warpgroup_mma_wait(0, [acc, acc_tail, p])
    return acc, acc_tail, row_max, row_sum
