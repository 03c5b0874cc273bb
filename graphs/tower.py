"""Put the encoder under a transformers Qwen3-VL model, and take it out again.

The model keeps its own tower module: names, weights, state_dict and device moves stay what they
were. Only the tower's class changes, to one whose `forward` goes through a graph manager.
"""

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from vitgraph.encoder import Qwen3VLVisionEncoder, VisionConfig
from vitgraph.encoder.sharing import why_not_shareable
from vitgraph.graphs.addresses import Addresses
from vitgraph.graphs.config import CompilationConfig
from vitgraph.graphs.manager import EncoderCudaGraphManager


class _Service:
    """What serves one tower: an encoder on the tower's weights, and its manager."""

    def __init__(self, tower: nn.Module, config: CompilationConfig | None, attention: str) -> None:
        self.tower = weakref.ref(tower)
        self.encoder = Qwen3VLVisionEncoder.from_transformers(tower, attention=attention)
        self.addresses = Addresses(tower)
        self.manager = _Manager(self, config)
        self.manager.capture()

    def follow(self) -> None:
        """Share the tower's weights anew where they moved or were replaced. Graphs captured
        before then refuse to replay. Without the tower the manager keeps the weights it has.

        Raises:
            ValueError: the tower has become what `replace_vision_tower` refuses, by an adapter say.
        """
        if (tower := self.tower()) is None:
            return
        if not self.addresses.unchanged():
            _check_plain(tower)
            self.encoder.share_weights(tower)
            self.addresses = Addresses(tower)

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of the model is served by transformers."""


class _Manager(EncoderCudaGraphManager):
    """Looks at the tower's weights before it uses them."""

    def __init__(self, service: _Service, config: CompilationConfig | None) -> None:
        self._follow = service.follow
        super().__init__(service.encoder, config)

    def capture(self) -> None:
        self._follow()
        super().capture()

    def encode(
        self, mm_kwargs: dict[str, Any], *, borrow: bool = False
    ) -> tuple[Tensor, list[int]]:
        self._follow()
        return super().encode(mm_kwargs, borrow=borrow)


class VisionTower(nn.Module):
    """First base of a served tower's class, before transformers' own."""

    vitgraph: _Service | None
    config: Any

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """Encode through the manager; inference only. Returns transformers' output without
        `last_hidden_state`."""
        if self.vitgraph is None:
            return super().forward(hidden_states, grid_thw=grid_thw, **kwargs)
        from transformers.models.qwen3_vl.modeling_qwen3_vl import (
            BaseModelOutputWithDeepstackFeatures,
        )

        if self.training and torch.is_grad_enabled() and _wants_gradients(self):
            warnings.warn(
                "vitgraph's vision tower is for inference: its weights get no gradients; "
                "restore_vision_tower(model) to train them, or freeze them",
                stacklevel=2,
            )
        batch = {"pixel_values": hidden_states, "image_grid_thw": grid_thw}
        rows, _ = self.vitgraph.manager.encode(batch)
        merged, *levels = rows.split(self.config.out_hidden_size, dim=1)
        return BaseModelOutputWithDeepstackFeatures(pooler_output=merged, deepstack_features=levels)


def replace_vision_tower(
    model: nn.Module, config: CompilationConfig | None = None, *, attention: str = "auto"
) -> EncoderCudaGraphManager:
    """Serve a model's images and videos by vitgraph; its weights are shared, not copied.

    For inference: no gradients reach the tower, which warns where it is trained. Weights may
    change in place; after they moved (by `.to`, say) graphs raise until the manager captures again.

    Args:
        model: transformers' `Qwen3VLForConditionalGeneration`,
            `Qwen3VLMoeForConditionalGeneration`, or their base models; on the device and in the
            dtype it will run in.
        config: graphs are captured at once where it says so.
        attention: backend of the encoder.

    Returns:
        The manager, for its statistics. `restore_vision_tower(model)` undoes the replacement.

    Raises:
        ValueError: a model without a Qwen3-VL vision tower, or one that was replaced already.
    """
    tower = _tower(model)
    if isinstance(tower, VisionTower):
        raise ValueError("vitgraph serves this tower already; restore_vision_tower(model) first")
    _check_plain(tower)
    service = _Service(tower, config, attention)
    own = type(tower)
    tower.__class__ = type(f"Vitgraph{own.__name__}", (VisionTower, own), {})
    tower.vitgraph = service
    return service.manager


def restore_vision_tower(model: nn.Module) -> None:
    """Put transformers' own forward back and free the graphs.

    Raises:
        ValueError: the tower was not replaced.
    """
    tower = _tower(model)
    if not isinstance(tower, VisionTower):
        raise ValueError("the vision tower is transformers' own; there is nothing to restore")
    if tower.vitgraph is not None:
        tower.vitgraph.manager.clear()
    del tower.vitgraph
    tower.__class__ = type(tower).__bases__[1]


def _wants_gradients(tower: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in tower.parameters())


def _check_plain(tower: Any) -> None:
    """Our forward knows the tower's weights and nothing else that may be on it."""
    for name, module in tower.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise ValueError(f"the tower's {name or 'forward'} has hooks, which would not run")
        if "forward" in vars(module):  # as accelerate's offloading does it
            raise ValueError(f"the tower's {name or 'forward'} is wrapped, which would not run")
        known = ("torch.nn.modules.", "transformers.")
        if not (isinstance(module, VisionTower) or type(module).__module__.startswith(known)):
            raise ValueError(f"the tower's {name} is a {type(module).__name__}; is it an adapter?")
    for name, parameter in tower.named_parameters():
        if parameter.device.type == "meta":
            raise ValueError(f"the tower's {name} is on the meta device: offloaded?")
    if reason := why_not_shareable(tower, VisionConfig.from_dict(tower.config.to_dict())):
        raise ValueError(reason)


def _tower(model: nn.Module) -> Any:
    owner = model if hasattr(model, "visual") else getattr(model, "model", None)
    tower = getattr(owner, "visual", None)
    if not hasattr(tower, "deepstack_merger_list"):
        raise ValueError(f"{type(model).__name__} has no Qwen3-VL vision tower")
    return tower
