"""Weights that a checkpoint holds in e4m3 beside their scales: weight = values * scale, in float32.

| made by | scale | shapes, for a weight [N, K] |
|---|---|---|
| Model-Optimizer | weight_scale | [], [N] or [N / 128, 1, K / 128, 1] |
| compressed-tensors | weight_scale | [1], [N, 1] or [N / 128, K / 128] |
| Qwen's own -FP8 | weight_scale_inv, a factor in spite of its name | [N / 128, K / 128] |

Blocks are counted up: the last ones may be smaller. The scale of the activations (input_scale) is
not read: ours are scaled as they come.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vitgraph.kernels.launch import cdiv

SCALES, IGNORED = ("weight_scale", "weight_scale_inv"), "input_scale"
BLOCK = 128
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SUPPORTED = (
    "quantised weights are read where they are F8_E4M3 with one scale a tensor, an output channel "
    "or a block of 128 x 128, as Model-Optimizer, compressed-tensors and Qwen's -FP8 have it"
)


class Stored(NamedTuple):
    """What a file says of a tensor."""

    dtype: str
    shape: tuple[int, ...]


def companions(names: Collection[str], parameters: Collection[str]) -> dict[str, dict[str, str]]:
    """Tensors that quantisation left beside a layer's parameters.

    Args:
        names: of a checkpoint's tensors, under our names.
        parameters: those that a tower has.

    Returns:
        By the layer's weight: last part of a tensor's name -> its name.
    """
    beside: dict[str, dict[str, str]] = defaultdict(dict)
    for name in sorted(set(names) - set(parameters)):
        layer, _, last = name.rpartition(".")
        if (weight := f"{layer}.weight") in parameters:
            beside[weight][last] = name
    return {
        weight: found
        for weight, found in beside.items()
        if weight not in names or any("scale" in last for last in found)
    }


def scale_name(beside: Mapping[str, str]) -> str:
    """Which of a weight's companions is its scale, where `why_not_read` has found nothing."""
    return next(beside[name] for name in SCALES if name in beside)


def why_not_read(
    weight: str, beside: Mapping[str, str], stored: Mapping[str, Stored], dtypes: Collection[str]
) -> str | None:
    """What keeps a quantised weight from being read, or None.

    Args:
        weight: its name.
        beside: its companions.
        stored: what the files say of these tensors.
        dtypes: of scales.
    """
    others = " and ".join(name for name in beside if name != IGNORED)
    if weight not in stored:
        return f"missing {weight}, there is {others}"
    if stored[weight].dtype != "F8_E4M3" or beside.keys() - {*SCALES, IGNORED}:
        return f"{weight} is {stored[weight].dtype} with {others or 'no scale'}"
    scales = [beside[name] for name in SCALES if name in beside]
    if len(scales) != 1:
        return f"{weight} is F8_E4M3 with {others or 'no scale'}, one of {' and '.join(SCALES)}"
    if scales[0] not in stored:
        return f"missing {scales[0]}"
    if stored[scales[0]].dtype not in dtypes:
        return f"{scales[0]} is {stored[scales[0]].dtype}, not {' or '.join(dtypes)}"
    shape = stored[scales[0]].shape
    if shape not in _shapes(stored[weight].shape):
        return f"{scales[0]} has shape {shape}, {weight} {stored[weight].shape}"
    return None


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """`weight * scale` in float32.

    Raises:
        ValueError: a scale of another shape than those above, or of a dtype that is no number's.
    """
    if scale.dtype not in FLOATS or tuple(scale.shape) not in _shapes(tuple(weight.shape)):
        raise ValueError(
            f"the scale is {scale.dtype} {tuple(scale.shape)}, the weight {tuple(weight.shape)}; "
            f"{SUPPORTED}"
        )
    scale = scale.float()
    if scale.numel() == 1 or scale.numel() == scale.shape[0] == weight.shape[0]:
        return weight.float() * scale.reshape(-1, *[1] * (weight.ndim - 1))
    rows, columns = weight.shape
    scale = scale.reshape(cdiv(rows, BLOCK), cdiv(columns, BLOCK))
    scale = scale.repeat_interleave(BLOCK, dim=0)[:rows].repeat_interleave(BLOCK, dim=1)
    return weight.float() * scale[:, :columns]


def _shapes(weight: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Those that a scale may have."""
    rows = weight[0]
    found: list[tuple[int, ...]] = [(), (1,), (rows,), (rows, *[1] * (len(weight) - 1))]
    if len(weight) == 2:
        blocks = cdiv(rows, BLOCK), cdiv(weight[1], BLOCK)
        found += [blocks, (blocks[0], 1, blocks[1], 1)]
    return found
