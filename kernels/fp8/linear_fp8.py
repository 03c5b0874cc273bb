"""A linear layer with e4m3 operands: act((x * x_scale) @ (weight * scale).T + bias) + residual.

`x_scale` is one number for all rows, where they are normalised ones (`layer_norm_e4m3`), or one
for every row and tile of 128 columns, where the GELU of a layer before wrote them: that layer
stores e4m3 and the scale of each tile, its largest value / 448. Products of 128 columns are summed
by the tensor cores (which keep 14 bits or so on Hopper), these sums in float32.

A row's scales and values depend on that row alone. A NaN stays one: in e4m3 there is a NaN. An
infinity becomes a scale that makes NaN of its tile.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitgraph.kernels.fp8.linear_fp8_config import (
    SCALE_TILE,
    HopperConfig,
    hopper_fp8_config,
    linear_fp8_config,
)
from vitgraph.kernels.fp8.linear_fp8_triton import linear_fp8_triton
from vitgraph.kernels.fp8.quantize import (
    E4M3,
    E4M3_MAX,
    LEAST_SCALE,
    QuantizedLinear,
    to_e4m3,
    why_no_e4m3,
)
from vitgraph.kernels.launch import capability_of, cdiv, hopper_tier_unavailable
from vitgraph.kernels.linear_config import LinearConfig
from vitgraph.kernels.linear_triton import Activation, is_aligned


def scales_of(rows: int, width: int, device: torch.device) -> Tensor:
    """Memory for the scales of e4m3 rows [P, width]: float32 [ceil(width / 128), P]."""
    return torch.empty(cdiv(width, SCALE_TILE), rows, dtype=torch.float32, device=device)


def linear_fp8(
    x: Tensor,  # e4m3 [P, K]
    x_scale: float | Tensor,  # float32 [ceil(K / 128), P]
    layer: QuantizedLinear,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,  # [P, N]
    num_rows: Tensor | None = None,
    out: Tensor,  # [P, N]
    out_scale: Tensor | None = None,  # float32 [ceil(N / 128), P]
    config: LinearConfig | HopperConfig | None = None,
) -> Tensor:
    """`linear_fp8_reference` as one launch. Rows past `num_rows` are neither read into a result nor
    written.

    Args:
        config: tiles of the portable kernel or of the Gluon one (Hopper; `out` of 16 bits, or of
            8 without a residual; addresses and rows multiples of 16 bytes), instead of the table's.

    Raises:
        ValueError: shapes, strides or dtypes do not fit, the GPU has no e4m3, or the Gluon kernel
            was asked for and cannot serve.
    """
    _check(x, x_scale, layer, residual, num_rows, out, out_scale)
    if reason := why_no_e4m3(x.device):
        raise ValueError(f"linear_fp8: {reason}")
    capacity, (out_features, in_features) = x.shape[0], layer.weight.shape
    if capacity == 0:
        return out
    operands = (x, x_scale, layer, activation, residual, num_rows, out, out_scale)
    unfit = _unfit_for_hopper(x, layer.weight, residual, out)
    if isinstance(config, HopperConfig) and unfit:
        raise ValueError(f"linear_fp8: the Gluon kernel {unfit}")
    if config is None and not unfit:
        config = hopper_fp8_config(capacity)
    if isinstance(config, HopperConfig):
        from vitgraph.kernels.sm90.linear_fp8 import linear_fp8_sm90

        linear_fp8_sm90(*operands, config)
    else:
        table = linear_fp8_config(capability_of(x.device), capacity, out_features, in_features)
        linear_fp8_triton(*operands, config or table)
    return out


def _unfit_for_hopper(
    x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor
) -> str | None:
    if reason := hopper_tier_unavailable(x.device):
        return reason
    if out.dtype.itemsize > 2:
        return f"writes 16 or 8 bits, not {out.dtype}"
    if residual is not None and out.dtype == E4M3:
        return "adds no residual of 8 bits"
    return None if is_aligned(x, weight, residual, out) else "needs rows aligned to 16 bytes"


def _check(
    x: Tensor,
    x_scale: float | Tensor,
    layer: QuantizedLinear,
    residual: Tensor | None,
    num_rows: Tensor | None,
    out: Tensor,
    out_scale: Tensor | None,
) -> None:
    rows, (out_features, in_features) = x.shape[0], layer.weight.shape
    if x.ndim != 2 or x.shape[1] != in_features:
        raise ValueError(f"x has shape {tuple(x.shape)}, weight takes [rows, {in_features}]")
    if (out.dtype == E4M3) != (out_scale is not None):
        raise ValueError(f"out is {out.dtype}: e4m3 and out_scale come together")
    float32 = torch.float32
    scales = x_scale if isinstance(x_scale, Tensor) else None
    for name, tensor, expected, shape in (
        ("x", x, E4M3, x.shape),
        ("x_scale", scales, float32, (cdiv(in_features, SCALE_TILE), rows)),
        ("weight", layer.weight, E4M3, layer.weight.shape),
        ("scale", layer.scale, float32, (out_features,)),
        ("bias", layer.bias, float32, (out_features,)),
        ("residual", residual, out.dtype, (rows, out_features)),
        ("num_rows", num_rows, torch.int32, (1,)),
        ("out", out, out.dtype, (rows, out_features)),
        ("out_scale", out_scale, float32, (cdiv(out_features, SCALE_TILE), rows)),
    ):
        if tensor is None:
            continue
        if tensor.dtype != expected:
            raise ValueError(f"{name} is {tensor.dtype}, expected {expected}")
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
        if tensor.stride(-1) != 1 and tensor.numel() > 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, not 1")
        if ("scale" in name or name == "weight") and not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")


def dequantize(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """The values of e4m3 rows [P, K] with one scale, or one a tile [ceil(K / 128), P]."""
    if isinstance(scale, Tensor):
        scale = scale.to(dtype).t().repeat_interleave(SCALE_TILE, dim=1)[:, : x.shape[1]]
    return x.to(dtype) * scale


def quantize_tiles(y: Tensor, out: Tensor, out_scale: Tensor) -> Tensor:
    """Round rows [P, N] to e4m3 `out`, the largest value of each row and 128 columns to 448."""
    padded = F.pad(y, (0, -y.shape[1] % SCALE_TILE)).unflatten(1, (-1, SCALE_TILE))
    # NaN is left out, as GPUs do
    scale = padded.abs().nan_to_num(0, float("inf")).amax(dim=2) / E4M3_MAX
    scale = scale.clamp_min(LEAST_SCALE)
    out_scale.copy_(scale.t())
    return out.copy_(to_e4m3((padded / scale[:, :, None]).flatten(1)[:, : y.shape[1]]))


def linear_fp8_reference(
    x: Tensor,  # e4m3 [P, K]
    x_scale: float | Tensor,  # float32 [ceil(K / 128), P]
    layer: QuantizedLinear,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,  # [P, N]
    num_rows: Tensor | None = None,
    out: Tensor,  # [P, N]
    out_scale: Tensor | None = None,  # float32 [ceil(N / 128), P]
) -> Tensor:
    """Apply a quantised layer to each row of `x`, in float32 (float64 where `out` is).

    Args:
        x_scale: one number, or one for every row and tile of 128 columns.
        activation: applied before the residual.
        residual: added last, of the dtype of `out`.
        num_rows: int32 [1] on the device; rows past it need not be computed.
        out: where to store; may be `residual` itself. With `out_scale` it is e4m3.
        out_scale: where to store the scales of what was rounded to e4m3.

    Returns:
        `out`.
    """
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    weight = layer.weight.to(dtype) * layer.scale.to(dtype)[:, None]
    y = F.linear(dequantize(x, x_scale, dtype), weight, layer.bias.to(dtype))
    if activation is not None:
        y = F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    if residual is not None:
        y = y + residual
    return out.copy_(y) if out_scale is None else quantize_tiles(y, out, out_scale)
