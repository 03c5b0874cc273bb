"""Weights and modules that change under captured graphs: followed, or refused by name."""

import copy
import gc
import importlib.util
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.graphs import EncoderCudaGraphManager

_SPEC = importlib.util.spec_from_file_location(
    "captured_tower", Path(__file__).with_name("captured_tower.py")
)
captured_tower = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(captured_tower)
captured, close = captured_tower.captured, captured_tower.close
tower, make_batch = captured_tower.tower, captured_tower.make_batch

MOVES = {
    "assigned": lambda tower: setattr(
        tower.merger.norm, "bias", torch.nn.Parameter(tower.merger.norm.bias.clone(), False)
    ),
    "data": lambda tower: setattr(
        tower.merger.norm.bias, "data", tower.merger.norm.bias.data.clone()
    ),
    "loaded": lambda tower: tower.load_state_dict(
        {name: tensor.clone() for name, tensor in tower.state_dict().items()}, assign=True
    ),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moved_weights_raise_and_a_new_capture_serves(move, tower, make_batch) -> None:
    """KNOWN_FAILURES 26."""
    manager = captured(tower)
    mm_kwargs = make_batch([(1, 4, 4)])
    before = manager.execute(mm_kwargs)[0]
    move(tower)
    with pytest.raises(RuntimeError, match=r"weights moved since capture, \S+ among them"):
        manager.execute(mm_kwargs)
    manager.capture()
    assert close(manager.execute(mm_kwargs)[0], before)  # calibration may choose anew


def test_what_graphs_read_stays_allocated_until_they_go(tower, make_batch) -> None:
    """KNOWN_FAILURES 26: a replay is under way while addresses are looked at."""
    manager = captured(tower)
    weight = StorageWeakRef(tower.merger.norm.bias.untyped_storage())
    MOVES["data"](tower)
    gc.collect()
    assert not weight.expired()
    with pytest.raises(RuntimeError, match="weights moved since capture"):
        manager.execute(make_batch([(1, 4, 4)]))
    manager.clear()
    assert weight.expired()


def counting(reference, monkeypatch) -> tuple[EncoderCudaGraphManager, list[int]]:
    """As on a GPU, with graphs that only count."""
    manager = captured(Qwen3VLVisionEncoder.from_transformers(copy.deepcopy(reference)))
    launched: list[int] = []
    for budget, graph in manager.budget_graphs.items():
        graph.graph = SimpleNamespace(replay=partial(launched.append, budget))
        graph.output_buffer = torch.zeros(budget, manager.model.config.output_width)
    monkeypatch.setattr(manager._graphs, "on_gpu", True)
    return manager, launched


def test_the_replay_starts_before_modules_are_looked_at(reference, batch, monkeypatch) -> None:
    """What was launched in vain is not handed out."""
    manager, launched = counting(reference, monkeypatch)
    manager.execute(batch([(1, 4, 4)]))
    counted = manager.get_cumulative_stats()
    manager.model.module.blocks[0].mlp.register_forward_hook(print)
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp has 1 forward hook, which would be left"):
        manager.execute(batch([(1, 4, 4)]))
    assert launched == [16, 16] and manager.get_cumulative_stats() == counted


def test_modules_are_looked_at_before_a_forward_that_would_stumble(
    reference, batch, monkeypatch
) -> None:
    """Beside an item that runs eagerly: the message is about the weight, and nothing ran."""
    manager, launched = counting(reference, monkeypatch)
    del manager.model.module.merger.norm.bias
    with pytest.raises(RuntimeError, match=r"1 of \d+ weights moved since capture, merger\.norm"):
        manager.execute(batch([(1, 4, 4), (1, 40, 40)]))
    assert launched == []


def test_moved_weights_may_run_eagerly(tower, make_batch) -> None:
    manager = captured(tower)
    MOVES["data"](tower)
    manager.clear()
    mm_kwargs = make_batch([(1, 4, 4)])
    expected = tower(mm_kwargs["pixel_values"], mm_kwargs["image_grid_thw"])
    assert close(manager.execute(mm_kwargs)[0], expected)


def test_weights_updated_in_place_are_seen(tower, make_batch) -> None:
    manager = captured(tower)
    mm_kwargs = make_batch([(1, 4, 4)])
    before = manager.execute(mm_kwargs)[0]
    with torch.no_grad():
        tower.merger.linear_fc2.bias.add_(8)
    after = manager.execute(mm_kwargs)[0]
    width = tower.config.out_hidden_size
    assert close(after[:, :width], before[:, :width] + 8)


REPLACEMENTS = {
    "submodule": lambda tower: setattr(
        tower.merger, "linear_fc2", copy.deepcopy(tower.merger.linear_fc2)
    ),
    "block": lambda tower: tower.blocks.__setitem__(0, copy.deepcopy(tower.blocks[0])),
    "deleted": lambda tower: delattr(tower.merger.norm, "bias"),
    "none": lambda tower: setattr(tower.merger.norm, "bias", None),
}


@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_replaced_modules_raise(replace, tower, make_batch) -> None:
    manager = captured(tower)
    replace(tower)
    with pytest.raises(RuntimeError, match=r"(weights moved|was changed) since capture"):
        manager.execute(make_batch([(1, 4, 4)]))


def test_another_dtype_is_captured_anew(reference, batch) -> None:
    tower = Qwen3VLVisionEncoder.from_transformers(copy.deepcopy(reference))
    manager = captured(tower)
    tower.bfloat16()
    with pytest.raises(RuntimeError, match="moved since capture"):
        manager.execute(batch([(1, 4, 4)]))
    manager.capture()
    mm_kwargs = batch([(1, 4, 4)])
    output = manager.execute(mm_kwargs)[0]
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, tower(mm_kwargs["pixel_values"], mm_kwargs["image_grid_thw"]))
