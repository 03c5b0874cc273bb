"""Flat tiles of sm90/linear.py: 64 rows, of which the consumers share the columns or the depth."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from vitgraph.kernels.sm90.gluon_names import async_load, barrier, reinterpret
from vitgraph.kernels.sm90.linear_tiles import (
    CONSUMERS,
    DEPTH,
    LAYOUT,
    NARROW,
    STAGES,
    STAGING,
    fetch_residual,
    finish,
    flat_origin,
    multiply,
    weight_block,
)

SUMS_LAYOUT: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))


@gluon.jit
def produce_flat(x_desc, weight_desc, stages, num_rows, N: gl.constexpr, K: gl.constexpr):
    x_smem, _, _, ready, empty = stages
    SPLIT: gl.constexpr = N <= NARROW
    row, col = flat_origin(num_rows, N)
    STEP: gl.constexpr = DEPTH * (CONSUMERS if SPLIT else 1)
    for k in range(0, gl.where(row < num_rows, K, 0), STEP):
        step = k // STEP
        stage = step % STAGES
        barrier = ready.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(barrier, (CONSUMERS + (CONSUMERS if SPLIT else 1)) * 64 * DEPTH * 2)
        for i in gl.static_range(CONSUMERS):
            weight = weight_block(stages, stage, i)
            x = x_smem.index(stage * CONSUMERS + i)
            if SPLIT:
                depth = k + DEPTH * i
                async_load(weight_desc, [col, depth], barrier, weight)
                async_load(x_desc, [row, depth], barrier, x)
            else:
                async_load(weight_desc, [col + 64 * i, k], barrier, weight)
                if i == 0:
                    async_load(x_desc, [row, k], barrier, x)


@gluon.jit
def consume_flat(
    CONSUMER: gl.constexpr, stages, staging, residual_barrier, sums_barrier, outputs, num_rows,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    x_smem, _, _, ready, empty = stages
    residual_desc = outputs[1]
    FIRST: gl.constexpr = 3 * CONSUMER
    SPLIT: gl.constexpr = N <= NARROW
    FINISHES: gl.constexpr = (CONSUMER == 0) or not SPLIT
    row, col = flat_origin(num_rows, N)
    if row < num_rows:
        out_col = col if SPLIT else col + 64 * CONSUMER
        if FINISHES and residual_desc is not None:
            fetch_residual(residual_desc, row, out_col, staging, residual_barrier, FIRST, 1)
        acc = gl.zeros([64, 64], gl.float32, LAYOUT)
        STEPS: gl.constexpr = (K + DEPTH * CONSUMERS - 1) // (DEPTH * CONSUMERS)
        for step in range(STEPS if SPLIT else (K + DEPTH - 1) // DEPTH):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            x = x_smem.index(stage * CONSUMERS + (CONSUMER if SPLIT else 0))
            acc = multiply(x, weight_block(stages, stage, CONSUMER), acc)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(stage))
        if SPLIT:
            # Over the staging memory from the third block on: consumer 0 finishes alone, in one.
            sums = reinterpret(staging, gl.float32, [STAGING // 2, 64, 64], SUMS_LAYOUT)
            if CONSUMER == 0:
                mbarrier.wait(sums_barrier, 0)
                for other in gl.static_range(1, CONSUMERS):
                    acc += sums.index(other).load(LAYOUT)
            else:
                sums.index(CONSUMER).store(acc)
                barrier()
                mbarrier.arrive(sums_barrier)
        if FINISHES:
            if residual_desc is not None:
                mbarrier.wait(residual_barrier, 0)
            finish(acc, row, out_col, staging.index(FIRST), outputs, num_rows, N, ACTIVATION)
            tma.store_wait(0)
