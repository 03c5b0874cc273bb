"""What torch sets around an encoder changes nothing (KNOWN_FAILURES 37)."""

import copy

import pytest
import torch
from torch import nn

from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager

GRIDS = [(1, 4, 4)]


@pytest.fixture
def pixels():
    return torch.randn(16, 1536, generator=torch.Generator().manual_seed(0))


def test_meta(encoder, pixels) -> None:
    """KNOWN_FAILURES 37: weights that come later are used, and missed before."""
    later = Qwen3VLVisionEncoder(encoder.config, device="meta")
    for use in (lambda: later(pixels, GRIDS), lambda: EncoderCudaGraphManager(later)):
        with pytest.raises(ValueError, match="is on the meta device: load its weights first"):
            use()
    later.load_state_dict(encoder.state_dict(), assign=True)
    assert torch.equal(later(pixels, GRIDS), encoder(pixels, GRIDS))
    batch = {"pixel_values": pixels, "image_grid_thw": GRIDS}
    rows = EncoderCudaGraphManager(later).execute(batch)[0]
    assert torch.equal(rows, encoder(pixels, GRIDS))


def test_autocast_changes_nothing(encoder, pixels) -> None:
    """KNOWN_FAILURES 37."""
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64,), 4))
    batch = {"pixel_values": pixels, "image_grid_thw": GRIDS}
    manager.capture()
    expected = encoder(pixels, GRIDS)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(encoder(pixels, GRIDS), expected)
        assert torch.equal(manager.execute(batch)[0], expected)
        manager.capture()
        assert torch.equal(manager.execute(batch)[0], expected)


DEFAULTS = ["meta", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("form", ["tensor", "array"])
def test_another_default_device(default, form, encoder, pixels) -> None:
    """KNOWN_FAILURES 37: as vLLM sets one; nothing of ours is made there unasked."""
    encoder = copy.deepcopy(encoder).to("cuda" if default == "cuda" else "cpu")
    expected = encoder(pixels, GRIDS)
    batch = {"pixel_values": pixels, "image_grid_thw": GRIDS}
    if form == "array":
        batch = {"pixel_values": pixels.numpy(), "image_grid_thw": torch.tensor(GRIDS).numpy()}
    with torch.device(default):
        manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64,), 4))
        torch.testing.assert_close(encoder(*batch.values()), expected)
        torch.testing.assert_close(manager.execute(batch)[0], expected)
        manager.capture()
        torch.testing.assert_close(manager.execute(batch)[0], expected)
        assert isinstance(Qwen3VLVisionEncoder.random(encoder.config), nn.Module)


@pytest.mark.gpu
def test_gpu_pixels_for_an_encoder_on_the_cpu(encoder) -> None:
    """KNOWN_FAILURES 37: the copy to the host is waited for."""
    grids = [(1, 64, 64)]
    pixels = torch.randn(4096, 1536)
    expected, there = encoder(pixels, grids), pixels.cuda()
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (1024,), 4))
    manager.capture()
    for _ in range(3):
        torch.cuda._sleep(50_000_000)
        assert torch.equal(encoder(there * 1, grids), expected)
        batch = {"pixel_values": there * 1, "image_grid_thw": grids}
        assert torch.equal(manager.execute(batch)[0], expected)
