"""`linear` for Hopper in Gluon: one warp issues the copies, three warpgroups multiply and finish.

A tile has 192 rows, 64 for each consumer warpgroup, and 192 or 128 columns: the kernel takes the
width that fills the last round of tiles better (N = 1152 on 132 SMs: 192 for 4096 rows, which are
exactly one round, 128 up to 2688). 192 columns are two instructions, of 128 and 64, as the sides of
tensors are powers of two. The output goes through shared memory, so that its stores and the loads
of the residual are TMA's and run under the products of another tile.
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


@gluon.jit
def _num_tiles(num_rows, N: gl.constexpr, COLS: gl.constexpr):
    return (num_rows + ROWS - 1) // ROWS * ((N + COLS - 1) // COLS)


@gluon.jit
def _wide(num_rows, N: gl.constexpr):
    """Whether rounds of 192-column tiles take no longer than rounds of 128-column ones."""
    programs = gl.num_programs(0)
    wide_rounds = (_num_tiles(num_rows, N, 192) + programs - 1) // programs
    narrow_rounds = (_num_tiles(num_rows, N, 128) + programs - 1) // programs
    return wide_rounds * 192 <= narrow_rounds * 128


@gluon.jit
def _origin(tile, num_rows, N: gl.constexpr, COLS: gl.constexpr):
    """First row and column of a tile; groups of 8 tile rows share their operands in L2."""
    col_tiles: gl.constexpr = (N + COLS - 1) // COLS
    first = tile // (8 * col_tiles) * 8
    in_group = tile % (8 * col_tiles)
    group_rows = gl.minimum((num_rows + ROWS - 1) // ROWS - first, 8)
    return (first + in_group % group_rows) * ROWS, in_group // group_rows * COLS


@gluon.jit
def _produce_tiles(
    x_desc, weight_desc, tail_desc, stages, num_rows,
    N: gl.constexpr, K: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    x_smem, weight_smem, tail_smem, ready, empty = stages
    step = 0
    for tile in range(gl.program_id(0), _num_tiles(num_rows, N, COLS), gl.num_programs(0)):
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
def _produce(
    x_desc, weight_desc, tail_desc, stages, num_rows, N: gl.constexpr, K: gl.constexpr
):  # fmt: skip
    """Fill the stages, as they become empty, with the steps of this program's tiles."""
    if _wide(num_rows, N):
        _produce_tiles(x_desc, weight_desc, tail_desc, stages, num_rows, N, K, 192)
    else:
        _produce_tiles(x_desc, weight_desc, tail_desc, stages, num_rows, N, K, 128)


