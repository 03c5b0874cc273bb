"""LayerNorm over the last dimension: (x - mean) / sqrt(var + eps) * weight + bias, statistics in
float32.

`layer_norm_e4m3` leaves weight and bias to the layer after it (kernels/fp8/quantize.py). A row is
then a unit vector times sqrt(width), so one constant scale fits every input: no value is above
sqrt(width), which becomes 448, the largest e4m3.

A layer's output may be added to its residual here, in place: x += added, before the rest. cuBLAS
would need a kernel of its own for that.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vitgraph.kernels.fp8.quantize import E4M3, E4M3_MAX, to_e4m3, why_no_e4m3
from vitgraph.kernels.launch import next_power_of_2, num_programs, row_count

MAX_WIDTH = 8192  # a row stays in the registers of one program


@triton.jit
def _load(x_ptr, added_ptr, start, x_stride, WIDTH: tl.constexpr, columns, mask):
    """Of row `start`; what is to be added is."""
    pointers = x_ptr + start * x_stride + columns
    x = tl.load(pointers, mask=mask, other=0.0)
    if added_ptr is not None:
        added = tl.load(added_ptr + start * WIDTH + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)  # rounded as torch does
        tl.store(pointers, x, mask=mask)
    return x


@triton.jit(do_not_specialize=["max_rows", "e4m3_scale"])
def layer_norm_kernel(
    x_ptr,
    added_ptr,
    weight_ptr,
    bias_ptr,
    num_rows_ptr,
    out_ptr,
    x_stride,
    max_rows,
    eps,
    e4m3_scale,
    WIDTH: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
):
    # a row in two powers of two: 1152 = 1024 + 128 leaves no lane idle and registers for more rows
    main, rest = tl.arange(0, MAIN), MAIN + tl.arange(0, REST)
    inside = rest < WIDTH
    num_rows = row_count(num_rows_ptr, max_rows)
    first, step = tl.program_id(0), tl.num_programs(0)
    start, real = tl.cast(first, tl.int64), first < num_rows
    next_main = _load(x_ptr, added_ptr, start, x_stride, WIDTH, main, real)
    next_rest = _load(x_ptr, added_ptr, start, x_stride, WIDTH, rest, inside & real)
    for row in tl.range(first, num_rows, step):
        # the next row is on its way while this one is reduced
        x_main, x_rest = next_main.to(tl.float32), next_rest.to(tl.float32)
        start, real = tl.cast(row, tl.int64), row + step < num_rows
        next_main = _load(x_ptr, added_ptr, start + step, x_stride, WIDTH, main, real)
        next_rest = _load(x_ptr, added_ptr, start + step, x_stride, WIDTH, rest, inside & real)

        mean = (tl.sum(x_main, axis=0) + tl.sum(x_rest, axis=0)) / WIDTH
        x_main = x_main - mean
        x_rest = tl.where(inside, x_rest - mean, 0.0)
        squares = tl.sum(x_main * x_main, axis=0) + tl.sum(x_rest * x_rest, axis=0)
        scale = tl.rsqrt(squares / WIDTH + eps)
        if weight_ptr is None:
            y_main, y_rest = x_main * (scale * e4m3_scale), x_rest * (scale * e4m3_scale)
        else:
            # read again for each row, from L1: held in registers they would halve the programs
            weight, bias = tl.load(weight_ptr + main), tl.load(bias_ptr + main)
            y_main = x_main * scale * weight.to(tl.float32) + bias.to(tl.float32)
            weight = tl.load(weight_ptr + rest, mask=inside)
            bias = tl.load(bias_ptr + rest, mask=inside)
            y_rest = x_rest * scale * weight.to(tl.float32) + bias.to(tl.float32)
        out_row = out_ptr + start * WIDTH
        tl.store(out_row + main, y_main.to(out_ptr.dtype.element_ty))
        tl.store(out_row + rest, y_rest.to(out_ptr.dtype.element_ty), mask=inside)


def layer_norm(
    x: Tensor,  # [P, C], rows may be strided
    weight: Tensor,  # [C]
    bias: Tensor,  # [C]
    eps: float = 1e-6,
    num_rows: Tensor | None = None,
    added: Tensor | None = None,  # [P, C]
) -> Tensor:
    """`layer_norm_reference` as one kernel, C up to 8192. Returns a new contiguous [P, C].

    Raises:
        ValueError: shapes or strides do not fit, or C is too wide.
    """
    width = x.shape[1]
    for name, vector in (("weight", weight), ("bias", bias)):
        if tuple(vector.shape) != (width,) or not vector.is_contiguous():
            raise ValueError(
                f"layer_norm: {name} has shape {tuple(vector.shape)} and strides "
                f"{vector.stride()}, expected contiguous ({width},)"
            )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, added, weight, bias, eps, num_rows, out, 1.0)
    return out


def layer_norm_e4m3(
    x: Tensor,  # [P, C], rows may be strided
    eps: float = 1e-6,
    num_rows: Tensor | None = None,
    added: Tensor | None = None,  # [P, C]
) -> Tensor:
    """`layer_norm_e4m3_reference` as one kernel, C up to 8192. Returns a new contiguous [P, C].

    Raises:
        ValueError: strides do not fit, C is too wide, or the GPU has no e4m3.
    """
    if reason := why_no_e4m3(x.device):
        raise ValueError(f"layer_norm_e4m3: {reason}")
    out = torch.empty(x.shape, dtype=E4M3, device=x.device)
    _launch(x, added, None, None, eps, num_rows, out, 1 / normalized_scale(x.shape[1]))
    return out


def normalized_scale(width: int) -> float:
    """What the values of `layer_norm_e4m3` are to be multiplied by."""
    return math.sqrt(width) / E4M3_MAX


def _launch(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    num_rows: Tensor | None,
    out: Tensor,
    e4m3_scale: float,
) -> None:
    max_rows, width = x.shape
    if width > MAX_WIDTH:
        raise ValueError(f"layer_norm: width {width} is above {MAX_WIDTH}")
    if x.stride(1) != 1:
        raise ValueError(f"layer_norm: values of a row must be adjacent, stride is {x.stride(1)}")
    if added is not None and (
        added.shape != x.shape or added.dtype != x.dtype or not added.is_contiguous()
    ):
        raise ValueError(
            f"layer_norm: added has shape {tuple(added.shape)}, strides {added.stride()} and "
            f"{added.dtype}, expected contiguous {tuple(x.shape)} and {x.dtype}"
        )
    if max_rows == 0:
        return
    main = next_power_of_2(width) // 2
    if width <= 1152:
        warps, per_multiprocessor = 2, 16
    else:  # two warps would spill a few bytes at 1280
        warps, per_multiprocessor = (4, 8) if main <= 1024 else (8, 4)
    layer_norm_kernel[(num_programs(x.device, max_rows, per_multiprocessor),)](
        x,
        added,
        weight,
        bias,
        num_rows,
        out,
        x.stride(0),
        max_rows,
        eps,
        e4m3_scale,
        WIDTH=width,
        MAIN=main,
        REST=next_power_of_2(width - main),
        num_warps=warps * x.element_size() // 2,
        enable_fp_fusion=True,
    )


def layer_norm_reference(
    x: Tensor,  # [P, C]
    weight: Tensor,  # [C]
    bias: Tensor,  # [C]
    eps: float = 1e-6,
    num_rows: Tensor | None = None,
    added: Tensor | None = None,  # [P, C]
) -> Tensor:
    """Normalise each row of `x` [P, C], after adding `added` to it in place; rows past `num_rows`
    (int32 [1], on device) are free."""
    if added is not None:
        x += added
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def layer_norm_e4m3_reference(
    x: Tensor,  # [P, C]
    eps: float = 1e-6,
    num_rows: Tensor | None = None,
    added: Tensor | None = None,  # [P, C]
) -> Tensor:
    """Normalise each row of `x` [P, C], after adding `added` to it in place, and round its values,
    divided by `normalized_scale`, to e4m3; rows past `num_rows` (int32 [1], on device) are free."""
    if added is not None:
        x += added
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = F.layer_norm(x.to(dtype), x.shape[-1:], eps=eps)
    return to_e4m3(rows / normalized_scale(x.shape[-1]))
