"""Put the encoder under a model of transformers with this kind of tower, and take it out again.

The model keeps its own tower module: names, weights, state_dict and device moves stay what they
were. Only the tower's class changes, to one whose `forward` goes through a graph manager.
"""

import copyreg
import sys
import warnings
import weakref
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.encoder.config import SUPPORTED, TOWERS
from vitgraph.encoder.sharing import RESTORE, is_tower, why_not_transformers
from vitgraph.encoder.structure import Structure
from vitgraph.graphs.addresses import Addresses
from vitgraph.graphs.config import CompilationConfig
from vitgraph.graphs.manager import EncoderCudaGraphManager

# What transformers' tower takes in place of what it derives from the grids.
PRECOMPUTED = ("cu_seqlens", "max_seqlen", "position_ids", "interp_indices", "interp_weights")


class _Service:
    """What serves one tower: an encoder on the tower's weights, and its manager."""

    def __init__(
        self,
        tower: nn.Module,
        config: CompilationConfig | None,
        options: dict[str, Any],
    ) -> None:
        self.tower = weakref.ref(tower)
        self.encoder = Qwen3VLVisionEncoder.from_transformers(tower, **options)
        self.addresses, self.structure = Addresses(tower), Structure(tower)
        self.warned: set[str] = set()
        self.manager = _Manager(self, config)
        self.manager.capture()

    def follow(self) -> None:
        """Share the tower's weights anew where they moved or were replaced. Graphs captured
        before then refuse to replay. Without the tower the manager keeps the weights it has.

        Raises:
            ValueError: what was put on the tower since, by name.
        """
        if (tower := self.tower()) is None:
            return
        if self.structure.unchanged() and self.addresses.unchanged():
            return
        if reason := why_not_transformers(tower, self.encoder.config):
            raise ValueError(reason)
        self.encoder.share_weights(tower)
        self.addresses, self.structure = Addresses(tower), Structure(tower)

    def warn(self, message: str) -> None:
        """Once for each tower."""
        if message not in self.warned:
            self.warned.add(message)
            warnings.warn(message, stacklevel=3)


class _Manager(EncoderCudaGraphManager):
    """Looks at the tower, too, whose weights it uses; no other thread is in the forward then."""

    def __init__(self, service: _Service, config: CompilationConfig | None) -> None:
        self._follow = service.follow
        super().__init__(service.encoder, config)

    def capture(self) -> None:
        with self._lock:
            self._follow()
            super().capture()

    def encode(
        self, mm_kwargs: dict[str, Any], *, borrow: bool = False
    ) -> tuple[Tensor, list[int]]:
        with self._lock:
            if not self.is_captured():  # it may have moved
                self._follow()
            return super().encode(mm_kwargs, borrow=borrow)

    def _check_modules(self, replays: bool) -> None:
        self._follow()
        super()._check_modules(replays)


class _WarnOfGradients(torch.autograd.Function):
    """The identity; a gradient that comes back ends here, with a warning."""

    @staticmethod
    def forward(context: Any, rows: Tensor, parameter: Tensor, service: _Service) -> Tensor:
        context.service = service
        return rows.view_as(rows)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, None, None]:
        context.service.warn(
            "vitgraph's vision tower is for inference: no gradient goes through it, and its "
            "weights get none; restore_vision_tower(model) to train them, or freeze them"
        )
        return None, None, None


class VisionTower(nn.Module):
    """First base of a served tower's class, before transformers' own, whose name it has."""

    vitgraph: _Service
    config: Any

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """Encode through the manager; inference only. Returns transformers' output without
        `last_hidden_state`; transformers' own forward runs where a keyword or the config asks for
        more than that."""
        if asked := _asked(self.config, kwargs):
            self.vitgraph.warn(f"transformers' own vision tower runs where {asked} is asked for")
            return super().forward(hidden_states, grid_thw=grid_thw, **kwargs)
        batch = {"pixel_values": hidden_states, "image_grid_thw": grid_thw}
        rows, _ = self.vitgraph.manager.encode(batch)
        if torch.is_grad_enabled():
            learns = [p for p in (hidden_states, *self.parameters()) if p.requires_grad]
            if learns:
                rows = _WarnOfGradients.apply(rows, learns[0], self.vitgraph)
        merged, *levels = rows.split(self.config.out_hidden_size, dim=1)
        if hasattr(self, "deepstack_merger_list"):  # the model reads its features, if only none
            output = sys.modules[_own_class(self).__module__].BaseModelOutputWithDeepstackFeatures
            return output(pooler_output=merged, deepstack_features=levels)
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=merged)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Copies and pickles are transformers' own, without what serves this one."""
        state = {name: value for name, value in vars(self).items() if name != "vitgraph"}
        # Known to every Python: who loads it needs no vitgraph.
        return copyreg._reconstructor, (_own_class(self), object, None), state  # type: ignore[attr-defined]


