"""What is on the modules of a tower. The forward reads their weights and runs none of them, so
adapters, hooks, wrappers and other classes on them would be left out without a word.

`why_not_plain` looks for all of that, by name. `Structure` remembers what was there, and tells in
one cheap pass whether any of it changed.
"""

import operator
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import repeat

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

LAYERS = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Conv3d)
# Where the classes of a tower may come from, its layers apart.
ORIGINS = ("torch.nn.modules.", "transformers.models.", "transformers.activations", "vitgraph.")
# Plain attributes that results depend on.
ATTRIBUTES = (
    "eps",
    "scaling",
    "interpolation_mode",
    "interpolation_align_corners",
    "deepstack_visual_indexes",
)
FREQUENCIES = "inv_freq"  # of transformers' rotary embedding: ours has its own
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
RECORDING = "transformers.utils.output_capturing"  # does nothing unless hidden states are asked for
MERGE = "merge_and_unload() the adapters first (vitgraph does not serve them on the tower yet)"


class Structure:
    """Class, forward, hooks, children and attributes of a module and all below it.

    Args:
        module: its own class, forward and hooks are left out: they run.
    """

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_modules())
        self._modules = [part for _, part in named[1:]]
        self._classes = [type(part) for part in self._modules]
        spaces = [vars(part) for part in self._modules]
        self._spaces = [space for space in spaces if "forward" not in space]
        self._kinds = list(dict.fromkeys(self._classes))
        self._forwards = [kind.forward for kind in self._kinds]
        registers = [part._modules for _, part in named]
        self._empty = [children for children in registers if not children]
        self._parents = [children for children in registers if children]
        self._sizes = [len(children) for children in self._parents]
        self._hooks = [space[name] for space in spaces for name in HOOKS]
        self._keys, self._registered = [*map(tuple, self._hooks)], RemovableHandle.next_id
        # Looked up again, and compared: children and attributes.
        looked_up = [(part._modules, name) for _, part in named for name in part._modules]
        looked_up += [(vars(p), name) for _, p in named for name in ATTRIBUTES if name in vars(p)]
        self._owners, self._names = [owner for owner, _ in looked_up], [n for _, n in looked_up]
        self._values = [_copied(owner[name]) for owner, name in looked_up]
        self._described = dict(_describe(module))
        self._buffers = [part._buffers for _, part in named if FREQUENCIES in part._buffers]
        self._frequencies = [*map(_state_of_frequencies, self._buffers)]
        # Kept, as the id of a tensor that is gone comes again.
        self._kept = [buffers[FREQUENCIES] for buffers in self._buffers]

    def unchanged(self) -> bool:
        """Whether all is as it was. Thousands of lookups before every batch: by map, in a tenth of
        the time that walking the modules takes."""
        with suppress(KeyError):  # deleted
            return (
                not any(self._empty)
                and not any(map(operator.contains, self._spaces, repeat("forward")))
                and [*map(type, self._modules)] == self._classes
                and [*map(operator.getitem, self._owners, self._names)] == self._values
                and [*map(len, self._parents)] == self._sizes
                and [*map(_state_of_frequencies, self._buffers)] == self._frequencies
                and self._same_hooks()
                and [kind.forward for kind in self._kinds] == self._forwards
            )
        return False

    def _same_hooks(self) -> bool:
        """Looked at only where a hook was registered somewhere, for torch counts them."""
        if self._registered != RemovableHandle.next_id:
            if [*map(tuple, self._hooks)] != self._keys:  # each has a number of its own
                return False
            self._registered = RemovableHandle.next_id
        return True

    def changed(self, module: nn.Module) -> list[str]:
        """Names of the modules and attributes of the same module that are not as they were."""
        before, now = self._described, dict(_describe(module))
        return [path for path in before | now if before.get(path) != now.get(path)]

    def __reduce__(self) -> tuple:
        """A copy of the module takes a look of its own."""
        return type(None), ()


def why_not_plain(
    module: nn.Module, whose: str, origins: tuple[str, ...] = ORIGINS, remedy: str = "remove it"
) -> str | None:
    """What is on a module below `module` that our forward would leave out, or None.

    Args:
        whose: the first words of the answer, e.g. "the encoder's".
        origins: prefixes of the Python modules whose classes are plain; layers that have weights
            must be torch's own, or of an origin outside torch.
        remedy: what to do about hooks, wrappers and classes that are not known.
    """
    for path, part in module.named_modules():
        if path and (found := _what_is_on(part, origins)):
            what, advice = found
            return f"{whose} {path} {what}, which would be left out: {advice or remedy}"
        for name, parameter in part.named_parameters(path, recurse=False):
            if (odd := _what_is_odd(parameter)) is not None:
                return f"{whose} {name} {odd}"
    return None


def _what_is_on(module: nn.Module, origins: tuple[str, ...]) -> tuple[str, str] | None:
    """(what, what to do) of one module; no advice where the caller's will do."""
    kind, space = type(module), vars(module)
    name, origin = kind.__name__, kind.__module__
    if origin.startswith("peft."):
        return f"is peft's {name}, an adapter", MERGE
    if "_hf_hook" in space:
        return "is under accelerate's hooks (a device map, or offloading)", (
            "keep the whole vision tower on one device, without a device map, or call "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True)"
        )
    if origin.startswith("torch.distributed"):
        return f"is a {name}, sharded over ranks", "leave the vision tower out of FSDP"
    if hasattr(module, "parametrizations"):
        return "is parametrized", "torch.nn.utils.parametrize.remove_parametrizations first"
    is_layer = origins == ORIGINS and bool(module._parameters)
    if not (kind in LAYERS if is_layer else origin.startswith(origins)):
        return f"is a {origin}.{name}", ""
    if "forward" in space or not kind.forward.__module__.startswith(origins):
        return "has a forward of its own", ""
    hooks = {key for register in HOOKS for key in _acting(space[register])}
    return (f"has {len(hooks)} forward hook{'s' * (len(hooks) > 1)}", "") if hooks else None


def _acting(hooks: Mapping) -> Iterator:
    """Of the hooks those that are not transformers' recording ones."""
    return (key for key, hook in hooks.items() if getattr(hook, "__module__", "") != RECORDING)


def _what_is_odd(parameter: Tensor) -> str | None:
    """Why the values of a parameter cannot be read at its address, or None."""
    if is_traceable_wrapper_subclass(parameter):
        name = type(parameter).__name__
        if name == "DTensor":
            return "is a DTensor, sharded over ranks: leave the vision tower out of FSDP"
        return f"is a {name}, no plain tensor: quantised? leave the vision tower as it was"
    if parameter.device.type == "meta":
        return "is on the meta device: load its weights first, or do not offload them"
    return None


def _describe(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Path and state of what `Structure` watches."""
    for path, part in module.named_modules():
        space = vars(part)
        for name in ATTRIBUTES:
            if name in space:
                yield f"{path}.{name}".lstrip("."), _copied(space[name])
        if FREQUENCIES in part._buffers:
            yield f"{path}.{FREQUENCIES}", _state_of_frequencies(part._buffers)
        if path:
            hooks = [key for name in HOOKS for key in space[name]]
            yield path, (id(part), type(part), type(part).forward, space.get("forward"), hooks)


def _state_of_frequencies(buffers: Mapping[str, Tensor | None]) -> tuple[int, int]:
    """Which tensor it is, and how often it was changed in place (inference tensors do not say)."""
    tensor = buffers[FREQUENCIES]
    return id(tensor), -1 if tensor is None or tensor.is_inference() else tensor._version


def _copied(value: object) -> object:
    return list(value) if isinstance(value, list) else value
