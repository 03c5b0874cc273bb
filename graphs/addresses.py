"""Where a module's tensors were: graphs hold addresses, and encoders share weights."""

import operator
from collections.abc import Iterator
from contextlib import suppress

from torch import Tensor, nn


class Addresses:
    """Where every parameter and buffer of a module was when this was made, and its submodules."""

    def __init__(self, module: nn.Module) -> None:
        paths = list(module.named_modules())
        tensors = [
            (owner, name, f"{path}.{name}".lstrip("."))
            for path, part in paths
            for owner in (part._parameters, part._buffers)
            for name, tensor in owner.items()
            if tensor is not None
        ]
        children = [
            (part._modules, name, f"{path}.{name}".lstrip("."))
            for path, part in paths
            for name in part._modules
        ]
        self._owners, self._names, self._paths = (list(column) for column in _columns(tensors))
        self._parents, self._roles, self._branches = (list(c) for c in _columns(children))
        self._addresses = [owner[name].data_ptr() for owner, name, _ in tensors]
        self._children = [parent[name] for parent, name, _ in children]

    def __len__(self) -> int:
        """Tensors that are watched."""
        return len(self._addresses)

    def unchanged(self) -> bool:
        """Whether all are where they were. Several hundred lookups before every batch: by map, in
        a tenth of the time that walking the modules takes."""
        with suppress(KeyError, TypeError):  # deleted, or None now
            tensors: Iterator[Tensor] = map(operator.getitem, self._owners, self._names)
            children = map(operator.getitem, self._parents, self._roles)
            addresses = [*map(Tensor.data_ptr, tensors)]
            return addresses == self._addresses and [*children] == self._children
        return False

    def changed(self) -> list[str]:
        """Names of the tensors that moved and of the submodules that were replaced."""
        moved = [
            path
            for owner, name, path, address in zip(
                self._owners, self._names, self._paths, self._addresses, strict=True
            )
            if (tensor := owner.get(name)) is None or tensor.data_ptr() != address
        ]
        return moved + [
            path
            for parent, name, path, child in zip(
                self._parents, self._roles, self._branches, self._children, strict=True
            )
            if parent.get(name) is not child
        ]


def _columns(rows: list[tuple]) -> tuple:
    return tuple(zip(*rows, strict=True)) or ((), (), ())
