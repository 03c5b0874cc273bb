"""`linear_fp8` in Triton: a persistent GEMM of e4m3 operands with its epilogue.

Loads are tensor descriptors (TMA) where the tile table says so, pointers otherwise.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitgraph.kernels.fp8.quantize import E4M3, LEAST_SCALE, QuantizedLinear
from vitgraph.kernels.launch import is_interpreted, num_programs, row_count
from vitgraph.kernels.linear_config import LinearConfig, Tile
from vitgraph.kernels.linear_triton import Activation, activate, is_aligned, num_tiles


@triton.jit
def _finish_part(
    acc, scale_ptr, bias_ptr, residual_ptr, out_ptr, out_scale_ptr, residual_stride, out_stride,
    capacity, rows, row_mask, col,
    N: tl.constexpr, COLS: tl.constexpr, ACTIVATION: tl.constexpr, ROUNDED: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Epilogue and store of `acc` [rows, COLS] at column `col`."""
    cols = col + tl.arange(0, COLS)
    col_mask = cols < N
    mask = row_mask[:, None] & col_mask[None, :]
    scale = tl.load(scale_ptr + cols, mask=col_mask, other=0.0)
    bias = tl.load(bias_ptr + cols, mask=col_mask, other=0.0)
    acc = activate(acc * scale[None, :] + bias[None, :], ACTIVATION, ROUNDED)
    if residual_ptr is not None:
        pointers = residual_ptr + rows[:, None] * residual_stride + cols[None, :]
        acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if out_scale_ptr is not None:
        # Columns past N are zero. A NaN is left out here, and stays in its value.
        out_scale = tl.maximum(tl.max(tl.abs(acc), axis=1) / 448, LEAST)
        acc = acc * (1 / out_scale)[:, None]
        tile = tl.cast(col // COLS, tl.int64)
        scale_mask = row_mask & (col < N)  # no tile is wholly past N, but a half of one may be
        tl.store(out_scale_ptr + tile * capacity + rows, out_scale, mask=scale_mask)
    pointers = out_ptr + rows[:, None] * out_stride + cols[None, :]
    tl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_weight(
    weight_ptr, weight_desc, col, k, N: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    if weight_desc is not None:
        return weight_desc.load([col, k])
    else:
        cols, depth = tl.cast(col, tl.int64) + tl.arange(0, COLS), k + tl.arange(0, DEPTH)
        mask = (cols < N)[:, None] & (depth < K)[None, :]
        return tl.load(weight_ptr + cols[:, None] * K + depth[None, :], mask=mask, other=0.0)


@triton.jit
def _compute_tiles(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, out_scale_ptr,
    x_desc, weight_desc, x_scale, x_stride, residual_stride, out_stride, capacity, num_rows,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, ROUNDED: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """This program's share of the output tiles, in groups of 8 tile rows so that L2 serves both
    operands."""
    PART: tl.constexpr = COLS // PARTS
    col_tiles: tl.constexpr = (N + COLS - 1) // COLS
    row_tiles = tl.cdiv(num_rows, ROWS)
    num_tiles = row_tiles * col_tiles
    # Flattened, so that the loads of a tile start under the epilogue of the one before.
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        first = tile // (8 * col_tiles) * 8
        in_group = tile % (8 * col_tiles)
        group_rows = tl.minimum(row_tiles - first, 8)
        row = (first + in_group % group_rows) * ROWS
        col = in_group // group_rows * COLS
        rows = row.to(tl.int64) + tl.arange(0, ROWS)
        row_mask = rows < num_rows

        acc = tl.zeros((ROWS, PART), tl.float32)
        acc_2 = acc
        for k in tl.range(0, K, DEPTH, num_stages=STAGES):
            if x_desc is not None:
                x = x_desc.load([row, k])
            else:
                depth = k + tl.arange(0, DEPTH)
                x_mask = row_mask[:, None] & (depth < K)[None, :]
                x = tl.load(
                    x_ptr + rows[:, None] * x_stride + depth[None, :], mask=x_mask, other=0.0
                )
            factor = x_scale
            if x_scale_ptr is not None:
                scales = x_scale_ptr + tl.cast(k // DEPTH, tl.int64) * capacity + rows
                factor = tl.load(scales, mask=row_mask, other=0.0)[:, None]
            # Scaled before they are added: a sum without that would be left to the tensor cores.
            weight = _load_weight(weight_ptr, weight_desc, col, k, N, K, PART, DEPTH)
            acc += tl.dot(x, weight.T) * factor
            if PARTS == 2:
                weight = _load_weight(weight_ptr, weight_desc, col + PART, k, N, K, PART, DEPTH)
                acc_2 += tl.dot(x, weight.T) * factor

        _finish_part(
            acc, scale_ptr, bias_ptr, residual_ptr, out_ptr, out_scale_ptr, residual_stride,
            out_stride, capacity, rows, row_mask, col, N, PART, ACTIVATION, ROUNDED, LEAST,
        )  # fmt: skip
        if PARTS == 2:
            _finish_part(
                acc_2, scale_ptr, bias_ptr, residual_ptr, out_ptr, out_scale_ptr, residual_stride,
                out_stride, capacity, rows, row_mask, col + PART, N, PART, ACTIVATION, ROUNDED,
                LEAST,
            )  # fmt: skip


@triton.jit(do_not_specialize=["x_scale", "capacity", "small_rows"])
def linear_fp8_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, out_scale_ptr,
    num_rows_ptr, x_desc, weight_desc, small_x_desc, small_weight_desc,
    x_scale, x_stride, residual_stride, out_stride, capacity, small_rows,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, ROUNDED: tl.constexpr,
    LEAST: tl.constexpr, LARGE: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """out[:num_rows] = act((x * x_scale) @ (weight * scale).T + bias) + residual, in e4m3 where
    there is an `out_scale_ptr`. Tiles as in `linear_kernel`."""
    num_rows = row_count(num_rows_ptr, capacity)
    if SMALL is not None:  # noqa: SIM102 (known to the compiler, unlike the next)
        if num_rows <= small_rows:
            _compute_tiles(
                x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr,
                out_scale_ptr, small_x_desc, small_weight_desc, x_scale, x_stride, residual_stride,
                out_stride, capacity, num_rows, N, K, ACTIVATION, ROUNDED, LEAST,
                SMALL[0], SMALL[1], SMALL[2], SMALL[3], SMALL[4],
            )  # fmt: skip
            num_rows = 0  # nothing left for the large tiles
    if LARGE is not None:
        _compute_tiles(
            x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr,
            out_scale_ptr, x_desc, weight_desc, x_scale, x_stride, residual_stride, out_stride,
            capacity, num_rows, N, K, ACTIVATION, ROUNDED, LEAST,
            LARGE[0], LARGE[1], LARGE[2], LARGE[3], LARGE[4],
        )  # fmt: skip


def _descriptors(x: Tensor, weight: Tensor, tile: Tile | None) -> list[TensorDescriptor | None]:
    if tile is None:
        return [None, None]
    boxes = (x, [tile.rows, tile.depth]), (weight, [tile.cols // tile.parts, tile.depth])
    return [TensorDescriptor.from_tensor(*box) for box in boxes]


def linear_fp8_triton(
    x: Tensor,
    x_scale: float | Tensor,
    layer: QuantizedLinear,
    activation: Activation | None,
    residual: Tensor | None,
    num_rows: Tensor | None,
    out: Tensor,
    out_scale: Tensor | None,
    config: LinearConfig,
) -> None:
    """Launch `linear_fp8_kernel` with the given tiles; the arguments of `linear_fp8`, checked
    there."""
    weight, scale, bias = layer
    capacity, (out_features, in_features) = x.shape[0], weight.shape
    large, small = config.large, config.small
    if small is not None and capacity <= config.small_rows:
        large = None
    descriptors = [None] * 4
    if config.descriptors and is_aligned(x, weight):
        descriptors = _descriptors(x, weight, large) + _descriptors(x, weight, small)
    most_tiles = max(
        num_tiles(large, capacity, out_features),
        num_tiles(small, min(capacity, config.small_rows), out_features),
    )
    programs = num_programs(x.device, most_tiles, config.programs_per_sm)
    tiled = isinstance(x_scale, Tensor)
    # The short tanh is exact enough for these, and the interpreter runs no assembly.
    short = out.dtype in (torch.bfloat16, E4M3) and not is_interpreted()
    rounded = tl.bfloat16 if short else tl.float32
    linear_fp8_kernel[(programs,)](
        x, x_scale if tiled else None, weight, scale, bias, residual, out, out_scale, num_rows,
        *descriptors, 0.0 if tiled else float(x_scale),
        x.stride(0), residual.stride(0) if residual is not None else 0, out.stride(0),
        capacity, config.small_rows, out_features, in_features, activation, rounded, LEAST_SCALE,
        large and (*large,), small and (*small,), num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
