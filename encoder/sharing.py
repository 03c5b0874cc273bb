"""Whether another project's vision tower has weights that our encoder can use as they are."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitgraph.encoder.checkpoint import our_name
from vitgraph.encoder.config import SUPPORTED, TOWERS, VisionConfig
from vitgraph.encoder.modules import VisionModules
from vitgraph.encoder.structure import why_not_plain
from vitgraph.kernels.rotary import rotary_frequencies

RESTORE = "remove it, or leave the tower to transformers (restore_vision_tower)"


def is_tower(module: nn.Module) -> bool:
    """Whether this is a vision tower of transformers whose forward ours equals."""
    return any(kind.__name__ in TOWERS for kind in type(module).__mro__)


def config_of(tower: Any) -> VisionConfig:
    """Geometry of a tower of transformers.

    Raises:
        ValueError: another kind of tower, naming those that are supported.
    """
    if not is_tower(tower):
        raise ValueError(f"{type(tower).__name__} is another kind of tower; {SUPPORTED}")
    if getattr(tower, "config", None) is None:  # SGLang's has that name
        raise ValueError(
            f"{type(tower).__module__}.{type(tower).__name__} is not transformers' tower of that "
            f"name: it has no config"
        )
    return VisionConfig.from_dict(tower.config.to_dict())


def why_not_shareable(tower: nn.Module, config: VisionConfig) -> str | None:
    """What keeps our encoder from using these weights, or None.

    Quantised layers, layers split over ranks and a geometry unknown to us all show in the names,
    shapes and dtypes of the parameters.
    """
    for name, module in tower.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not type(method).__name__.startswith("Unquantized"):
            return f"the tower is quantised ({name}: {type(method).__name__})"
    with torch.device("meta"):
        ours = dict(VisionModules(config).named_parameters())
    theirs = dict(tower.named_parameters())
    if different := sorted(ours.keys() ^ set(map(our_name, theirs))):
        return f"the tower's parameters differ in {', '.join(different[:3])}"
    dtype = theirs["pos_embed.weight"].dtype
    for name, parameter in theirs.items():
        kept_exact = "norm" in our_name(name) and parameter.dtype == torch.float32
        if (parameter.dtype != dtype and not kept_exact) or not parameter.is_floating_point():
            return f"the tower's {name} has dtype {parameter.dtype}, others {dtype}"
        wanted = ours[our_name(name)]
        if parameter.numel() != wanted.numel() or parameter.shape[0] != wanted.shape[0]:
            return (
                f"the tower's {name} has shape {tuple(parameter.shape)}, the config wants "
                f"{tuple(wanted.shape)}"
            )
    return None


def why_not_transformers(tower: Any, config: VisionConfig) -> str | None:
    """What keeps our encoder from computing what transformers' tower would, or None: what is on
    its modules, its weights, and its attributes, which may be changed after it was built."""
    if reason := why_not_plain(tower, "the tower's", remedy=RESTORE):
        return reason
    if reason := why_not_shareable(tower, config):
        return reason
    for name, found, computed in _attributes(tower, config):
        if found != computed:
            return f"the tower's {name} is {found!r:.60}, vitgraph computes {computed!r:.60}"
    frequencies = getattr(tower.rotary_pos_emb, "inv_freq", None)
    if frequencies is None or frequencies.is_meta:
        return "the tower's rotary_pos_emb.inv_freq has no values: it is missing or on meta"
    computed = rotary_frequencies(config.head_dim, config.rope_theta, torch.device("cpu"))
    if not _close(frequencies.cpu(), computed):
        return f"the tower's rotary_pos_emb.inv_freq is not that of theta {config.rope_theta}"
    x = torch.linspace(-4, 4, 33, device="cpu", dtype=torch.float32)
    for name, module in tower.named_modules():
        if our_name(name).endswith("act_fn"):
            kind = "tanh" if name.endswith(".mlp.act_fn") else "none"
            if not _close(module(x), F.gelu(x, approximate=kind)):
                what = "tanh-GELU" if kind == "tanh" else "GELU"
                return f"the tower's {name} is {module}, vitgraph computes {what}"
    return None


def _attributes(tower: Any, config: VisionConfig) -> Iterator[tuple[str, object, object]]:
    """(name, what it is, what the forward computes)."""
    levels = list(config.deepstack_visual_indexes)
    for name, computed in (
        ("interpolation_mode", "bilinear"),
        ("interpolation_align_corners", True),
        ("deepstack_visual_indexes", levels),
    ):
        found = getattr(tower, name, computed)
        yield name, list(found) if isinstance(found, tuple) else found, computed
    for depth, block in enumerate(tower.blocks):
        expected = {"num_heads": config.num_heads, "scaling": config.head_dim**-0.5}
        for name, computed in expected.items():
            found = getattr(block.attn, name, computed)
            close = math.isclose(found, computed, rel_tol=1e-6)
            yield f"blocks.{depth}.attn.{name}", computed if close else found, computed
    scaling = getattr(tower.rotary_pos_emb, "attention_scaling", 1.0)
    yield "rotary_pos_emb.attention_scaling", scaling, 1.0


def _close(found: Tensor, computed: Tensor) -> bool:
    """Up to the rounding of the tower's dtype."""
    tolerance = 4 * torch.finfo(found.dtype).eps
    return found.shape == computed.shape and torch.allclose(
        found.float(), computed.float(), rtol=tolerance, atol=tolerance
    )
