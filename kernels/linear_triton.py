"""`linear` in Triton, for every GPU and the interpreter: a persistent GEMM with its epilogue.

Loads are tensor descriptors (TMA) where the tile table says so, pointers otherwise.
"""

import math
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitgraph.kernels.launch import cdiv, num_programs, row_count
from vitgraph.kernels.linear_config import LinearConfig, Tile

Activation = Literal["gelu", "gelu_tanh"]


@triton.jit
def _tanh_approx(x):
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _gelu_16bit(x):
    """x * Phi(x) with an error of 1e-7: erfc by Abramowitz and Stegun, formula 7.1.26."""
    z = tl.abs(x) * 0.7071067811865476
    t = 1 / (1 + 0.3275911 * z)
    series = (((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t
    erfc = (series + 0.254829592) * t * tl.exp2(-1.4426950408889634 * z * z)  # log2(e)
    return tl.where(x > 0, x, 0.0) - 0.5 * tl.abs(x) * erfc


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Apply an activation to float32 values that will be rounded to `dtype`."""
    if ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * x * (1 + 0.044715 * x * x)
        if dtype == tl.bfloat16:  # one instruction; its 2^-11 are below this rounding only
            x = 0.5 * x * (1 + _tanh_approx(inner))
        else:
            x = x / (1 + tl.exp2(-2.8853900817779268 * inner))  # -2 * log2(e)
    elif ACTIVATION == "gelu":
        if dtype == tl.float32:
            x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
        else:
            x = _gelu_16bit(x)
    return x


class PixelNormalization(NamedTuple):
    """The image processor's mean and standard deviation of each channel, for pixels in 0..1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    def of(cls, mean: object, std: object) -> "PixelNormalization":
        """From the settings of an image processor.

        Raises:
            ValueError: what is not three finite numbers, those of `std` above zero.
        """
        for values, least in ((mean, -math.inf), (std, 0)):
            numbers = isinstance(values, list | tuple) and len(values) == 3
            if not numbers or not all(
                isinstance(value, int | float) and least < value < math.inf for value in values
            ):
                raise ValueError(f"image_mean {mean!r} and image_std {std!r} do not normalise")
        return cls(tuple(mean), tuple(std))

    def scale_and_shift(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Factors such that a byte x of channel c becomes x * scale[c] + shift[c]."""
        scale = tuple(1 / (255 * std) for std in self.std)
        return scale, tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))

    def normalize(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(x / 255 - mean) / std for each channel of uint8 patches [P, K], rounded once."""
        # Filled, not copied: a copy from the host waits for the device.
        mean, std = (torch.stack([x.new_full((1,), value, dtype=torch.float32) for value in values])
                     for values in self)  # fmt: skip
        pixels = x.unflatten(1, (3, -1)).float() / 255
        return ((pixels - mean) / std).flatten(1).to(dtype)


@triton.jit
def _finish_columns(
    acc, bias_ptr, residual_ptr, out_ptr, residual_stride, out_stride, rows, row_mask, col,
    N: tl.constexpr, COLS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Epilogue and store of `acc` [rows, COLS] at column `col`."""
    cols = col + tl.arange(0, COLS)
    col_mask = cols < N
    mask = row_mask[:, None] & col_mask[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0).to(tl.float32)[None, :]
    acc = activate(acc, ACTIVATION, out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        pointers = residual_ptr + rows[:, None] * residual_stride + cols[None, :]
        acc += tl.load(pointers, mask=mask, other=0).to(tl.float32)
    pointers = out_ptr + rows[:, None] * out_stride + cols[None, :]
    tl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _finish(
    acc, bias_ptr, residual_ptr, out_ptr, residual_stride, out_stride, rows, row_mask, col,
    N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """`_finish_columns` of one part after the other."""
    if PARTS == 1:
        _finish_columns(
            acc, bias_ptr, residual_ptr, out_ptr, residual_stride, out_stride, rows, row_mask, col,
            N, COLS, ACTIVATION,
        )  # fmt: skip
    else:
        halves = acc.reshape(ROWS, 2, COLS // 2).permute(0, 2, 1).split()
        for half in tl.static_range(2):
            _finish(
                halves[half], bias_ptr, residual_ptr, out_ptr, residual_stride, out_stride, rows,
                row_mask, col + half * (COLS // 2), N, ROWS, COLS // 2, ACTIVATION, PARTS // 2,
            )  # fmt: skip


@triton.jit
def _load_pixels(pointers, mask, columns, K: tl.constexpr, pixel_scale, pixel_shift):
    channel = columns // (K // 3)
    scale = tl.where(channel == 0, pixel_scale[0], pixel_scale[2])
    scale = tl.where(channel == 1, pixel_scale[1], scale)
    shift = tl.where(channel == 0, pixel_shift[0], pixel_shift[2])
    shift = tl.where(channel == 1, pixel_shift[1], shift)
    pixels = tl.load(pointers, mask=mask, other=0).to(tl.float32)
    return pixels * scale[None, :] + shift[None, :]


@triton.jit
def _compute_tiles(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, x_desc, weight_desc,
    pixel_scale, pixel_shift, x_stride, residual_stride, out_stride, num_rows,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """This program's share of the output tiles, in groups of 8 tile rows so that L2 serves both
    operands."""
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
        cols = col.to(tl.int64) + tl.arange(0, COLS)
        row_mask = rows < num_rows

        acc = tl.zeros((ROWS, COLS), tl.float32)
        for k in tl.range(0, K, DEPTH, num_stages=STAGES):
            depth = k + tl.arange(0, DEPTH)
            depth_mask = depth < K
            if weight_desc is not None:
                weight = weight_desc.load([col, k])
            else:
                mask = (cols < N)[:, None] & depth_mask[None, :]
                weight = tl.load(
                    weight_ptr + cols[:, None] * K + depth[None, :], mask=mask, other=0
                )
            x_pointers = x_ptr + rows[:, None] * x_stride + depth[None, :]
            x_mask = row_mask[:, None] & depth_mask[None, :]
            if pixel_scale is not None:
                x = _load_pixels(x_pointers, x_mask, depth, K, pixel_scale, pixel_shift)
                x = x.to(weight.dtype)
            elif x_desc is not None:
                x = x_desc.load([row, k])
            else:
                x = tl.load(x_pointers, mask=x_mask, other=0)
            if weight.dtype == tl.float32:
                # A sum of short sums is the more exact; `acc +=` would be fused into one long one.
                acc -= tl.dot(-x, weight.T, input_precision="ieee")
            else:
                acc = tl.dot(x, weight.T, acc)

        _finish(
            acc, bias_ptr, residual_ptr, out_ptr, residual_stride, out_stride, rows, row_mask, col,
            N, ROWS, COLS, ACTIVATION, PARTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "small_rows"])
def linear_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, num_rows_ptr,
    x_desc, weight_desc, small_x_desc, small_weight_desc, pixel_scale, pixel_shift,
    x_stride, residual_stride, out_stride, capacity, small_rows,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr,
    LARGE: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """out[:num_rows] = act(x @ weight.T + bias) + residual. Tiles are LARGE or, up to `small_rows`,
    SMALL: fields of a Tile, or None."""
    num_rows = row_count(num_rows_ptr, capacity)
    if SMALL is not None:  # noqa: SIM102 (known to the compiler, unlike the next)
        if num_rows <= small_rows:
            _compute_tiles(
                x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, small_x_desc, small_weight_desc,
                pixel_scale, pixel_shift, x_stride, residual_stride, out_stride, num_rows,
                N, K, ACTIVATION, SMALL[0], SMALL[1], SMALL[2], SMALL[3], SMALL[4],
            )  # fmt: skip
            num_rows = 0  # nothing left for the large tiles
    if LARGE is not None:
        _compute_tiles(
            x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, x_desc, weight_desc,
            pixel_scale, pixel_shift, x_stride, residual_stride, out_stride, num_rows,
            N, K, ACTIVATION, LARGE[0], LARGE[1], LARGE[2], LARGE[3], LARGE[4],
        )  # fmt: skip


def _descriptors(x: Tensor, weight: Tensor, tile: Tile | None) -> list[TensorDescriptor | None]:
    if tile is None:
        return [None, None]
    boxes = (x, [tile.rows, tile.depth]), (weight, [tile.cols, tile.depth])
    # Pixels are converted in registers, so a byte matrix goes without.
    return [
        TensorDescriptor.from_tensor(*box) if box[0].dtype != torch.uint8 else None for box in boxes
    ]


def num_tiles(tile: Tile | None, rows: int, cols: int) -> int:
    """Tiles of an output, none without a tile."""
    return cdiv(rows, tile.rows) * cdiv(cols, tile.cols) if tile else 0


def is_aligned(*tensors: Tensor | None) -> bool:
    """What a tensor descriptor asks of addresses and row strides."""
    return all(
        x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
        for x in tensors
        if x is not None
    )


def linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    residual: Tensor | None,
    num_rows: Tensor | None,
    out: Tensor,
    normalization: PixelNormalization | None,
    config: LinearConfig,
) -> None:
    """Launch `linear_kernel` with the given tiles; the arguments of `linear`, checked there."""
    capacity, (out_features, in_features) = x.shape[0], weight.shape
    large, small = config.large, config.small
    if small is not None and capacity <= config.small_rows:
        large = None
    descriptors = [None] * 4
    if config.descriptors and is_aligned(x, weight):
        descriptors = _descriptors(x, weight, large) + _descriptors(x, weight, small)
    scale, shift = normalization.scale_and_shift() if normalization else (None, None)
    most_tiles = max(
        num_tiles(large, capacity, out_features),
        num_tiles(small, min(capacity, config.small_rows), out_features),
    )
    programs = num_programs(x.device, most_tiles, config.programs_per_sm)
    linear_kernel[(programs,)](
        x, weight, bias, residual, out, num_rows, *descriptors, scale, shift,
        x.stride(0), residual.stride(0) if residual is not None else 0, out.stride(0),
        capacity, config.small_rows, out_features, in_features, activation,
        large and (*large,), small and (*small,), num_warps=config.num_warps,
        enable_fp_fusion=True,
    )  # fmt: skip
