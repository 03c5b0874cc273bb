"""Where a module's tensors were: graphs hold addresses, and encoders share weights. What else may
change on a module is in encoder/structure.py."""

import operator
from collections.abc import Iterator
from contextlib import suppress

from torch import Tensor, nn


class Addresses:
    """Where every parameter and buffer of a module was when this was made.

    Args:
        buffers: False leaves them out.
        keep: leave that memory allocated as long as this exists: a replay may be under way while
            it is looked at, and must not read what somebody else writes.
    """

    def __init__(self, module: nn.Module, *, buffers: bool = True, keep: bool = False) -> None:
        tensors = [
            (owner, name, f"{path}.{name}".lstrip("."))
            for path, part in module.named_modules()
            for owner in (part._parameters, part._buffers if buffers else {})
            for name, tensor in owner.items()
            if tensor is not None
        ]
        self._owners, self._names, self._paths = (list(column) for column in _columns(tensors))
        self._addresses = [owner[name].data_ptr() for owner, name, _ in tensors]
        self._kept = [owner[name].untyped_storage() for owner, name, _ in tensors if keep]

    def __len__(self) -> int:
        """Tensors that are watched."""
        return len(self._addresses)

    def unchanged(self) -> bool:
        """Whether all are where they were. Several hundred lookups before every batch: by map, in
        a tenth of the time that walking the modules takes."""
        with suppress(KeyError, TypeError):  # deleted, or None now
            tensors: Iterator[Tensor] = map(operator.getitem, self._owners, self._names)
            return [*map(Tensor.data_ptr, tensors)] == self._addresses
        return False

    def changed(self) -> list[str]:
        """Names of the tensors that moved."""
        return [
            path
            for owner, name, path, address in zip(
                self._owners, self._names, self._paths, self._addresses, strict=True
            )
            if (tensor := owner.get(name)) is None or tensor.data_ptr() != address
        ]


def _columns(rows: list[tuple]) -> tuple:
    return tuple(zip(*rows, strict=True)) or ((), (), ())
