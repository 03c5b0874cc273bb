"""transformers users: same generation before and after, and the tower comes back."""

import copy
import gc
import io
import json
import threading
import warnings

import pytest
import torch
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from vitgraph.bench.exactness import relative_error
from vitgraph.graphs import CompilationConfig, replace_vision_tower, restore_vision_tower
from vitgraph.graphs.tower import VisionTower

IMAGE, VIDEO, START, END = 60, 61, 62, 63
TEXT = dict(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1)


def make(kind: str, vision: dict, device: str) -> torch.nn.Module:
    tokens = dict(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(1)
    if kind == "dense":
        config = Qwen3VLConfig(text_config=TEXT, vision_config=vision, **tokens)
        model = Qwen3VLForConditionalGeneration(config)
    else:
        config = Qwen3VLMoeConfig(text_config=TEXT | MOE, vision_config=vision, **tokens)
        model = Qwen3VLMoeForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            parameter.normal_(std=0.1)
    return model.eval().to(device)


def inputs(device: str, dtype: torch.dtype, *, video: bool = False) -> dict:
    grids = torch.tensor([[1, 4, 6], [1, 8, 4]])
    tokens = [1, START, *[IMAGE] * 6, END, 2, START, *[IMAGE] * 8, END, 3]
    pixels = torch.randn(56, 1536)
    if video:
        grids = torch.tensor([[2, 4, 4]])
        tokens = [1, START, *[VIDEO] * 4, END, START, *[VIDEO] * 4, END, 3]
        pixels = torch.randn(32, 1536)
    ids = torch.tensor([tokens])
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    names = (
        ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
    )
    values = {
        "input_ids": ids,
        "mm_token_type_ids": kinds,
        names[0]: pixels.to(dtype),
        names[1]: grids,
    }
    return {name: value.to(device) for name, value in values.items()}


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


CHANGES = {
    "in_place": lambda p: p.data.mul_(1.5),
    "data": lambda p: setattr(p, "data", p.data * 1.5),
}


@pytest.mark.parametrize("change", [*CHANGES, "assigned", "converted"])
def test_changed_weights_are_followed(change, tools) -> None:
    model = make("dense", tools.tiny, "cpu")
    prompt = inputs("cpu", torch.float32)
    replace_vision_tower(model)
    visual = model.model.visual
    if change in CHANGES:
        for parameter in visual.parameters():
            CHANGES[change](parameter)
    elif change == "assigned":
        scaled = {name: 1.5 * tensor for name, tensor in model.state_dict().items()}
        model.load_state_dict(scaled, assign=True)
    else:
        model.to(torch.float64)
        prompt["pixel_values"] = prompt["pixel_values"].double()
    served = model.model.get_image_features(prompt["pixel_values"], prompt["image_grid_thw"])
    restore_vision_tower(model)
    own = model.model.get_image_features(prompt["pixel_values"], prompt["image_grid_thw"])
    ours, theirs = torch.cat(served.pooler_output), torch.cat(own.pooler_output)
    assert ours.dtype == theirs.dtype
    assert relative_error(ours, theirs) <= 1e-4


def test_an_adapter_that_comes_later_is_refused(tools) -> None:
    """Its weights have the names that the layer's had: they would be used, and it left out."""
    model = make("dense", tools.tiny, "cpu")
    prompt = inputs("cpu", torch.float32)
    features = (prompt["pixel_values"], prompt["image_grid_thw"])
    replace_vision_tower(model)
    mlp = model.model.visual.blocks[0].mlp

    class Adapter(torch.nn.Linear):
        pass

    own, mlp.linear_fc1 = mlp.linear_fc1, Adapter(2, 2)
    mlp.linear_fc1.weight, mlp.linear_fc1.bias = own.weight, own.bias
    with pytest.raises(
        ValueError, match=r"blocks\.0\.mlp\.linear_fc1 is a .*Adapter, which would be left out"
    ):
        model.model.get_image_features(*features)
    mlp.linear_fc1 = own
    model.model.get_image_features(*features)


def test_graphs_refuse_weights_that_moved(tools) -> None:
    model = make("dense", tools.tiny, "cpu")
    prompt = inputs("cpu", torch.float32)
    manager = replace_vision_tower(model, CompilationConfig(True, (64,), 8))
    features = (prompt["pixel_values"], prompt["image_grid_thw"])
    before = torch.cat(model.model.get_image_features(*features).pooler_output)
    CHANGES["data"](next(model.model.visual.parameters()))
    with pytest.raises(RuntimeError, match="weights moved since capture"):
        model.model.get_image_features(*features)
    manager.capture()
    assert not torch.equal(
        torch.cat(model.model.get_image_features(*features).pooler_output), before
    )


def test_a_capture_takes_the_weights_of_now(tools) -> None:
    """Moved, or assigned, and captured again before the tower has run."""
    model = make("dense", tools.tiny, "cpu")
    prompt = inputs("cpu", torch.float32)
    manager = replace_vision_tower(model, CompilationConfig(True, (64,), 8))
    features = (prompt["pixel_values"], prompt["image_grid_thw"])
    scaled = {name: 1.5 * tensor for name, tensor in model.state_dict().items()}
    model.load_state_dict(scaled, assign=True)
    batch = dict(zip(("pixel_values", "image_grid_thw"), features, strict=True))
    with pytest.raises(RuntimeError, match="weights moved since capture"):
        manager.execute(batch)
    manager.capture()
    served = torch.cat(manager.execute(batch))
    restore_vision_tower(model)
    own = torch.cat(model.model.get_image_features(*features).pooler_output)
    torch.testing.assert_close(served[:, : own.shape[1]], own, rtol=1e-4, atol=1e-4)


def test_a_manager_outlives_the_model(tools) -> None:
    model = make("dense", tools.tiny, "cpu")
    prompt = inputs("cpu", torch.float32)
    manager = replace_vision_tower(model, CompilationConfig(True, (64,), 8))
    batch = {name: prompt[name] for name in ("pixel_values", "image_grid_thw")}
    before = torch.cat(manager.execute(batch))
    del model
    gc.collect()
    torch.testing.assert_close(torch.cat(manager.execute(batch)), before)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_gradient_is_warned_of_once(mode, tools) -> None:
    """KNOWN_FAILURES 38: it ends at the tower, whichever part of the model is trained."""
    model = getattr(make("dense", tools.tiny, "cpu"), mode)()
    prompt = inputs("cpu", torch.float32)
    replace_vision_tower(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(**prompt)  # evaluated, with gradients on as by default
        model.model.visual.requires_grad_(False)
        model(**prompt, labels=prompt["input_ids"]).loss.backward()  # nothing is missing
        model.model.visual.requires_grad_(True)
    with pytest.warns(UserWarning, match="no gradient goes through it") as caught:
        for _ in range(2):
            model(**prompt, labels=prompt["input_ids"]).loss.backward()
    assert len([w for w in caught if "vitgraph" in str(w.message)]) == 1
    assert model.model.visual.merger.linear_fc2.weight.grad is None
    assert model.model.language_model.layers[0].mlp.up_proj.weight.grad is not None


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


def test_weights_are_rebound_under_the_lock(tools) -> None:
    """KNOWN_FAILURES 39: another thread is not in the forward meanwhile."""
    model = make("dense", tools.tiny, "cpu")
    prompt = inputs("cpu", torch.float32)
    manager = replace_vision_tower(model)
    batch = {name: prompt[name] for name in ("pixel_values", "image_grid_thw")}
    own, held = manager.model.module.share_weights, []

    def share_weights(tower) -> None:
        thread = threading.Thread(
            target=lambda: held.append(not manager._lock.acquire(blocking=False))
        )
        thread.start()
        thread.join()
        own(tower)

    manager.model.module.share_weights = share_weights
    CHANGES["data"](next(model.model.visual.parameters()))
    manager.execute(batch)
    CHANGES["data"](next(model.model.visual.parameters()))
    manager.config = CompilationConfig(True, (64,), 8)
    manager.capture()
    assert held == [True, True]


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
