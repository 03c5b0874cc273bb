"""Our encoder on the weights of SGLang's vision tower.

SGLang builds, loads, updates and names its tower as ever; the tower only gets another `forward`.
Nothing is copied: our parameters are views of SGLang's, and follow them when they move.
"""

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitgraph.encoder import Qwen3VLVisionEncoder, VisionConfig
from vitgraph.encoder.checkpoint import our_name
from vitgraph.encoder.sharing import why_not_shareable
from vitgraph.encoder.structure import Structure, why_not_plain
from vitgraph.graphs.addresses import Addresses
from vitgraph.graphs.config import CompilationConfig
from vitgraph.graphs.linears import SAME, Linears
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.graphs.sglang_plugin.names import logger

# Where the classes of SGLang's tower come from.
ORIGINS = ("torch.nn.modules.", "sglang.", "transformers.activations")

if TYPE_CHECKING:

    class SglangTower(nn.Module):
        """What SGLang's class has for `super()`."""

        def forward(self, x: Tensor, grid_thw: Any) -> Tensor: ...

else:
    SglangTower = object


def read_config(tower: Any) -> VisionConfig:
    """The geometry that a tower was built with; SGLang's models do not all keep the config.

    Raises:
        ValueError: a geometry that we do not compute.
    """
    rows = {our_name(name): len(weight) for name, weight in tower.named_parameters()}
    if "merger.linear_fc2.weight" not in rows:
        raise ValueError("its merger has no layers of its own")
    return VisionConfig(
        depth=len(tower.blocks),
        hidden_size=tower.hidden_size,
        intermediate_size=rows["blocks.0.mlp.linear_fc1.weight"],
        num_heads=tower.num_heads,
        out_hidden_size=rows["merger.linear_fc2.weight"],
        deepstack_visual_indexes=tuple(tower.deepstack_visual_indexes or ()),
        num_position_embeddings=tower.num_position_embeddings,
        in_channels=tower.patch_embed.in_channels,
        patch_size=tower.patch_size,
        temporal_patch_size=tower.temporal_patch_size,
        spatial_merge_size=tower.spatial_merge_size,
    )


class _Changed(Exception):
    """The tower is not what it was; no rows were handed out, and nothing was counted."""


class _Manager(EncoderCudaGraphManager):
    """Looks at the tower, too, whose weights it uses: while the GPU works."""

    def __init__(self, service: "TowerService", config: CompilationConfig) -> None:
        self._unchanged = service.unchanged
        super().__init__(service.encoder, config)

    def _check_modules(self, replays: bool) -> None:
        if not self._unchanged():
            raise _Changed
        super()._check_modules(replays)


class TowerService:
    """What serves one tower: an encoder on the tower's weights, and its manager.

    Args:
        tower: SGLang's, its weights loaded.
        config: see `CompilationConfig`; graphs are captured at once where it says so.
        attention: name of our backend, or "auto".
        batch_invariant: an image's bits do not depend on what it is encoded with.
        linears: options of the blocks' layers.

    Raises:
        ValueError: what keeps our encoder from serving, by name.
    """

    def __init__(
        self,
        tower: Any,
        config: CompilationConfig,
        attention: str,
        batch_invariant: bool,
        linears: Linears = SAME,
    ) -> None:
        self.tower, self.linears = tower, linears
        self.config = read_config(tower)
        if reason := self._why_not():
            raise ValueError(reason)
        self.encoder = Qwen3VLVisionEncoder(
            self.config,
            device="meta",
            dtype=tower.dtype,
            attention=attention,
            batch_invariant=batch_invariant,
            **linears._asdict(),
        )
        self._lock = threading.RLock()
        self._declined: str | None = None
        self._share()
        self.manager = _Manager(self, config)
        self.manager.capture()

    def _why_not(self) -> str | None:
        reason = why_not_plain(self.tower, "the tower's", ORIGINS)
        return reason or why_not_shareable(self.tower, self.config)

    def _share(self) -> None:
        self.encoder.share_weights(self.tower)
        self._structure = Structure(self.tower)
        self._addresses = Addresses(self.tower, buffers=False)  # SGLang makes its tables anew

    def unchanged(self) -> bool:
        """Whether weights and modules are what they were when they were shared."""
        return self._structure.unchanged() and self._addresses.unchanged()

    def follow(self) -> bool:
        """Share the tower's weights anew where they moved or were replaced, and capture again;
        False where our encoder cannot serve what the tower is now."""
        if self.unchanged():
            self._serve_again()
            return True
        if reason := self._why_not():
            if reason != self._declined:
                logger.warning("vitgraph: SGLang's own vision tower serves: %s", reason)
            self._declined = reason
            return False
        with torch.inference_mode(False), torch.no_grad():
            self._share()
        self._serve_again()
        if self.manager.is_captured():
            logger.warning("vitgraph: weights moved: encoder graphs are captured again")
            self._capture_again()
        return True

    def _serve_again(self) -> None:
        if self._declined is not None:
            logger.warning("vitgraph serves the vision tower again")
            self._declined = None

    def _capture_again(self) -> None:
        try:
            self.manager.capture()
        except Exception as error:
            self.manager.clear()
            logger.warning("vitgraph: the encoder runs eagerly from now on: %s", error)

    def encode(self, pixels: Tensor, grid_thw: Any) -> Tensor | None:
        """Encode through the manager: rows of the caller's own, or None where SGLang's tower is to
        serve. The arguments of SGLang's tower."""
        batch = {"pixel_values": pixels, "image_grid_thw": grid_thw}
        with self._lock:
            if self._declined is None:
                with suppress(_Changed):
                    return self.manager.encode(batch)[0]
            return self.manager.encode(batch)[0] if self.follow() else None


class ServedTower(SglangTower):
    """First base of a served tower's class, before SGLang's own, whose name it has."""

    vitgraph: TowerService

    def forward(self, x: Tensor, grid_thw: Any) -> Tensor:
        """[tokens, (1 + levels) * out_hidden_size]: the merger's columns, then each level's."""
        rows = self.vitgraph.encode(x, grid_thw)
        return super().forward(x, grid_thw) if rows is None else rows


def adopt(tower: Any, service: TowerService) -> None:
    """Give SGLang's tower our forward; its parameters, attributes and names stay its own."""
    own = type(tower)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    tower.__class__ = type(own.__name__, (ServedTower, own), names)
    tower.vitgraph = service
