"""The encoder against transformers, on real photographs and on grids at the edges."""

from pathlib import Path

import pytest
import torch

from vitgraph.bench.exactness import relative_error
from vitgraph.encoder import Qwen3VLVisionEncoder, VisionConfig
from vitgraph.encoder.sharing import why_not_shareable
from vitgraph.graphs.media import MediaLoader

PHOTOS = sorted((Path(__file__).parents[1] / "graphs" / "cli" / "photos").glob("*.jpg"))

GRIDS = {
    "square": [(1, 16, 16)],
    "published_336": [(1, 20, 20)],
    "thinnest": [(1, 2, 196)],
    "single_token": [(1, 2, 2)],
    "full_hd": [(1, 68, 120)],
    "video": [(3, 24, 40)],
    "longer_video": [(8, 16, 24)],
    "same_total_one_item": [(1, 16, 32)],
    "same_total_two_items": [(1, 16, 16), (1, 16, 16)],
    "mixed_pack": [(1, 14, 20), (2, 4, 6), (1, 2, 196), (1, 30, 42), (1, 2, 2)],
}


@pytest.mark.parametrize("name", [name for name in GRIDS if name != "full_hd"])
def test_equals_transformers_in_float32(name, reference, encoder, tools) -> None:
    grids = GRIDS[name]
    pixels = torch.randn(tools.patches_of(grids), 1536)
    truth = tools.reference_rows(reference, pixels, grids)
    assert relative_error(encoder(pixels, grids), truth) < 1e-4


@pytest.mark.parametrize("photo", PHOTOS, ids=lambda path: path.stem)
def test_equals_transformers_on_photographs(photo, reference, encoder, tools) -> None:
    media = MediaLoader().image(photo)
    truth = tools.reference_rows(reference, media.pixel_values, [media.grid])
    assert relative_error(encoder(media.pixel_values, [media.grid]), truth) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["published_336", "thinnest", "video", "mixed_pack"])
def test_half_precision_error_is_transformers_own(name, dtype, reference, tools) -> None:
    grids = GRIDS[name]
    pixels = torch.randn(tools.patches_of(grids), 1536)
    truth = tools.reference_rows(reference, pixels, grids)
    half = tools.make_reference().to(dtype)
    ours = Qwen3VLVisionEncoder.from_transformers(half)(pixels, grids)
    theirs = tools.reference_rows(half, pixels, grids)
    assert relative_error(ours, truth) <= 1.1 * relative_error(theirs, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["published_336", "thinnest", "full_hd", "longer_video"])
def test_half_precision_error_is_transformers_own_at_full_size(name, dtype, tools) -> None:
    grids = GRIDS[name]
    reference = tools.make_reference(
        "cuda", depth=27, out_hidden_size=4096, deepstack_visual_indexes=[8, 16, 24]
    )
    pixels = torch.randn(tools.patches_of(grids), 1536, device="cuda")
    truth = tools.reference_rows(reference, pixels, grids)
    half = reference.to(dtype)
    ours = Qwen3VLVisionEncoder.from_transformers(half)(pixels, grids)
    theirs = tools.reference_rows(half, pixels, grids)
    assert relative_error(ours, truth) <= 1.1 * relative_error(theirs, truth)


def test_frames_do_not_attend_to_each_other(encoder) -> None:
    grids, patches = [(4, 24, 40)], 24 * 40
    pixels = torch.randn(4 * patches, 1536)
    changed = pixels.clone()
    changed[3 * patches :] = torch.randn(patches, 1536)
    tokens = 3 * patches // 4
    assert torch.equal(encoder(pixels, grids)[:tokens], encoder(changed, grids)[:tokens])


def test_nan_stays_in_its_item(encoder) -> None:
    grids = [(1, 8, 8), (1, 4, 6), (1, 8, 8)]
    pixels = torch.randn(64 + 24 + 64, 1536)
    clean = encoder(pixels, grids)
    pixels[64 : 64 + 24] = float("nan")
    poisoned = encoder(pixels, grids)
    assert torch.equal(poisoned[:16], clean[:16])
    assert torch.equal(poisoned[22:], clean[22:])
    assert poisoned[16:22].isnan().all()


