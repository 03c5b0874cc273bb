"""How sm90/linear.py cuts its work into tiles, and what is the same for all of them; some of it
serves sm90/linear_fp8.py as well."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from vitgraph.kernels.linear_triton import activate
from vitgraph.kernels.sm90.gluon_names import async_load, async_store

CONSUMERS: gl.constexpr = gl.constexpr(3)
ROWS: gl.constexpr = gl.constexpr(192)
DEPTH: gl.constexpr = gl.constexpr(64)
STAGES: gl.constexpr = gl.constexpr(3)
# 64 x 64 blocks of staging memory: three a consumer, and one for an even number (linear_flat.py
# takes them for half as many blocks of float32).
STAGING: gl.constexpr = gl.constexpr(10)
NARROW: gl.constexpr = gl.constexpr(2048)  # flat tiles of layers with more columns share those
LAYOUT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WIDE_LAYOUT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def num_tiles(num_rows, N: gl.constexpr, TILE_ROWS: gl.constexpr, TILE_COLS: gl.constexpr):
    return (num_rows + TILE_ROWS - 1) // TILE_ROWS * ((N + TILE_COLS - 1) // TILE_COLS)


@gluon.jit
def is_flat(num_rows, N: gl.constexpr):
    cols: gl.constexpr = 64 if N <= NARROW else 192
    return num_tiles(num_rows, N, 64, cols) <= gl.num_programs(0)


@gluon.jit
def is_wide(num_rows, N: gl.constexpr):
    """Whether rounds of 192-column tall tiles take no longer than rounds of 128-column ones."""
    programs = gl.num_programs(0)
    wide_rounds = (num_tiles(num_rows, N, ROWS, 192) + programs - 1) // programs
    narrow_rounds = (num_tiles(num_rows, N, ROWS, 128) + programs - 1) // programs
    return wide_rounds * 192 <= narrow_rounds * 128


@gluon.jit
def tall_origin(
    tile, num_rows, N: gl.constexpr, TILE_ROWS: gl.constexpr, COLS: gl.constexpr
):  # fmt: skip
    """First row and column of a tall tile; groups of 8 tile rows share their operands in L2."""
    col_tiles: gl.constexpr = (N + COLS - 1) // COLS
    first = tile // (8 * col_tiles) * 8
    in_group = tile % (8 * col_tiles)
    group_rows = gl.minimum((num_rows + TILE_ROWS - 1) // TILE_ROWS - first, 8)
    return (first + in_group % group_rows) * TILE_ROWS, in_group // group_rows * COLS


@gluon.jit
def flat_origin(num_rows, N: gl.constexpr):
    """First row and column of this program's flat tile, past the last row if it has none."""
    cols: gl.constexpr = 64 if N <= NARROW else 192
    row_tiles = (num_rows + 63) // 64
    tile = gl.program_id(0)
    has_tile = tile < num_tiles(num_rows, N, 64, cols)
    row_tiles = gl.maximum(row_tiles, 1)
    return gl.where(has_tile, tile % row_tiles * 64, num_rows), tile // row_tiles * cols


@gluon.jit
def weight_block(stages, stage, BLOCK: gl.constexpr):
    """64 of the up to 192 weight rows of a stage."""
    if BLOCK == 2:
        block = stages[2].index(stage)
    else:
        block = stages[1].index(stage).slice(64 * BLOCK, 64, 0)
    return block


@gluon.jit
def fetch_residual(
    residual_desc, row, col, staging, barrier, FIRST: gl.constexpr, BLOCKS: gl.constexpr
):  # fmt: skip
    mbarrier.expect(barrier, BLOCKS * 64 * 64 * 2)
    for block in gl.static_range(BLOCKS):
        async_load(residual_desc, [row, col + 64 * block], barrier, staging.index(FIRST + block))


@gluon.jit
def finish(acc, row, col, staging, outputs, num_rows, N: gl.constexpr, ACTIVATION: gl.constexpr):
    """Epilogue and store of 64 x 64 accumulators; `staging` holds the residual and takes the
    output."""
    bias_ptr, residual_desc, out_ptr, out_stride, out_desc = outputs
    acc = gl.convert_layout(acc, LAYOUT, assert_trivial=True)
    cols = col + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + cols, mask=cols < N, other=0)
        acc += bias.to(gl.float32)[None, :]
    acc = activate(acc, ACTIVATION, out_ptr.dtype.element_ty)
    if residual_desc is not None:
        acc += staging.load(LAYOUT).to(gl.float32)
    store(acc, row, col, staging, out_ptr, out_stride, out_desc, num_rows, N)


@gluon.jit
def store(acc, row, col, staging, out_ptr, out_stride, out_desc, num_rows, N: gl.constexpr):
    """Store 64 x 64 values of LAYOUT by TMA, or straight to memory where some rows are not real."""
    out = acc.to(out_ptr.dtype.element_ty)
    if row + 64 <= num_rows:
        staging.store(out)
        fence_async_shared()
        async_store(out_desc, [row, col], staging)
    else:
        rows = row.to(gl.int64) + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        cols = col + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
        mask = (rows < num_rows)[:, None] & (cols < N)[None, :]
        gl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], out, mask=mask)


@gluon.jit
def multiply(x, weight, acc):
    return warpgroup_mma(x, weight.permute((1, 0)), acc, is_async=True)
