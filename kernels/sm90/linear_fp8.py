"""`linear_fp8` for Hopper in Gluon: one warp issues the copies, two or three warpgroups multiply,
promote and finish.

A tile has 128 columns, and 64 rows for each of these consumers. Every step of 128 columns of `x` is
a sum of its own in the tensor cores, which the consumer then scales and adds in float32 while the
other consumers' products run. How many tiles there are is decided on the device, from the real
number of rows; the output and the residual go through shared memory, as in sm90/linear.py.

All consumers of a tile would come to its epilogue together, and the tensor cores would wait. With
STAGGER, each starts its first tile that many steps after the one before it, and keeps the distance.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vitgraph.kernels.fp8.quantize import E4M3, LEAST_SCALE, QuantizedLinear
from vitgraph.kernels.launch import cdiv, num_programs, row_count
from vitgraph.kernels.linear_triton import Activation
from vitgraph.kernels.sm90.attention_shared import make_barriers
from vitgraph.kernels.sm90.gluon_names import async_load
from vitgraph.kernels.sm90.linear_fp8_tiles import COLS, DEPTH, WIDE, Sizes, finish, multiply
from vitgraph.kernels.sm90.linear_tiles import fetch_residual, num_tiles, tall_origin

if TYPE_CHECKING:
    from vitgraph.kernels.fp8.linear_fp8_config import HopperConfig


@gluon.jit
def _produce(sizes, x_desc, weight_desc, stages, num_rows):
    """Fill the stages, as they become empty, with the steps of this program's tiles."""
    x_smem, weight_smem, ready, empty = stages
    tiles = num_tiles(num_rows, sizes.N, sizes.ROWS, COLS)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tall_origin(tile, num_rows, sizes.N, sizes.ROWS, COLS)
        for k in range(0, sizes.K, DEPTH):
            stage = step % sizes.STAGES
            barrier = ready.index(stage)
            mbarrier.wait(empty.index(stage), (step // sizes.STAGES & 1) ^ 1)
            mbarrier.expect(barrier, (sizes.ROWS + COLS) * DEPTH)
            async_load(weight_desc, [col, k], barrier, weight_smem.index(stage))
            for consumer in gl.static_range(sizes.CONSUMERS):
                async_load(
                    x_desc, [row + 64 * consumer, k], barrier,
                    x_smem.index(stage * sizes.CONSUMERS + consumer),
                )  # fmt: skip
            step += 1


@gluon.jit
def _consume(
    sizes, CONSUMER: gl.constexpr, shared, x_scales, outputs, num_rows,
    ACTIVATION: gl.constexpr, ROUNDED: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """Multiply, promote and finish this consumer's rows of the program's tiles."""
    stages, staging, barriers = shared
    x_smem, weight_smem, ready, empty = stages
    residual_ready, turns = barriers
    x_scale_ptr, x_scale, capacity = x_scales
    residual_desc = outputs[2]
    residual_barrier = residual_ready.index(CONSUMER)
    row_layout: gl.constexpr = gl.SliceLayout(1, WIDE)
    FIRST: gl.constexpr = 2 * CONSUMER  # of its blocks of the staging memory
    # Step at which the residual is asked for: late enough that the last store has drained.
    FETCH: gl.constexpr = 2 * DEPTH if sizes.STEPS > 2 else (sizes.STEPS - 1) * DEPTH
    # Step of the first tile after which the next consumer starts.
    TURN: gl.constexpr = (sizes.STAGGER if sizes.STAGGER < sizes.STEPS else sizes.STEPS) - 1
    tiles = num_tiles(num_rows, sizes.N, sizes.ROWS, COLS)
    residual_phase = 0
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tall_origin(tile, num_rows, sizes.N, sizes.ROWS, COLS)
        row += 64 * CONSUMER
        rows = row.to(gl.int64) + gl.arange(0, 64, row_layout)
        factor = gl.full([64], x_scale, gl.float32, row_layout)
        if x_scale_ptr is not None:
            factor = gl.load(x_scale_ptr + rows, mask=rows < num_rows, other=0.0)
        if sizes.STAGGER > 0 and CONSUMER > 0:
            mbarrier.wait(turns.index(CONSUMER), 0)  # completed once, and never again
        acc = gl.zeros([64, COLS], gl.float32, WIDE)
        for k in range(0, sizes.K, DEPTH):
            stage = step % sizes.STAGES
            mbarrier.wait(ready.index(stage), step // sizes.STAGES & 1)
            x = x_smem.index(stage * sizes.CONSUMERS + CONSUMER)
            products = multiply(x, weight_smem.index(stage))
            following = factor
            if x_scale_ptr is not None:  # of the next step, under the products of this one
                mask = (rows < num_rows) & (k + DEPTH < sizes.K)
                scales = x_scale_ptr + gl.cast(k // DEPTH + 1, gl.int64) * capacity + rows
                following = gl.load(scales, mask=mask, other=0.0)
            products = warpgroup_mma_wait(0, deps=(products,))
            mbarrier.arrive(empty.index(stage))
            acc += products * factor[:, None]
            factor = following
            if sizes.STAGGER > 0 and CONSUMER + 1 < sizes.CONSUMERS:  # noqa: SIM102
                if step == TURN:
                    mbarrier.arrive(turns.index(CONSUMER + 1))
            step += 1
            if k == FETCH:
                tma.store_wait(0)  # the tile before has left the staging memory
                if residual_desc is not None:
                    fetch_residual(residual_desc, row, col, staging, residual_barrier, FIRST, 2)
        if residual_desc is not None:
            mbarrier.wait(residual_barrier, residual_phase)
            residual_phase ^= 1
        finish(
            acc, row, col, staging, FIRST, outputs, num_rows, capacity,
            sizes.N, ACTIVATION, ROUNDED, LEAST,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["x_scale", "capacity"])
def linear_fp8_sm90_kernel(
    x_desc, weight_desc, residual_desc, out_desc,
    x_scale_ptr, scale_ptr, bias_ptr, out_ptr, out_scale_ptr, num_rows_ptr,
    x_scale, out_stride, capacity,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr, ROUNDED: gl.constexpr,
    LEAST: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, STAGGER: gl.constexpr,
):  # fmt: skip
    """The function of `linear_fp8_kernel`."""
    sizes = Sizes(N, K, CONSUMERS, STAGES, STAGGER)
    num_rows = row_count(num_rows_ptr, capacity)
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, 64, DEPTH], x_desc.layout)
    weight_smem = gl.allocate_shared_memory(dtype, [STAGES, COLS, DEPTH], x_desc.layout)
    staging = gl.allocate_shared_memory(out_desc.dtype, [2 * CONSUMERS, 64, 64], out_desc.layout)
    stages = (x_smem, weight_smem, make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS))
    barriers = (make_barriers(CONSUMERS, 1), make_barriers(CONSUMERS, 1))
    x_scales = (x_scale_ptr, x_scale, capacity)
    outputs = (scale_ptr, bias_ptr, residual_desc, out_ptr, out_stride, out_desc, out_scale_ptr)
    shared = (stages, staging, barriers)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (sizes, 0, shared, x_scales, outputs, num_rows, ACTIVATION, ROUNDED, LEAST)),
            (_consume, (sizes, 1, shared, x_scales, outputs, num_rows, ACTIVATION, ROUNDED, LEAST)),
            (_produce, (sizes, x_desc, weight_desc, stages, num_rows)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (sizes, 0, shared, x_scales, outputs, num_rows, ACTIVATION, ROUNDED, LEAST)),
            (_consume, (sizes, 1, shared, x_scales, outputs, num_rows, ACTIVATION, ROUNDED, LEAST)),
            (_consume, (sizes, 2, shared, x_scales, outputs, num_rows, ACTIVATION, ROUNDED, LEAST)),
            (_produce, (sizes, x_desc, weight_desc, stages, num_rows)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


OPERANDS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
# Boxes of 64 columns, whatever the dtype of the output.
OUTPUTS = {
    1: gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2),
    2: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
}
# Of 227 KB; the rest is barriers and what the partitions are handed.
STAGES_AND_STAGING = 225 << 10


def linear_fp8_sm90(
    x: Tensor,
    x_scale: float | Tensor,
    layer: QuantizedLinear,
    activation: Activation | None,
    residual: Tensor | None,
    num_rows: Tensor | None,
    out: Tensor,
    out_scale: Tensor | None,
    config: "HopperConfig",
) -> None:
    """Launch `linear_fp8_sm90_kernel` with the given tiles; the arguments of `linear_fp8`, checked
    there, with `out` of 16 bits or e4m3 and everything aligned to 16 bytes."""
    weight, scale, bias = layer
    capacity, (out_features, in_features) = x.shape[0], weight.shape
    rows, cols, depth, width = 64 * config.consumers, COLS.value, DEPTH.value, out.element_size()
    stages = (STAGES_AND_STAGING - rows * cols * width) // ((rows + cols) * depth)

    def block(tensor: Tensor) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [64, 64], OUTPUTS[width])

    tiled = isinstance(x_scale, Tensor)
    # The short tanh is exact enough for these.
    rounded = gl.bfloat16 if out.dtype in (torch.bfloat16, E4M3) else gl.float32
    most_tiles = cdiv(capacity, rows) * cdiv(out_features, cols)
    linear_fp8_sm90_kernel[(num_programs(x.device, most_tiles, 1),)](
        TensorDescriptor.from_tensor(x, [64, depth], OPERANDS),
        TensorDescriptor.from_tensor(weight, [cols, depth], OPERANDS),
        block(residual) if residual is not None else None, block(out),
        x_scale if tiled else None, scale, bias, out, out_scale, num_rows,
        0.0 if tiled else float(x_scale), out.stride(0), capacity,
        out_features, in_features, activation, rounded, LEAST_SCALE,
        config.consumers, stages, config.stagger,
        # 65,536 registers for 512 or 384 threads; the consumers take the producer's.
        num_warps=4, maxnreg=128 if config.consumers == 3 else 168,
        enable_fp_fusion=True,
    )  # fmt: skip
