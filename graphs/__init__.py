"""Budgets, packing, capture and replay for vision encoders."""

from vitgraph.graphs.capture import BudgetGraphMetadata
from vitgraph.graphs.config import CompilationConfig
from vitgraph.graphs.data_parallel import DataParallelEncoder
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.graphs.metrics import EncoderMetrics
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
