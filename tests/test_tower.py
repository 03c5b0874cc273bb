"""transformers users: same generation before and after, and the tower comes back."""

import copy
import importlib.util
import io
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from vitgraph.bench.exactness import relative_error
from vitgraph.graphs import CompilationConfig, replace_vision_tower, restore_vision_tower
from vitgraph.graphs.tower import VisionTower

_SPEC = importlib.util.spec_from_file_location(
    "tiny_model", Path(__file__).with_name("tiny_model.py")
)
tiny_model = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiny_model)
make, inputs = tiny_model.make, tiny_model.inputs

CASES = [
    ("cpu", torch.float32),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "dtype"), CASES)
@pytest.mark.parametrize("video", [False, True], ids=["images", "video"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_same_generation(kind, video, device, dtype, tools) -> None:
    model = make(kind, tools.tiny, device).to(dtype)
    prompt = inputs(device, dtype, video=video)
    own_tower, names = model.model.visual, set(model.state_dict())
    own_class = type(own_tower)
    with torch.no_grad():
        logits = model(**prompt).logits
    generated = model.generate(**prompt, max_new_tokens=8, do_sample=False)

    manager = replace_vision_tower(model, CompilationConfig(True, (64, 128), 8))
    with torch.no_grad():
        after = model(**prompt).logits
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    assert relative_error(after[0], logits[0]) <= tolerance
    if dtype == torch.float32:
        again = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        assert torch.equal(again, generated)
    assert manager.get_cumulative_stats()["graph_hits"] > 0

    assert set(model.state_dict()) == names, "what is saved now can be loaded anywhere"
    restore_vision_tower(model)
    assert model.model.visual is own_tower and type(own_tower) is own_class
    assert set(model.state_dict()) == names
    assert torch.equal(model.generate(**prompt, max_new_tokens=8, do_sample=False), generated)


def test_base_models_and_mistakes(tools) -> None:
    model = make("dense", tools.tiny, "cpu").model
    with pytest.raises(ValueError, match="nothing to restore"):
        restore_vision_tower(model)
    replace_vision_tower(model)
    assert isinstance(model.visual, VisionTower)
    with pytest.raises(ValueError, match="serves this tower already"):
        replace_vision_tower(model)
    restore_vision_tower(model)
    with pytest.raises(ValueError, match="Linear has no vision tower of this kind"):
        replace_vision_tower(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("asked", ["keyword", "config", "tuple", "precomputed"])
def test_what_ours_does_not_give_is_transformers_own(asked, tools) -> None:
    """KNOWN_FAILURES 38."""
    model = make("dense", tools.tiny, "cpu")
    prompt = inputs("cpu", torch.float32)
    visual, arguments = model.model.visual, (prompt["pixel_values"], prompt["image_grid_thw"])
    keywords = {
        "keyword": {"output_hidden_states": True},
        "config": {},
        "tuple": {"return_dict": False},
        "precomputed": {"position_ids": torch.zeros(2, 56, dtype=torch.int64).T},
    }[asked]
    visual.config.output_hidden_states = asked == "config"
    with torch.no_grad():
        expected = visual(*arguments, **keywords)
        replace_vision_tower(model)  # transformers' recording hooks are no hindrance
        with pytest.warns(UserWarning, match="transformers' own vision tower runs where"):
            found = visual(*arguments, **keywords)
    if asked == "tuple":
        assert len(found) == len(expected) == 3
        assert torch.equal(found[0], expected[0])
    else:
        assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
    if asked in ("keyword", "config"):
        assert len(found.hidden_states) == len(expected.hidden_states) == 5
        assert all(map(torch.equal, found.hidden_states, expected.hidden_states))


def test_a_served_model_is_pickled_under_transformers_names(tools, tmp_path) -> None:
    """KNOWN_FAILURES 39."""
    model = make("dense", tools.tiny, "cpu")
    prompt = inputs("cpu", torch.float32)
    own = type(model.model.visual)
    replace_vision_tower(model)
    with torch.no_grad():
        logits = model(**prompt).logits
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded.model.visual) is own and not hasattr(loaded.model.visual, "vitgraph")
    with torch.no_grad():
        assert relative_error(loaded(**prompt).logits[0], logits[0]) <= 1e-4
    model.model.visual.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == ["Qwen3VLVisionModel"]


def test_the_tower_is_found_in_what_wraps_the_model(tools) -> None:
    """KNOWN_FAILURES 38."""
    prompt = inputs("cpu", torch.float32)

    class Wrapper(torch.nn.Module):  # as DistributedDataParallel and peft do it
        def __init__(self, module) -> None:
            super().__init__()
            self.module = module

    for wrap in (Wrapper, lambda model: model.model.visual):
        model = make("dense", tools.tiny, "cpu")
        outer = wrap(model)
        manager = replace_vision_tower(outer)
        with torch.no_grad():
            model(**prompt)
        assert manager.get_cumulative_stats()["graph_misses"] == 2
        restore_vision_tower(outer)
        assert not isinstance(model.model.visual, VisionTower)
    both = torch.nn.ModuleList([make("dense", tools.tiny, "cpu") for _ in range(2)])
    with pytest.raises(ValueError, match="has 2 vision towers"):
        replace_vision_tower(both)


def test_save_and_copy_while_served(tools, tmp_path) -> None:
    model = make("dense", tools.tiny, "cpu")
    prompt = inputs("cpu", torch.float32)
    replace_vision_tower(model)
    with torch.no_grad():
        logits = model(**prompt).logits
    model.save_pretrained(tmp_path)
    for other in (
        Qwen3VLForConditionalGeneration.from_pretrained(tmp_path),
        copy.deepcopy(model),
    ):
        with torch.no_grad():
            again = other.eval()(**prompt).logits
        assert relative_error(again[0], logits[0]) <= 1e-4


def test_what_is_more_than_a_tower_is_refused(tools) -> None:
    """An adapter, a hook or a wrapper would be left out without a word."""
    model = make("dense", tools.tiny, "cpu")
    visual = model.model.visual
    visual.forward = visual.forward  # as accelerate's hooks do it
    with pytest.raises(ValueError, match="the tower has a forward of its own"):
        replace_vision_tower(model)
    del visual.forward

    class Adapter(torch.nn.Module):
        def __init__(self, layer) -> None:
            super().__init__()
            self.layer = layer

    visual.blocks[0].attn.proj.half()
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.proj\.weight has dtype torch\.float16"):
        replace_vision_tower(model)
    visual.blocks[0].attn.proj.float()
    bias, visual.blocks[0].mlp.linear_fc1.bias = visual.blocks[0].mlp.linear_fc1.bias, None
    with pytest.raises(ValueError, match=r"parameters differ in blocks\.0\.mlp\.linear_fc1\.bias"):
        replace_vision_tower(model)
    visual.blocks[0].mlp.linear_fc1.bias = bias
    visual.blocks[1].attn.proj = Adapter(visual.blocks[1].attn.proj)
    with pytest.raises(ValueError, match=r"blocks\.1\.attn\.proj is a .*Adapter"):
        replace_vision_tower(model)


def test_norms_keep_their_eps(tools) -> None:
    model = make("dense", tools.tiny, "cpu")
    model.model.visual.blocks[0].norm1.eps = 0.5
    pixels, grid = torch.randn(16, 1536), torch.tensor([[1, 4, 4]])
    expected = model.model.visual(pixels, grid).pooler_output
    replace_vision_tower(model)
    torch.testing.assert_close(model.model.visual(pixels, grid).pooler_output, expected)


def test_no_images(tools) -> None:
    model = make("dense", tools.tiny, "cpu").bfloat16()
    replace_vision_tower(model)
    output = model.model.visual(torch.empty(0, 1536), torch.empty(0, 3, dtype=torch.int64))
    assert output.pooler_output.shape == (0, tools.tiny["out_hidden_size"])
    assert output.pooler_output.dtype == torch.bfloat16
