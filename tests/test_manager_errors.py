"""What a manager refuses, in a few words, and that it serves on."""

import pytest
import torch

from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder, VisionConfig
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager


@pytest.fixture(scope="module")
def manager(encoder) -> EncoderCudaGraphManager:
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (8, 16, 64), 8, 16))
    manager.capture()
    return manager


def test_mistakes_leave_the_manager_usable(manager, encoder, batch) -> None:
    good = batch([(1, 4, 4)])
    bad_batches = {
        "got ['pixel_values']": {"pixel_values": good["pixel_values"]},
        "a batch has": good | {"pixel_values_videos": good["pixel_values"]},
        "item 0 with grid (1, 4, 8) needs rows 0..31": good | {"image_grid_thw": [(1, 4, 8)]},
        "item 0: h 3 and w 4": good | {"image_grid_thw": [(1, 3, 4)]},
    }
    before = manager.get_cumulative_stats()
    for message, mm_kwargs in bad_batches.items():
        with pytest.raises(ValueError) as error:
            manager.execute(mm_kwargs)
        assert message in str(error.value)
    assert manager.get_cumulative_stats() == before
    expected = encoder(good["pixel_values"], [(1, 4, 4)])
    torch.testing.assert_close(manager.execute(good)[0], expected, rtol=1e-5, atol=1e-5)


WRONG = {
    "a_tuple": lambda good: tuple(good.values()),
    "none": lambda good: None,
    "nested": lambda good: (
        good | {"pixel_values": torch.nested.nested_tensor([good["pixel_values"]])}
    ),
    "no_grids": lambda good: good | {"image_grid_thw": None},
    "swapped": lambda good: {
        "pixel_values": torch.tensor(good["image_grid_thw"]),
        "image_grid_thw": good["pixel_values"],
    },
    "swapped_arrays": lambda good: good | {"image_grid_thw": good["pixel_values"].numpy()},
    "swapped_lists": lambda good: good | {"image_grid_thw": good["pixel_values"].tolist()},
    "nested_grids": lambda good: (
        good | {"image_grid_thw": torch.nested.nested_tensor([torch.tensor([1, 4, 4])])}
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_batch_is_said_in_a_few_words(name, manager, batch) -> None:
    """KNOWN_FAILURES 40."""
    with pytest.raises(ValueError) as error:
        manager.execute(WRONG[name](batch([(1, 4, 4)])))
    assert any(word in str(error.value) for word in ("batch", "pixel_values", "grid"))
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("channels", [1, 6])
def test_bytes_have_three_channels(channels, tools) -> None:
    """KNOWN_FAILURES 40."""
    config = VisionConfig.from_dict(tools.tiny | {"in_channels": channels})
    encoder = Qwen3VLVisionEncoder.random(config)
    pixels = torch.zeros(16, config.patch_width, dtype=torch.uint8)
    message = f"uint8 pixels need in_channels 3, this encoder has {channels}"
    for use in (
        lambda: encoder(pixels, [(1, 4, 4)]),
        lambda: EncoderCudaGraphManager(encoder).execute(
            {"pixel_values": pixels, "image_grid_thw": [(1, 4, 4)]}
        ),
        lambda: Qwen3VLVisionEncoder(config, pixel_dtype=torch.uint8),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    assert encoder(pixels.float(), [(1, 4, 4)]).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int32}, "dtype torch.int32 is not the model's, torch.float32"),
        ({"device": "meta"}, "device meta is not the model's, cpu"),
        ({"config": {"cudagraph_mm_encoder": True}}, "config is a dict, no CompilationConfig"),
    ],
)
def test_what_contradicts_the_model_is_refused(options, message, encoder) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderCudaGraphManager(encoder, **options)


@pytest.mark.gpu
def test_a_backend_that_reads_lengths_cannot_be_captured() -> None:
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"], device="cuda", attention="sdpa")
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64,), 4))
    with pytest.raises(ValueError, match="'sdpa' reads sequence lengths on the host"):
        manager.capture()
    assert not manager.is_captured()
