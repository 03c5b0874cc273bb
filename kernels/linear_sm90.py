"""`linear` for Hopper in Gluon: one warp issues the copies, three warpgroups multiply and finish.

How the work is cut is decided on the device, from the real number of rows:

tall  192 rows, 64 for each consumer, and 192 or 128 columns, the width that fills the last round of
      tiles better (N = 1152 on 132 SMs: 192 for 4096 rows, which are exactly one round, 128 up to
      2688). 192 columns are two instructions, of 128 and 64, as the sides of tensors are powers of
      two. Tiles of 64 columns cost nearly as much as those of 128.
flat  64 rows, where one round of such tiles does (448 rows): the consumers share either 192 columns
      or, in a layer too narrow for that, the depth of a tile of 64 columns.

The output goes through shared memory, so that its stores and the loads of the residual are TMA's
and run under the products of another tile.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vitgraph.kernels.activation import Activation, activate
from vitgraph.kernels.launch import num_programs, row_count

CONSUMERS: gl.constexpr = gl.constexpr(3)
ROWS: gl.constexpr = gl.constexpr(192)
DEPTH: gl.constexpr = gl.constexpr(64)
STAGES: gl.constexpr = gl.constexpr(3)
NARROW: gl.constexpr = gl.constexpr(2048)  # flat tiles of layers with more columns share those
LAYOUT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WIDE_LAYOUT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))

SUMS_LAYOUT: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))

_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed after Triton 3.6


@gluon.jit
def _num_tiles(num_rows, N: gl.constexpr, TILE_ROWS: gl.constexpr, TILE_COLS: gl.constexpr):
    return (num_rows + TILE_ROWS - 1) // TILE_ROWS * ((N + TILE_COLS - 1) // TILE_COLS)


@gluon.jit
def _is_flat(num_rows, N: gl.constexpr):
    cols: gl.constexpr = 64 if N <= NARROW else 192
    return _num_tiles(num_rows, N, 64, cols) <= gl.num_programs(0)


@gluon.jit
def _is_wide(num_rows, N: gl.constexpr):
    """Whether rounds of 192-column tall tiles take no longer than rounds of 128-column ones."""
    programs = gl.num_programs(0)
    wide_rounds = (_num_tiles(num_rows, N, ROWS, 192) + programs - 1) // programs
    narrow_rounds = (_num_tiles(num_rows, N, ROWS, 128) + programs - 1) // programs
    return wide_rounds * 192 <= narrow_rounds * 128


@gluon.jit
def _origin(tile, num_rows, N: gl.constexpr, COLS: gl.constexpr):
    """First row and column of a tall tile; groups of 8 tile rows share their operands in L2."""
    col_tiles: gl.constexpr = (N + COLS - 1) // COLS
    first = tile // (8 * col_tiles) * 8
    in_group = tile % (8 * col_tiles)
    group_rows = gl.minimum((num_rows + ROWS - 1) // ROWS - first, 8)
    return (first + in_group % group_rows) * ROWS, in_group // group_rows * COLS


@gluon.jit
def _flat_origin(num_rows, N: gl.constexpr):
    """First row and column of this program's flat tile, past the last row if it has none."""
    cols: gl.constexpr = 64 if N <= NARROW else 192
    row_tiles = (num_rows + 63) // 64
    tile = gl.program_id(0)
    has_tile = tile < _num_tiles(num_rows, N, 64, cols)
    row_tiles = gl.maximum(row_tiles, 1)
    return gl.where(has_tile, tile % row_tiles * 64, num_rows), tile // row_tiles * cols


@gluon.jit
def _weight_block(stages, stage, BLOCK: gl.constexpr):
    """64 of the up to 192 weight rows of a stage."""
    if BLOCK == 2:
        block = stages[2].index(stage)
    else:
        block = stages[1].index(stage).slice(64 * BLOCK, 64, 0)
    return block