def test_random_is_seeded(encoder) -> None:
    one = Qwen3VLVisionEncoder.random(encoder.config, seed=3)
    other = Qwen3VLVisionEncoder.random(encoder.config, seed=3)
    third = Qwen3VLVisionEncoder.random(encoder.config, seed=4)
    assert torch.equal(one.merger.linear_fc1.weight, other.merger.linear_fc1.weight)
    assert not torch.equal(one.merger.linear_fc1.weight, third.merger.linear_fc1.weight)


def test_from_transformers_shares_the_weights(tools) -> None:
    reference = tools.make_reference()
    encoder = Qwen3VLVisionEncoder.from_transformers(reference)
    theirs = dict(reference.named_parameters())
    for name, parameter in encoder.named_parameters():
        assert parameter.data_ptr() == theirs[name].data_ptr(), name


def test_no_items_give_no_tokens(encoder) -> None:
    assert encoder(torch.empty(0, 1536), []).shape == (0, encoder.config.output_width)


def test_choices_follow_the_parameters(tools, reference) -> None:
    """A module may be moved or converted like any other."""
    encoder = Qwen3VLVisionEncoder.from_transformers(tools.make_reference()).double().float()
    assert encoder.pixel_dtype == torch.float32
    assert encoder.frequencies.dtype == torch.float32
    pixels = torch.randn(16, 1536)
    truth = tools.reference_rows(reference, pixels, [(1, 4, 4)])
    assert relative_error(encoder(pixels, [(1, 4, 4)]), truth) < 1e-4
    half = encoder.bfloat16()
    assert half.pixel_dtype == torch.bfloat16 and half.frequencies.dtype == torch.float32
    assert half(pixels, [(1, 4, 4)]).dtype == torch.bfloat16
    once = half(pixels, [(1, 4, 4)])
    again = half.to(torch.bfloat16).bfloat16()
    assert again.frequencies.dtype == torch.float32
    assert torch.equal(again(pixels, [(1, 4, 4)]), once)


def test_norms_may_be_kept_in_float32(tools, reference) -> None:
    tower = tools.make_reference().bfloat16()
    for module in tower.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.float()
    assert why_not_shareable(tower, VisionConfig.from_dict(tower.config.to_dict())) is None
    encoder, pixels = Qwen3VLVisionEncoder.from_transformers(tower), torch.randn(16, 1536)
    truth = tools.reference_rows(reference, pixels, [(1, 4, 4)])
    assert relative_error(encoder(pixels, [(1, 4, 4)]).float(), truth) < 2e-2


def test_weights_may_be_dropped_and_loaded_again(tools, reference) -> None:
    encoder = Qwen3VLVisionEncoder.from_transformers(tools.make_reference())
    pixels, weights = torch.randn(16, 1536), encoder.state_dict()
    expected = encoder(pixels, [(1, 4, 4)])
    encoder.to("meta").to_empty(device="cpu").load_state_dict(weights)
    assert torch.equal(encoder(pixels, [(1, 4, 4)]), expected)


@pytest.mark.gpu
def test_moved_to_a_gpu_it_runs_there_on_triton(tools, reference) -> None:
    encoder = Qwen3VLVisionEncoder.from_transformers(tools.make_reference())
    assert (encoder.ops.name, encoder.attention) == ("torch", "sdpa")
    encoder.cuda()
    assert (encoder.ops.name, encoder.attention) == ("triton", "triton")
    pixels = torch.randn(16, 1536)
    truth = tools.reference_rows(reference, pixels, [(1, 4, 4)])
    assert relative_error(encoder(pixels, [(1, 4, 4)]).cpu(), truth) < 1e-4


def test_a_move_to_where_it_is_changes_nothing(encoder, batch) -> None:
    """A captured graph still serves, and what was calibrated stays."""
    frequencies, plan = encoder.frequencies, encoder.plan
    encoder.to(encoder.device).to(encoder.dtype)
    assert encoder.frequencies is frequencies and encoder.plan is plan
