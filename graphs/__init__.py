"""Budgets, packing, capture and replay for vision encoders.

Names are imported when they are first used: vLLM imports this package in each of its processes to
find the plugin, which must cost nothing and must not fail.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitgraph.graphs.budgets import BudgetGraphMetadata
    from vitgraph.graphs.config import CompilationConfig
    from vitgraph.graphs.manager import EncoderCudaGraphManager
    from vitgraph.graphs.metrics import EncoderMetrics
    from vitgraph.graphs.parallel.data_parallel import DataParallelEncoder
    from vitgraph.graphs.protocol import SupportsEncoderCudaGraph
    from vitgraph.graphs.tower import replace_vision_tower, restore_vision_tower

__all__ = [
    "BudgetGraphMetadata",
    "CompilationConfig",
    "DataParallelEncoder",
    "EncoderCudaGraphManager",
    "EncoderMetrics",
    "SupportsEncoderCudaGraph",
    "replace_vision_tower",
    "restore_vision_tower",
]

_MODULES = {
    "BudgetGraphMetadata": "budgets",
    "CompilationConfig": "config",
    "DataParallelEncoder": "parallel.data_parallel",
    "EncoderCudaGraphManager": "manager",
    "EncoderMetrics": "metrics",
    "SupportsEncoderCudaGraph": "protocol",
    "replace_vision_tower": "tower",
    "restore_vision_tower": "tower",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
