"""A linear layer with its epilogue: act(x @ weight.T + bias) + residual.

`gelu_tanh` is the blocks' activation (hidden_act "gelu_pytorch_tanh"), `gelu` the mergers' (erf).
uint8 patches may be given instead of normalised ones: channel c of a value x is then
(x / 255 - mean[c]) / std[c], a patch being its channels one after the other.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitgraph.kernels.launch import capability_of, hopper_tier_unavailable
from vitgraph.kernels.linear_config import fixed_config, linear_config
from vitgraph.kernels.linear_triton import Activation, PixelNormalization, is_aligned, linear_triton

Provider = Literal["triton", "gluon", "cublas", "fixed"]


def linear_reference(
    x: Tensor,  # [P, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,  # [P, N]
    num_rows: Tensor | None = None,
    out: Tensor | None = None,  # [P, N], may be a column slice
    normalization: PixelNormalization | None = None,
    provider: Provider | None = None,
) -> Tensor:
    """Apply the layer to each row of `x`.

    Args:
        x: input [P, K] in the dtype of `weight`, or uint8 patches with `normalization`.
        weight: [N, K], torch.nn.Linear's layout.
        bias: [N] or None.
        activation: applied before the residual.
        residual: added last, [P, N].
        num_rows: int32 [1] on the device; rows past it need not be computed.
        out: where to store, [P, N] with unit stride in the last dimension; may be `residual`
            itself.
        normalization: of uint8 patches; the normalised value is rounded to the dtype of `weight`.
        provider: ignored here.

    Returns:
        `out`, or a new tensor [P, N].
    """
    if normalization is not None:
        x = normalization.normalize(x, weight.dtype)
    y = F.linear(x, weight, bias)
    if activation is not None:
        y = F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    if residual is not None:
        y = y + residual
    return y if out is None else out.copy_(y)


def linear_cublas(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """The same through cuBLASLt: every row of `x`, bias and tanh GELU fused, the residual added to
    the rounded sum by a second kernel."""
    y = out if residual is None else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    elif activation == "gelu_tanh" and x.is_cuda:  # the CPU's version is the exact GELU
        torch._addmm_activation(bias, x, weight.t(), use_gelu=True, out=y)
        activation = None
    else:
        torch.addmm(bias, x, weight.t(), out=y)
    if activation is not None:
        torch.ops.aten.gelu_(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    if residual is not None:
        torch.add(y, residual, out=out)


def linear_providers(
    device: torch.device, dtype: torch.dtype, capacity: int, out_features: int, in_features: int
) -> tuple[Provider, ...]:
    """Providers that can serve a layer given up to `capacity` rows of `dtype` (the input's: uint8
    for patches), the default first.

    "triton" serves everything. "gluon" is the Hopper tier, offered where it was measured ahead for
    some capacity. "cublas" (on the CPU torch's own) computes the whole capacity.
    """
    if dtype == torch.uint8:
        return ("triton",)
    config = linear_config(capability_of(device), dtype, capacity, out_features, in_features)
    ours: tuple[Provider, ...] = ("triton",)
    if config.hopper_rows is not None and not hopper_tier_unavailable(device):
        ours = ("triton", "gluon") if capacity < config.hopper_rows else ("gluon", "triton")
    least, end = config.cublas_rows
    if least <= capacity < end and device.type == "cuda":  # elsewhere kernels are only compiled
        return ("cublas", *ours)
    return (*ours, "cublas")


def adds_apart(x: Tensor, weight: Tensor, provider: Provider | None = None) -> bool:
    """Whether `linear` on as many rows as those of `x` would add a residual by a kernel of its own,
    which the LayerNorm that reads the sum can save."""
    first = provider or linear_providers(x.device, x.dtype, len(x), *weight.shape)[0]
    return first == "cublas"


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    num_rows: Tensor | None,
    out: Tensor | None,
    normalized: bool,
) -> None:
    dtype, rows, (out_features, in_features) = weight.dtype, x.shape[0], weight.shape
    if x.ndim != 2 or x.shape[1] != in_features:
        raise ValueError(f"x has shape {tuple(x.shape)}, weight takes [rows, {in_features}]")
    if x.dtype != (torch.uint8 if normalized else dtype):
        raise ValueError(f"x is {x.dtype}, weight {dtype}, normalization {normalized}")
    if not weight.is_contiguous():
        raise ValueError("weight is not contiguous")
    for name, tensor, expected, shape in (
        ("x", x, x.dtype, x.shape),
        ("bias", bias, dtype, (out_features,)),
        ("residual", residual, dtype, (rows, out_features)),
        ("num_rows", num_rows, torch.int32, (1,)),
        ("out", out, dtype, (rows, out_features)),
    ):
        if tensor is None:
            continue
        if tensor.dtype != expected:
            raise ValueError(f"{name} is {tensor.dtype}, expected {expected}")
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.stride(-1) != 1 and tensor.numel() > 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, not 1")


def linear(
    x: Tensor,  # [P, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,  # [P, N]
    num_rows: Tensor | None = None,
    out: Tensor | None = None,  # [P, N], may be a column slice
    normalization: PixelNormalization | None = None,
    provider: Provider | None = None,
) -> Tensor:
    """`linear_reference`, summed in float32 and rounded once.

    Rows past `num_rows` are neither read into a result nor written, except by the provider
    "cublas", which computes all of them.

    Args:
        provider: one of `linear_providers`; None takes the first. "fixed" is "triton" with one
            tile shape for every number of rows, so that a row's bits do not depend on the others.

    Raises:
        ValueError: shapes, strides or dtypes do not fit; the provider cannot serve the layer.
    """
    _check(x, weight, bias, residual, num_rows, out, normalization is not None)
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=weight.dtype, device=x.device)
    if x.shape[0] == 0:
        return out
    shape = (x.shape[0], *weight.shape)
    providers = linear_providers(x.device, x.dtype, *shape)
    provider = provider or providers[0]
    if provider not in (*providers, "fixed"):
        raise ValueError(f"provider {provider!r} cannot serve this layer, only {providers}")
    operands = (x, weight, bias, activation, residual)
    if provider == "cublas":
        linear_cublas(*operands, out)
    elif provider == "gluon" and is_aligned(x, weight, residual, out):
        from vitgraph.kernels.sm90.linear import linear_sm90

        linear_sm90(*operands, num_rows, out)
    else:
        pick = fixed_config if provider == "fixed" else linear_config
        config = pick(capability_of(x.device), weight.dtype, *shape)
        linear_triton(*operands, num_rows, out, normalization, config)
    return out