@gluon.jit
def _produce_tall(
    x_desc, weight_desc, tail_desc, stages, num_rows,
    N: gl.constexpr, K: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    x_smem, weight_smem, tail_smem, ready, empty = stages
    step = 0
    for tile in range(gl.program_id(0), _num_tiles(num_rows, N, ROWS, COLS), gl.num_programs(0)):
        row, col = _origin(tile, num_rows, N, COLS)
        for k in range(0, K, DEPTH):
            stage = step % STAGES
            barrier = ready.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(barrier, (ROWS + COLS) * DEPTH * 2)
            tma.async_copy_global_to_shared(
                weight_desc, [col, k], barrier, weight_smem.index(stage)
            )  # fmt: skip
            if COLS == 192:
                tma.async_copy_global_to_shared(
                    tail_desc, [col + 128, k], barrier, tail_smem.index(stage)
                )  # fmt: skip
            for consumer in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    x_desc, [row + 64 * consumer, k], barrier,
                    x_smem.index(stage * CONSUMERS + consumer),
                )  # fmt: skip
            step += 1


@gluon.jit
def _produce_flat(x_desc, weight_desc, stages, num_rows, N: gl.constexpr, K: gl.constexpr):
    x_smem, _, _, ready, empty = stages
    SPLIT: gl.constexpr = N <= NARROW
    row, col = _flat_origin(num_rows, N)
    STEP: gl.constexpr = DEPTH * (CONSUMERS if SPLIT else 1)
    for k in range(0, gl.where(row < num_rows, K, 0), STEP):
        step = k // STEP
        stage = step % STAGES
        barrier = ready.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(barrier, (CONSUMERS + (CONSUMERS if SPLIT else 1)) * 64 * DEPTH * 2)
        for i in gl.static_range(CONSUMERS):
            weight = _weight_block(stages, stage, i)
            x = x_smem.index(stage * CONSUMERS + i)
            if SPLIT:
                depth = k + DEPTH * i
                tma.async_copy_global_to_shared(weight_desc, [col, depth], barrier, weight)
                tma.async_copy_global_to_shared(x_desc, [row, depth], barrier, x)
            else:
                tma.async_copy_global_to_shared(weight_desc, [col + 64 * i, k], barrier, weight)
                if i == 0:
                    tma.async_copy_global_to_shared(x_desc, [row, k], barrier, x)


@gluon.jit
def _produce(
    x_desc, weight_desc, tail_desc, stages, num_rows, N: gl.constexpr, K: gl.constexpr
):  # fmt: skip
    """Fill the stages, as they become empty, with the steps of this program's tiles."""
    if _is_flat(num_rows, N):
        _produce_flat(x_desc, tail_desc, stages, num_rows, N, K)
    elif _is_wide(num_rows, N):
        _produce_tall(x_desc, weight_desc, tail_desc, stages, num_rows, N, K, 192)
    else:
        _produce_tall(x_desc, weight_desc, tail_desc, stages, num_rows, N, K, 128)


@gluon.jit
def _fetch_residual(
    residual_desc, row, col, staging, barrier, FIRST: gl.constexpr, BLOCKS: gl.constexpr
):  # fmt: skip
    mbarrier.expect(barrier, BLOCKS * 64 * 64 * 2)
    for block in gl.static_range(BLOCKS):
        tma.async_copy_global_to_shared(
            residual_desc, [row, col + 64 * block], barrier, staging.index(FIRST + block)
        )


@gluon.jit
def _finish(acc, row, col, staging, outputs, num_rows, N: gl.constexpr, ACTIVATION: gl.constexpr):
    """Epilogue and store of 64 x 64 accumulators; `staging` holds the residual and takes the
    output, which goes straight to memory where some rows are not real."""
    bias_ptr, residual_desc, out_ptr, out_stride, out_desc = outputs
    acc = gl.convert_layout(acc, LAYOUT, assert_trivial=True)
    cols = col + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + cols, mask=cols < N, other=0)
        acc += bias.to(gl.float32)[None, :]
    acc = activate(acc, ACTIVATION, out_ptr.dtype.element_ty)
    if residual_desc is not None:
        acc += staging.load(LAYOUT).to(gl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    if row + 64 <= num_rows:
        staging.store(out)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row, col], staging)
    else:
        rows = row.to(gl.int64) + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        mask = (rows < num_rows)[:, None] & (cols < N)[None, :]
        gl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], out, mask=mask)


