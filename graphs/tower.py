"""Put the encoder under a transformers Qwen3-VL model, and take it out again."""

from typing import Any

import torch
from torch import Tensor, nn

from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.graphs.config import CompilationConfig
from vitgraph.graphs.manager import EncoderCudaGraphManager


class VisionTower(nn.Module):
    """transformers' interface of a vision tower around a manager.

    The original tower stays a submodule: it owns the weights, which the encoder shares, so the
        model's
    parameters, its device moves and its state_dict names do not change hands.
    """

    def __init__(self, original: nn.Module, manager: EncoderCudaGraphManager) -> None:
        super().__init__()
        self.original = original
        # Not registered as a submodule: its parameters are the original's.
        object.__setattr__(self, "manager", manager)
        self.config = original.config
        self.spatial_merge_size = original.spatial_merge_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.original.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.original.device

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """Encode through the manager; returns transformers' output, `last_hidden_state` left
        out.
        """
        from transformers.models.qwen3_vl.modeling_qwen3_vl import (
            BaseModelOutputWithDeepstackFeatures,
        )

        per_item = self.manager.execute({"pixel_values": hidden_states, "image_grid_thw": grid_thw})
        rows = per_item[0] if len(per_item) == 1 else torch.cat(per_item)
        merged, *levels = rows.split(self.config.out_hidden_size, dim=1)
        return BaseModelOutputWithDeepstackFeatures(pooler_output=merged, deepstack_features=levels)


def replace_vision_tower(
    model: nn.Module, config: CompilationConfig | None = None, *, attention: str = "auto"
) -> EncoderCudaGraphManager:
    """Serve a model's images and videos by vitgraph; its weights are shared, not copied.

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
    owner = _owner(model)
    original = owner.visual
    if isinstance(original, VisionTower):
        raise ValueError(
            "the vision tower is vitgraph's already; restore_vision_tower(model) first"
        )
    encoder = Qwen3VLVisionEncoder.from_transformers(original, attention=attention)
    manager = EncoderCudaGraphManager(encoder, config)
    manager.capture()
    owner.visual = VisionTower(original, manager)
    return manager


def restore_vision_tower(model: nn.Module) -> None:
    """Put transformers' own tower back and free the graphs.

    Raises:
        ValueError: the tower was not replaced.
    """
    owner = _owner(model)
    if not isinstance(owner.visual, VisionTower):
        raise ValueError("the vision tower is transformers' own; there is nothing to restore")
    tower = owner.visual
    owner.visual = tower.original
    tower.manager.clear()


def _owner(model: nn.Module) -> nn.Module:
    owner = model if hasattr(model, "visual") else getattr(model, "model", None)
    tower = getattr(owner, "visual", None)
    if not isinstance(tower, VisionTower) and not hasattr(tower, "deepstack_merger_list"):
        raise ValueError(f"{type(model).__name__} has no Qwen3-VL vision tower")
    return owner
