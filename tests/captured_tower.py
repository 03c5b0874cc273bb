"""A tiny encoder on each device, and a manager that captured it: for the tests of captures."""

import copy

import pytest
import torch

from vitgraph.bench.exactness import relative_error
from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BUDGETS = CompilationConfig(True, (16, 64, 256), 8)


@pytest.fixture(params=DEVICES)
def tower(request, reference) -> Qwen3VLVisionEncoder:
    """An encoder of its own, on each device; half precision on the GPU."""
    model = copy.deepcopy(reference).to(request.param)
    model = model.bfloat16() if request.param == "cuda" else model
    return Qwen3VLVisionEncoder.from_transformers(model)


@pytest.fixture
def make_batch(tower, batch):
    return lambda grids: batch(grids, device=tower.device, dtype=tower.dtype)


def captured(tower, **options) -> EncoderCudaGraphManager:
    manager = EncoderCudaGraphManager(tower, BUDGETS, **options)
    manager.capture()
    return manager


def close(output: torch.Tensor, expected: torch.Tensor) -> bool:
    bound = 1e-5 if output.dtype == torch.float32 else 3e-2
    return relative_error(output, expected) <= bound