def replace_vision_tower(
    model: nn.Module,
    config: CompilationConfig | None = None,
    *,
    attention: str = "auto",
    batch_invariant: bool = False,
    linear_dtype: str = "same",
    fp8_skip_blocks: int = 0,
) -> EncoderCudaGraphManager:
    """Serve a model's images and videos by vitgraph; its weights are shared, not copied.

    For inference: no gradient goes through the tower, which warns where one should. Weights may
    change in place; after they moved (by `.to`, say) graphs raise until the manager captures again.

    Args:
        model: any of transformers' whose vision tower is one of `vitgraph.encoder.TOWERS`
            (Qwen3-VL, Qwen3.5, Qwen3-Omni), its base model, the tower itself, or what wraps one
            of them (peft, DistributedDataParallel); on the device and in the dtype it will run in.
        config: graphs are captured at once where it says so.
        attention, batch_invariant, linear_dtype, fp8_skip_blocks: of the encoder, see
            `Qwen3VLVisionEncoder`.

    Returns:
        The manager, for its statistics. `restore_vision_tower(model)` undoes the replacement.

    Raises:
        ValueError: a model without such a tower, naming those that are supported; one that was
            replaced already, or one with something on it that would be left out (adapters, hooks,
            other classes), by name.
    """
    tower = _tower(model)
    if isinstance(tower, VisionTower):
        raise ValueError("vitgraph serves this tower already; restore_vision_tower(model) first")
    definer = next(kind for kind in type(tower).__mro__ if "forward" in vars(kind))
    if "forward" in vars(tower) or definer.__name__ not in TOWERS:  # accelerate's hooks; a subclass
        raise ValueError(f"the tower has a forward of its own, which would be left out: {RESTORE}")
    options = {"attention": attention, "batch_invariant": batch_invariant}
    options |= {"linear_dtype": linear_dtype, "fp8_skip_blocks": fp8_skip_blocks}
    service = _Service(tower, config, options)
    own = type(tower)
    # Its own name: in what is saved, in transformers' registries and in messages.
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    tower.__class__ = type(own.__name__, (VisionTower, own), names)
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
    tower.vitgraph.manager.clear()
    del tower.vitgraph
    tower.__class__ = _own_class(tower)


def _own_class(tower: VisionTower) -> Any:
    return next(kind for kind in type(tower).__mro__ if VisionTower in kind.__bases__).__bases__[1]


def _asked(config: Any, keywords: dict[str, Any]) -> str | None:
    """The first keyword, or field of the config, that asks for what our forward does not give.
    Other keywords, the language model's among them, change nothing in transformers' tower."""
    for name in ("output_hidden_states", "output_attentions"):
        if keywords.get(name, getattr(config, name, False)):
            return name
    if keywords.get("return_dict", getattr(config, "return_dict", True)) is False:
        return "return_dict=False"
    return next((name for name in PRECOMPUTED if keywords.get(name) is not None), None)


def _tower(model: nn.Module) -> Any:
    """The one vision tower of a model, wherever it is."""
    parts = model.modules() if isinstance(model, nn.Module) else ()
    towers = [part for part in parts if is_tower(part)]
    if not towers:
        raise ValueError(f"{type(model).__name__} has no vision tower of this kind; {SUPPORTED}")
    if len(towers) > 1:
        raise ValueError(
            f"{type(model).__name__} has {len(towers)} vision towers: pass the model that holds "
            f"one (of a PeftModel, get_base_model())"
        )
    return towers[0]