@gluon.jit
def _multiply(x, weight, acc):
    return warpgroup_mma(x, weight.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _consume_tall(
    CONSUMER: gl.constexpr, stages, staging, residual_barrier, outputs, num_rows,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    x_smem, weight_smem, tail_smem, ready, empty = stages
    residual_desc = outputs[1]
    FIRST: gl.constexpr = 3 * CONSUMER  # of its blocks of the staging memory
    # Step at which the residual is asked for: late enough that the last store has drained.
    FETCH: gl.constexpr = 256 if K > 256 else (K - 1) // 64 * 64
    residual_phase = 0
    step = 0
    for tile in range(gl.program_id(0), _num_tiles(num_rows, N, ROWS, COLS), gl.num_programs(0)):
        row, col = _origin(tile, num_rows, N, COLS)
        row += 64 * CONSUMER
        acc = gl.zeros([64, 128], gl.float32, WIDE_LAYOUT)
        tail = gl.zeros([64, 64], gl.float32, LAYOUT)
        for k in range(0, K, DEPTH):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            x = x_smem.index(stage * CONSUMERS + CONSUMER)
            # Nothing stays in flight: the other consumers keep the tensor cores busy, and the
            # stage is free the sooner.
            acc = _multiply(x, weight_smem.index(stage), acc)
            if COLS == 192:
                tail = _multiply(x, tail_smem.index(stage), tail)
            acc, tail = warpgroup_mma_wait(0, deps=(acc, tail))
            mbarrier.arrive(empty.index(stage))
            step += 1
            if k == FETCH:
                tma.store_wait(0)  # the tile before has left the staging memory
                if residual_desc is not None:
                    _fetch_residual(
                        residual_desc, row, col, staging, residual_barrier, FIRST, COLS // 64
                    )  # fmt: skip
        if residual_desc is not None:
            mbarrier.wait(residual_barrier, residual_phase)
            residual_phase ^= 1
        halves = acc.reshape([64, 2, 64]).permute((0, 2, 1)).split()
        for half in gl.static_range(2):
            _finish(
                halves[half], row, col + 64 * half, staging.index(FIRST + half), outputs,
                num_rows, N, ACTIVATION,
            )  # fmt: skip
        if COLS == 192:
            _finish(
                tail, row, col + 128, staging.index(FIRST + 2), outputs, num_rows, N, ACTIVATION
            )
    tma.store_wait(0)


@gluon.jit
def _consume_flat(
    CONSUMER: gl.constexpr, stages, staging, residual_barrier, sums_barrier, outputs, num_rows,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    x_smem, _, _, ready, empty = stages
    residual_desc = outputs[1]
    FIRST: gl.constexpr = 3 * CONSUMER
    SPLIT: gl.constexpr = N <= NARROW
    FINISHES: gl.constexpr = (CONSUMER == 0) or not SPLIT
    row, col = _flat_origin(num_rows, N)
    if row < num_rows:
        out_col = col if SPLIT else col + 64 * CONSUMER
        if FINISHES and residual_desc is not None:
            _fetch_residual(residual_desc, row, out_col, staging, residual_barrier, FIRST, 1)
        acc = gl.zeros([64, 64], gl.float32, LAYOUT)
        STEPS: gl.constexpr = (K + DEPTH * CONSUMERS - 1) // (DEPTH * CONSUMERS)
        for step in range(STEPS if SPLIT else (K + DEPTH - 1) // DEPTH):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            x = x_smem.index(stage * CONSUMERS + (CONSUMER if SPLIT else 0))
            acc = _multiply(x, _weight_block(stages, stage, CONSUMER), acc)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(stage))
        if SPLIT:
            # Over the staging memory from the third block on: consumer 0 finishes alone, in one.
            sums = staging._reinterpret(gl.float32, [4, 64, 64], SUMS_LAYOUT)
            if CONSUMER == 0:
                mbarrier.wait(sums_barrier, 0)
                for other in gl.static_range(1, CONSUMERS):
                    acc += sums.index(other).load(LAYOUT)
            else:
                sums.index(CONSUMER).store(acc)
                _barrier()
                mbarrier.arrive(sums_barrier)
        if FINISHES:
            if residual_desc is not None:
                mbarrier.wait(residual_barrier, 0)
            _finish(acc, row, out_col, staging.index(FIRST), outputs, num_rows, N, ACTIVATION)
            tma.store_wait(0)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, stages, staging, barriers, outputs, num_rows,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Multiply and finish this consumer's share of the program's tiles."""
    residual_ready, sums_barrier = barriers
    residual_barrier = residual_ready.index(CONSUMER)
    if _is_flat(num_rows, N):
        _consume_flat(
            CONSUMER, stages, staging, residual_barrier, sums_barrier, outputs, num_rows,
            N, K, ACTIVATION,
        )  # fmt: skip
    elif _is_wide(num_rows, N):
        _consume_tall(
            CONSUMER, stages, staging, residual_barrier, outputs, num_rows, N, K, ACTIVATION, 192
        )
    else:
        _consume_tall(
            CONSUMER, stages, staging, residual_barrier, outputs, num_rows, N, K, ACTIVATION, 128
        )


@gluon.jit(do_not_specialize=["capacity"])
def linear_sm90_kernel(
    x_desc, weight_desc, tail_desc, residual_desc, out_desc,
    bias_ptr, out_ptr, num_rows_ptr, out_stride, capacity,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """The function of `linear_kernel`."""
    num_rows = row_count(num_rows_ptr, capacity)

    dtype: gl.constexpr = x_desc.dtype
    layout: gl.constexpr = x_desc.layout
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, 64, DEPTH], layout)
    weight_smem = gl.allocate_shared_memory(dtype, [STAGES, 128, DEPTH], layout)
    tail_smem = gl.allocate_shared_memory(dtype, [STAGES, 64, DEPTH], layout)
    staging = gl.allocate_shared_memory(dtype, [CONSUMERS * 3, 64, 64], layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    residual_ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier_layout)
    sums_barrier = gl.allocate_shared_memory(gl.int64, [1], barrier_layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(residual_ready.index(consumer), count=1)
    mbarrier.init(sums_barrier, count=CONSUMERS - 1)

    stages = (x_smem, weight_smem, tail_smem, ready, empty)
    outputs = (bias_ptr, residual_desc, out_ptr, out_stride, out_desc)
    barriers = (residual_ready, sums_barrier)
    # Written out, as constants in a tuple that has a name turn into tensors.
    gl.warp_specialize([
        (_consume, (0, stages, staging, barriers, outputs, num_rows, N, K, ACTIVATION)),
        (_consume, (1, stages, staging, barriers, outputs, num_rows, N, K, ACTIVATION)),
        (_consume, (2, stages, staging, barriers, outputs, num_rows, N, K, ACTIVATION)),
        (_produce, (x_desc, weight_desc, tail_desc, stages, num_rows, N, K)),
    ], [4, 4, 1], [160, 160, 24])  # fmt: skip


def linear_sm90(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    residual: Tensor | None,
    num_rows: Tensor | None,
    out: Tensor,
) -> None:
    """Launch `linear_sm90_kernel`; the arguments of `linear`, checked there, 16-bit and aligned to
    16 bytes."""
    capacity, (out_features, in_features) = x.shape[0], weight.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def descriptor(tensor: Tensor, rows: int = 64) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, 64], layout)

    flat_cols = 64 if out_features <= NARROW.value else 192
    num_tiles = triton.cdiv(capacity, 64) * triton.cdiv(out_features, flat_cols)
    linear_sm90_kernel[(num_programs(x.device, num_tiles, 1),)](
        descriptor(x), descriptor(weight, 128), descriptor(weight),
        descriptor(residual) if residual is not None else None, descriptor(out),
        bias, out, num_rows, out.stride(0), capacity, out_features, in_features, activation,
        # 65,536 registers are 128 for each of 512 threads; the consumers take the producer's.
        num_warps=4, maxnreg=128,
    )  # fmt: skip
