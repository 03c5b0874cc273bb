"""Whether another project's vision tower has weights that our encoder can use as they are."""

import torch
from torch import nn

from vitgraph.encoder.config import VisionConfig
from vitgraph.encoder.model import Qwen3VLVisionEncoder


def why_not_shareable(tower: nn.Module, config: VisionConfig) -> str | None:
    """What keeps our encoder from using these weights, or None.

    Quantised layers, layers split over ranks and a geometry unknown to us all show in the names,
    shapes and dtypes of the parameters.
    """
    for name, module in tower.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not type(method).__name__.startswith("Unquantized"):
            return f"the tower is quantised ({name}: {type(method).__name__})"
    ours = dict(Qwen3VLVisionEncoder(config, device="meta").named_parameters())
    theirs = dict(tower.named_parameters())
    if different := sorted(ours.keys() ^ theirs.keys()):
        return f"the tower's parameters differ in {', '.join(different[:3])}"
    dtype = theirs["pos_embed.weight"].dtype
    for name, parameter in theirs.items():
        kept_exact = "norm" in name and parameter.dtype == torch.float32
        if (parameter.dtype != dtype and not kept_exact) or not parameter.is_floating_point():
            return f"the tower's {name} has dtype {parameter.dtype}, others {dtype}"
        if parameter.numel() != ours[name].numel() or parameter.shape[0] != ours[name].shape[0]:
            return (
                f"the tower's {name} has shape {tuple(parameter.shape)}, the config wants "
                f"{tuple(ours[name].shape)}"
            )
    return None
