"""A linear layer's weight in e4m3, one float32 scale an output channel, with the LayerNorm before
it folded in:

    (n * g + b) @ weight.T + bias = n @ (weight * g).T + (bias + weight @ b)

for a normalised row n and the norm's weight g and bias b. All in float32; only the product is
rounded to e4m3. What is left of the norm is bounded: |n| < sqrt(K), whatever the input.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitgraph.kernels.launch import capability_of, cdiv, next_power_of_2

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# Zero rows have a scale, too. What is this small is zero to any sum that it could go into.
LEAST_SCALE = 1e-30
MAX_DEPTH = 8192  # values that stay in the registers of one program
INTERPRETER_IS_MENDED = False  # tests do that


class QuantizedLinear(NamedTuple):
    """A layer as `linear_fp8` takes it: (x @ (weight * scale[:, None]).T) + bias."""

    weight: Tensor  # e4m3 [N, K]
    scale: Tensor  # float32 [N]
    bias: Tensor  # float32 [N]


def why_no_e4m3(device: torch.device) -> str | None:
    """Why kernels with e4m3 operands cannot run on `device`, or None where they can."""
    capability = capability_of(device)
    if capability == (0, 0) and not INTERPRETER_IS_MENDED:
        return "Triton's interpreter rounds to e4m3 wrongly and loses its NaN"
    if capability == (0, 0) or capability >= (8, 9):
        return None
    return f"e4m3 needs compute capability 8.9, this GPU has {capability[0]}.{capability[1]}"


@triton.jit
def quantize_kernel(
    weight_ptr,
    bias_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    out_ptr,
    scale_ptr,
    out_bias_ptr,
    num_rows,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    row_mask, inside = rows < num_rows, cols < K
    mask = row_mask[:, None] & inside[None, :]
    places = rows[:, None] * K + cols[None, :]
    weight = tl.load(weight_ptr + places, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    if norm_bias_ptr is not None:
        norm_bias = tl.load(norm_bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        bias += tl.sum(weight * norm_bias[None, :], axis=1)
        norm_weight = tl.load(norm_weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        weight *= norm_weight[None, :]
    # a NaN stays one: it is in the weight, if not in the scale
    scale = tl.maximum(tl.max(tl.abs(weight), axis=1) / 448, LEAST)
    tl.store(out_ptr + places, (weight / scale[:, None]).to(tl.float8e4nv), mask=mask)
    tl.store(scale_ptr + rows, scale, mask=row_mask)
    tl.store(out_bias_ptr + rows, bias, mask=row_mask)


def quantize(
    weight: Tensor,  # [N, K]
    bias: Tensor,  # [N]
    norm_weight: Tensor | None = None,  # [K]
    norm_bias: Tensor | None = None,  # [K]
) -> QuantizedLinear:
    """`quantize_reference` as one launch, from parameters of any floating dtypes.

    Raises:
        ValueError: shapes or strides do not fit, a row is too wide, or the GPU has no e4m3.
    """
    _check(weight, bias, norm_weight, norm_bias)
    if reason := why_no_e4m3(weight.device):
        raise ValueError(f"quantize: {reason}")
    out = _empty(weight)
    (rows, depth), block = weight.shape, next_power_of_2(weight.shape[1])
    at_once = max(1, MAX_DEPTH // block)
    quantize_kernel[(cdiv(rows, at_once),)](
        weight,
        bias,
        norm_weight,
        norm_bias,
        *out,
        rows,
        K=depth,
        ROWS=at_once,
        BLOCK=block,
        LEAST=LEAST_SCALE,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


def _empty(weight: Tensor) -> QuantizedLinear:
    rows, device = weight.shape[0], weight.device
    return QuantizedLinear(
        torch.empty(weight.shape, dtype=E4M3, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )


def _check(
    weight: Tensor, bias: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None
) -> None:
    if weight.ndim != 2 or not weight.is_contiguous():
        raise ValueError(
            f"quantize: weight has shape {tuple(weight.shape)} and strides {weight.stride()}, "
            f"expected contiguous [N, K]"
        )
    rows, depth = weight.shape
    if depth > MAX_DEPTH:
        raise ValueError(f"quantize: weight has {depth} columns, at most {MAX_DEPTH}")
    if (norm_weight is None) != (norm_bias is None):
        raise ValueError("quantize: norm_weight and norm_bias come together")
    for name, vector, size in (
        ("bias", bias, rows),
        ("norm_weight", norm_weight, depth),
        ("norm_bias", norm_bias, depth),
    ):
        if vector is not None and (tuple(vector.shape) != (size,) or not vector.is_contiguous()):
            raise ValueError(
                f"quantize: {name} has shape {tuple(vector.shape)} and strides "
                f"{vector.stride()}, expected contiguous ({size},)"
            )


def fold(
    weight: Tensor, bias: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weight [N, K] and bias [N] that serve a row without the norm's parameters, in float32 (of
    float64 parameters in float64)."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    weight, bias = weight.to(dtype), bias.to(dtype)
    if norm_weight is None or norm_bias is None:
        return weight, bias
    return weight * norm_weight.to(dtype), bias + weight @ norm_bias.to(dtype)


def to_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest e4m3 as GPUs do: what is above the largest becomes it, NaN stays."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def quantize_reference(
    weight: Tensor,  # [N, K]
    bias: Tensor,  # [N]
    norm_weight: Tensor | None = None,  # [K]
    norm_bias: Tensor | None = None,  # [K]
) -> QuantizedLinear:
    """Fold the norm before a layer into it and round each output channel to e4m3, its largest value
    to 448."""
    folded, bias = fold(weight, bias, norm_weight, norm_bias)
    scale = (folded.float().abs().amax(dim=1) / E4M3_MAX).clamp_min(LEAST_SCALE)
    return QuantizedLinear(to_e4m3(folded.float() / scale[:, None]), scale, bias.float())