@gluon.jit
def _finish(
    acc, row, col, staging, outputs, num_rows, N: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """Epilogue and store of 64 x 64 accumulators; where all rows are real, `staging` holds the
    residual and takes the output."""
    bias_ptr, residual_ptr, out_ptr, residual_stride, out_stride, out_desc = outputs
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.convert_layout(acc, layout, assert_trivial=True)
    cols = col + gl.arange(0, 64, gl.SliceLayout(0, layout))
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + cols, mask=cols < N, other=0)
        acc += bias.to(gl.float32)[None, :]
    acc = activate(acc, ACTIVATION, out_ptr.dtype.element_ty)
    if row + 64 <= num_rows:
        if residual_ptr is not None:
            acc += staging.load(layout).to(gl.float32)
        staging.store(acc.to(out_ptr.dtype.element_ty))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row, col], staging)
    else:
        rows = row.to(gl.int64) + gl.arange(0, 64, gl.SliceLayout(1, layout))
        mask = (rows < num_rows)[:, None] & (cols < N)[None, :]
        if residual_ptr is not None:
            pointers = residual_ptr + rows[:, None] * residual_stride + cols[None, :]
            acc += gl.load(pointers, mask=mask, other=0).to(gl.float32)
        pointers = out_ptr + rows[:, None] * out_stride + cols[None, :]
        gl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _consume_tiles(
    CONSUMER: gl.constexpr, stages, staging, residual_ready, residual_desc, outputs, num_rows,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    x_smem, weight_smem, tail_smem, ready, empty = stages
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    tail_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    # Step at which the residual is asked for: late enough that the last store has drained.
    FETCH: gl.constexpr = 256 if K > 256 else (K - 1) // 64 * 64
    residual_barrier = residual_ready.index(CONSUMER)
    residual_phase = 0
    step = 0
    for tile in range(gl.program_id(0), _num_tiles(num_rows, N, COLS), gl.num_programs(0)):
        row, col = _origin(tile, num_rows, N, COLS)
        row += 64 * CONSUMER
        full = row + 64 <= num_rows
        acc = gl.zeros([64, 128], gl.float32, layout)
        tail = gl.zeros([64, 64], gl.float32, tail_layout)
        for k in range(0, K, DEPTH):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            x = x_smem.index(stage * CONSUMERS + CONSUMER)
            weight = weight_smem.index(stage).permute((1, 0))
            acc = warpgroup_mma(x, weight, acc, is_async=True)
            if COLS == 192:
                weight = tail_smem.index(stage).permute((1, 0))
                tail = warpgroup_mma(x, weight, tail, is_async=True)
            # Nothing stays in flight: the other consumers keep the tensor cores busy, and the
            # stage is free the sooner.
            acc, tail = warpgroup_mma_wait(0, deps=(acc, tail))
            mbarrier.arrive(empty.index(stage))
            step += 1
            if k == FETCH:
                tma.store_wait(0)  # the tile before has left the staging memory
                if residual_desc is not None:
                    mbarrier.expect(residual_barrier, 64 * COLS * 2, pred=full)
                    for part in gl.static_range(COLS // 64):
                        tma.async_copy_global_to_shared(
                            residual_desc, [row, col + 64 * part], residual_barrier,
                            staging.index(CONSUMER * 3 + part), pred=full,
                        )  # fmt: skip
        if residual_desc is not None:
            mbarrier.wait(residual_barrier, residual_phase, pred=full)
            residual_phase ^= full.to(gl.int32)
        halves = acc.reshape([64, 2, 64]).permute((0, 2, 1)).split()
        for part in gl.static_range(2):
            _finish(
                halves[part], row, col + 64 * part, staging.index(CONSUMER * 3 + part), outputs,
                num_rows, N, ACTIVATION,
            )  # fmt: skip
        if COLS == 192:
            _finish(
                tail, row, col + 128, staging.index(CONSUMER * 3 + 2), outputs,
                num_rows, N, ACTIVATION,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, stages, staging, residual_ready, residual_desc, outputs, num_rows,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Multiply and finish 64 rows of each of this program's tiles."""
    if _wide(num_rows, N):
        _consume_tiles(
            CONSUMER, stages, staging, residual_ready, residual_desc, outputs, num_rows,
            N, K, ACTIVATION, 192,
        )  # fmt: skip
    else:
        _consume_tiles(
            CONSUMER, stages, staging, residual_ready, residual_desc, outputs, num_rows,
            N, K, ACTIVATION, 128,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["capacity", "least_rows"])
def linear_sm90_kernel(
    x_desc, weight_desc, tail_desc, residual_desc, out_desc,
    bias_ptr, residual_ptr, out_ptr, num_rows_ptr,
    residual_stride, out_stride, capacity, least_rows,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """The function of `linear_kernel`, for more than `least_rows` rows; does nothing for fewer."""
    num_rows = row_count(num_rows_ptr, capacity)
    num_rows = gl.where(num_rows > least_rows, num_rows, 0)

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
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(residual_ready.index(consumer), count=1)

    stages = (x_smem, weight_smem, tail_smem, ready, empty)
    outputs = (bias_ptr, residual_ptr, out_ptr, residual_stride, out_stride, out_desc)
    # Written out, as constants in a tuple that has a name turn into tensors.
    gl.warp_specialize([
        (_consume, (0, stages, staging, residual_ready, residual_desc, outputs, num_rows,
                    N, K, ACTIVATION)),
        (_consume, (1, stages, staging, residual_ready, residual_desc, outputs, num_rows,
                    N, K, ACTIVATION)),
        (_consume, (2, stages, staging, residual_ready, residual_desc, outputs, num_rows,
                    N, K, ACTIVATION)),
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
    least_rows: int = 0,
) -> None:
    """Launch `linear_sm90_kernel`; the arguments of `linear`, checked there, 16-bit and aligned to
    16 bytes. Writes nothing where the real rows are at most `least_rows`."""
    capacity, (out_features, in_features) = x.shape[0], weight.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def descriptor(tensor: Tensor, rows: int = 64) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, 64], layout)

    num_tiles = triton.cdiv(capacity, ROWS.value) * triton.cdiv(out_features, 128)
    linear_sm90_kernel[(num_programs(x.device, num_tiles, 1),)](
        descriptor(x), descriptor(weight, 128), descriptor(weight),
        descriptor(residual) if residual is not None else None, descriptor(out),
        bias, residual, out, num_rows, residual.stride(0) if residual is not None else 0,
        out.stride(0), capacity, least_rows, out_features, in_features, activation,
        # 65,536 registers are 128 for each of 512 threads; the consumers take the producer's.
        num_warps=4, maxnreg=128,
    )  # fmt: skip
