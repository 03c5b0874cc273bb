"""Borrowed outputs that notice when they have been overwritten (debug mode)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
        """Check every borrowed argument, then run on plain tensors."""
        for tensor in _borrowed((args, kwargs)):
            is_current = tensor.__dict__.get("is_current")
            if is_current is not None and not is_current():
                raise RuntimeError(
                    "this output was borrowed and a later execute() has overwritten it; clone it "
                    "before the next call, or do not borrow"
                )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _borrowed(value: Any) -> list[BorrowedTensor]:
    if isinstance(value, BorrowedTensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for entry in value for tensor in _borrowed(entry)]
    return []
