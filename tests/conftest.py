"""Shared fixtures: a tiny tower in transformers and in vitgraph, with the same weights."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Must be set before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

TINY = dict(
    depth=4,
    hidden_size=144,
    intermediate_size=304,
    num_heads=2,
    out_hidden_size=128,
    deepstack_visual_indexes=[0, 1, 2],
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA GPU"))


def make_reference(device: str = "cpu", **geometry) -> torch.nn.Module:
    """transformers' tower with every parameter random, biases and norms included."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3VLVisionModel(Qwen3VLVisionConfig(**(geometry or TINY))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.05)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model


def reference_rows(model: torch.nn.Module, pixels: torch.Tensor, grids) -> torch.Tensor:
    """transformers' output in vitgraph's form: merger and levels side by side."""
    with torch.no_grad():
        output = model(
            pixels.to(model.dtype), torch.tensor(grids, dtype=torch.int64, device=pixels.device)
        )
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)


def patches_of(grids) -> int:
    """Pixel rows of a batch."""
    return sum(t * h * w for t, h, w in grids)


@pytest.fixture(scope="session")
def reference() -> torch.nn.Module:
    """transformers' tiny tower, float32, CPU."""
    return make_reference()


@pytest.fixture(scope="session")
def tools():
    """The helpers above, for tests that cannot import this file under importlib mode."""
    from types import SimpleNamespace

    return SimpleNamespace(
        make_reference=make_reference,
        reference_rows=reference_rows,
        patches_of=patches_of,
        tiny=TINY,
    )


@pytest.fixture(scope="session")
def encoder(reference):
    """Our tiny tower with the reference's weights."""
    from vitgraph.encoder import Qwen3VLVisionEncoder

    return Qwen3VLVisionEncoder.from_transformers(reference)


@pytest.fixture
def batch():
    """Random pixels for grids, fresh each call."""

    def make(grids, *, device="cpu", dtype=torch.float32) -> dict:
        pixels = torch.randn(patches_of(grids), 1536, device=device).to(dtype)
        return {"pixel_values": pixels, "image_grid_thw": grids}

    return make
