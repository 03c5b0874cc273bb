"""What the warps of sm90/linear_fp8.py share: sizes known when compiled, and the epilogue."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from vitgraph.kernels.linear_triton import activate
from vitgraph.kernels.sm90.gluon_names import aggregate
from vitgraph.kernels.sm90.linear_tiles import LAYOUT, store

COLS: gl.constexpr = gl.constexpr(128)  # of a tile: what one scale of a row covers
DEPTH: gl.constexpr = gl.constexpr(128)  # of a step: the same, of `x`
WIDE: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))


@aggregate
class Sizes:
    """What is known when the kernel is compiled."""

    N: gl.constexpr
    K: gl.constexpr
    CONSUMERS: gl.constexpr
    STAGES: gl.constexpr
    STAGGER: gl.constexpr
    ROWS: gl.constexpr  # of a tile
    STEPS: gl.constexpr  # of its depth

    @gluon.constexpr_function
    def __init__(self, N, K, CONSUMERS, STAGES, STAGGER):
        self.N = gl.constexpr(N)
        self.K = gl.constexpr(K)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.STAGES = gl.constexpr(STAGES)
        self.STAGGER = gl.constexpr(STAGGER)
        self.ROWS = gl.constexpr(64 * gl.constexpr(CONSUMERS).value)
        self.STEPS = gl.constexpr((gl.constexpr(K).value + 127) // 128)


@gluon.jit
def multiply(x, weight):
    """Issue x @ weight.T of one step, a sum of its own."""
    zeros = gl.zeros([64, COLS], gl.float32, WIDE)
    return warpgroup_mma(x, weight.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _activated(acc, col, scale_ptr, bias_ptr, N: gl.constexpr, ACTIVATION: gl.constexpr,
               ROUNDED: gl.constexpr):  # fmt: skip
    acc = gl.convert_layout(acc, LAYOUT, assert_trivial=True)
    cols = col + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    scale = gl.load(scale_ptr + cols, mask=cols < N, other=0.0)
    bias = gl.load(bias_ptr + cols, mask=cols < N, other=0.0)
    return activate(acc * scale[None, :] + bias[None, :], ACTIVATION, ROUNDED)


@gluon.jit
def finish(
    acc, row, col, staging, FIRST: gl.constexpr, outputs, num_rows, capacity,
    N: gl.constexpr, ACTIVATION: gl.constexpr, ROUNDED: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of 64 x 128 sums. Two blocks of the staging memory, from FIRST on, hold
    the residual and take the output."""
    scale_ptr, bias_ptr, residual_desc, out_ptr, out_stride, out_desc, out_scale_ptr = outputs
    left, right = acc.reshape([64, 2, 64]).permute((0, 2, 1)).split()
    left = _activated(left, col, scale_ptr, bias_ptr, N, ACTIVATION, ROUNDED)
    right = _activated(right, col + 64, scale_ptr, bias_ptr, N, ACTIVATION, ROUNDED)
    if residual_desc is not None:
        left += staging.index(FIRST).load(LAYOUT).to(gl.float32)
        right += staging.index(FIRST + 1).load(LAYOUT).to(gl.float32)
    if out_scale_ptr is not None:
        # Columns past N are zero. A NaN is left out here, and stays in its value.
        largest = gl.maximum(gl.max(gl.abs(left), axis=1), gl.max(gl.abs(right), axis=1))
        out_scale = gl.maximum(largest / 448, LEAST)
        rows = row.to(gl.int64) + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        scales = out_scale_ptr + (col // COLS).to(gl.int64) * capacity + rows
        gl.store(scales, out_scale, mask=rows < num_rows)
        inverse = (1 / out_scale)[:, None]
        left, right = left * inverse, right * inverse
    store(left, row, col, staging.index(FIRST), out_ptr, out_stride, out_desc, num_rows, N)
    store(
        right, row, col + 64, staging.index(FIRST + 1), out_ptr, out_stride, out_desc, num_rows, N
    )
