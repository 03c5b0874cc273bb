"""Photographs, videos and folders as patches and grids: files in, `Media` out.

Names are imported when they are first used, as those of `vitgraph.graphs`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitgraph.graphs.media.loader import Media, MediaLoader
    from vitgraph.graphs.media.ray_data import EncodeFiles

__all__ = ["EncodeFiles", "Media", "MediaLoader"]

_MODULES = {"EncodeFiles": "ray_data", "Media": "loader", "MediaLoader": "loader"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
