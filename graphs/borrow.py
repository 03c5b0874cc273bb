"""Borrowed outputs that notice when they have been overwritten (debug mode)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# What a caller takes an output apart with.
PARTS = {
    Tensor.__getitem__,
    *(getattr(owner, name) for owner in (Tensor, torch) for name in ("split", "chunk", "unbind")),
    *(getattr(owner, name) for owner in (Tensor, torch) for name in ("narrow", "select")),
}


class BorrowedTensor(Tensor):
    """A view of a static output buffer that refuses every use after the next replay."""

    is_current: Callable[[], bool]

    @classmethod
    def lend(cls, rows: Tensor, is_current: Callable[[], bool]) -> "BorrowedTensor":
        """Wrap `rows`, valid while `is_current()`."""
        borrowed = rows.as_subclass(cls)
        borrowed.is_current = is_current
        return borrowed

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Check every borrowed argument, run on plain tensors, and lend on the parts of one."""
        lent = [tensor for tensor in _borrowed((args, kwargs)) if "is_current" in vars(tensor)]
        if not all(tensor.is_current() for tensor in lent):
            raise RuntimeError(
                "this output was borrowed and a later execute() has overwritten it; clone it "
                "before the next call, or do not borrow"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if lent and func in PARTS and not torch.compiler.is_compiling():
                return _lend_parts(result, lent[0])
            return result

    def __format__(self, spec: str) -> str:
        return format(self.clone(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.clone()


def _borrowed(value: Any) -> list[BorrowedTensor]:
    if isinstance(value, BorrowedTensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for entry in value for tensor in _borrowed(entry)]
    return []


def _lend_parts(value: Any, owner: BorrowedTensor) -> Any:
    """`value` with the tensors in the memory of `owner` lent as that is."""
    if not isinstance(value, Tensor):
        return type(value)(_lend_parts(entry, owner) for entry in value)
    if value.untyped_storage().data_ptr() != owner.untyped_storage().data_ptr():  # copied
        return value
    return BorrowedTensor.lend(value, owner.is_current)
