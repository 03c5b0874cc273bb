"""A served tower whose weights change, move or are trained."""

import gc
import importlib.util
import threading
import warnings
from pathlib import Path

import pytest
import torch

from vitgraph.bench.exactness import relative_error
from vitgraph.graphs import CompilationConfig, replace_vision_tower, restore_vision_tower

_SPEC = importlib.util.spec_from_file_location(
    "tiny_model", Path(__file__).with_name("tiny_model.py")
)
tiny_model = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiny_model)
make, inputs = tiny_model.make, tiny_model.inputs

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
