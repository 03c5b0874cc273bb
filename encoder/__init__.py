"""The vision encoder of Qwen3-VL and its kin: configuration, weights, attention, forward pass."""

from vitgraph.encoder.config import GEOMETRIES, TOWERS, VisionConfig
from vitgraph.encoder.embeddings import split_embeddings
from vitgraph.encoder.model import Qwen3VLVisionEncoder

__all__ = ["GEOMETRIES", "TOWERS", "Qwen3VLVisionEncoder", "VisionConfig", "split_embeddings"]
