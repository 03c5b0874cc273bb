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

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vitgraph.kernels.launch import cdiv, num_programs, row_count
from vitgraph.kernels.linear_triton import Activation
from vitgraph.kernels.sm90.gluon_names import async_load
from vitgraph.kernels.sm90.linear_flat import consume_flat, produce_flat
from vitgraph.kernels.sm90.linear_tiles import (
    CONSUMERS,
    DEPTH,
    LAYOUT,
    NARROW,
    ROWS,
    STAGES,
    STAGING,
    WIDE_LAYOUT,
    fetch_residual,
    finish,
    is_flat,
    is_wide,
    multiply,
    num_tiles,
    tall_origin,
)


@gluon.jit
def _produce_tall(
    x_desc, weight_desc, tail_desc, stages, num_rows,
    N: gl.constexpr, K: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    x_smem, weight_smem, tail_smem, ready, empty = stages
    step = 0
    for tile in range(gl.program_id(0), num_tiles(num_rows, N, ROWS, COLS), gl.num_programs(0)):
        row, col = tall_origin(tile, num_rows, N, ROWS, COLS)
        for k in range(0, K, DEPTH):
            stage = step % STAGES
            barrier = ready.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(barrier, (ROWS + COLS) * DEPTH * 2)
            async_load(
                weight_desc, [col, k], barrier, weight_smem.index(stage)
            )  # fmt: skip
            if COLS == 192:
                async_load(
                    tail_desc, [col + 128, k], barrier, tail_smem.index(stage)
                )  # fmt: skip
            for consumer in gl.static_range(CONSUMERS):
                async_load(
                    x_desc, [row + 64 * consumer, k], barrier,
                    x_smem.index(stage * CONSUMERS + consumer),
                )  # fmt: skip
            step += 1


@gluon.jit
def _produce(
    x_desc, weight_desc, tail_desc, stages, num_rows, N: gl.constexpr, K: gl.constexpr
):  # fmt: skip
    """Fill the stages, as they become empty, with the steps of this program's tiles."""
    if is_flat(num_rows, N):
        produce_flat(x_desc, tail_desc, stages, num_rows, N, K)
    elif is_wide(num_rows, N):
        _produce_tall(x_desc, weight_desc, tail_desc, stages, num_rows, N, K, 192)
    else:
        _produce_tall(x_desc, weight_desc, tail_desc, stages, num_rows, N, K, 128)


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
    for tile in range(gl.program_id(0), num_tiles(num_rows, N, ROWS, COLS), gl.num_programs(0)):
        row, col = tall_origin(tile, num_rows, N, ROWS, COLS)
        row += 64 * CONSUMER
        acc = gl.zeros([64, 128], gl.float32, WIDE_LAYOUT)
        tail = gl.zeros([64, 64], gl.float32, LAYOUT)
        for k in range(0, K, DEPTH):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            x = x_smem.index(stage * CONSUMERS + CONSUMER)
            # Nothing stays in flight: the other consumers keep the tensor cores busy, and the
            # stage is free the sooner.
            acc = multiply(x, weight_smem.index(stage), acc)
            if COLS == 192:
                tail = multiply(x, tail_smem.index(stage), tail)
            acc, tail = warpgroup_mma_wait(0, deps=(acc, tail))
            mbarrier.arrive(empty.index(stage))
            step += 1
            if k == FETCH:
                tma.store_wait(0)  # the tile before has left the staging memory
                if residual_desc is not None:
                    fetch_residual(
                        residual_desc, row, col, staging, residual_barrier, FIRST, COLS // 64
                    )  # fmt: skip
        if residual_desc is not None:
            mbarrier.wait(residual_barrier, residual_phase)
            residual_phase ^= 1
        halves = acc.reshape([64, 2, 64]).permute((0, 2, 1)).split()
        for half in gl.static_range(2):
            finish(
                halves[half], row, col + 64 * half, staging.index(FIRST + half), outputs,
                num_rows, N, ACTIVATION,
            )  # fmt: skip
        if COLS == 192:
            finish(tail, row, col + 128, staging.index(FIRST + 2), outputs, num_rows, N, ACTIVATION)
    tma.store_wait(0)


SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, stages, staging, barriers, outputs, num_rows,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Multiply and finish this consumer's share of the program's tiles."""
    residual_ready, sums_barrier = barriers
    residual_barrier = residual_ready.index(CONSUMER)
    if is_flat(num_rows, N):
        consume_flat(
            CONSUMER, stages, staging, residual_barrier, sums_barrier, outputs, num_rows,
            N, K, ACTIVATION,
        )  # fmt: skip
    elif is_wide(num_rows, N):
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
    staging = gl.allocate_shared_memory(dtype, [STAGING, 64, 64], layout)
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
    # Inlined: Gluon turns constexprs in a named tuple into tensors.
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

    def descriptor(tensor: Tensor, rows: int = 64) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, 64], SHARED)

    flat_cols = 64 if out_features <= NARROW.value else 192
    most_tiles = cdiv(capacity, 64) * cdiv(out_features, flat_cols)
    linear_sm90_kernel[(num_programs(x.device, most_tiles, 1),)](
        descriptor(x), descriptor(weight, 128), descriptor(weight),
        descriptor(residual) if residual is not None else None, descriptor(out),
        bias, out, num_rows, out.stride(0), capacity, out_features, in_features, activation,
        # 65,536 registers are 128 for each of 512 threads; the consumers take the producer's.
        num_warps=4, maxnreg=128,
        enable_fp_fusion=True,
    )  # fmt: skip
