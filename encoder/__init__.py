"""The Qwen3-VL vision encoder: configuration, weights, attention dispatch, forward pass."""

from vitgraph.encoder.config import GEOMETRIES, VisionConfig
from vitgraph.encoder.embeddings import split_embeddings
from vitgraph.encoder.model import Qwen3VLVisionEncoder

__all__ = ["GEOMETRIES", "Qwen3VLVisionEncoder", "VisionConfig", "split_embeddings"]
