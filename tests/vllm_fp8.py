"""The plugin's FP8 option inside a real vLLM release. vllm_releases.py runs it."""

import logging

import pytest
import torch
from vllm_harness import make_batch, truth

from vitgraph.bench.exactness import relative_error
from vitgraph.graphs.linears import FP8_SKIP_BLOCKS, LINEAR_DTYPE
from vitgraph.graphs.vllm_plugin import report

GRIDS = [(1, 4, 4), (1, 16, 16)]


@pytest.fixture(autouse=True)
def _log(caplog) -> None:
    caplog.set_level(logging.INFO, logger="vllm.plugins.vitgraph")


def outputs(model, manager) -> list[torch.Tensor]:
    """Eagerly, and through vLLM's graph manager."""
    batch = make_batch(GRIDS)
    eager = model.visual(batch["pixel_values"], GRIDS)
    return [eager, torch.cat(manager.execute(batch))]


def errors(found, model) -> list[float]:
    """Against vLLM's own tower on the model's weights as they are now."""
    expected = torch.cat(truth(model, make_batch(GRIDS)["pixel_values"], GRIDS))
    return [relative_error(rows, expected) for rows in found]


def test_layers_in_fp8(make_model, make_manager, monkeypatch, caplog) -> None:
    """Further from vLLM's tower the more blocks have them (attention is sharp here, and amplifies
    it), and as far in graphs as eagerly."""
    monkeypatch.setenv(LINEAR_DTYPE, "fp8")
    every = make_model()
    assert "graphs on, fp8, 1 rank" in caplog.text
    monkeypatch.setenv(FP8_SKIP_BLOCKS, "3")
    last = make_model()
    assert "graphs on, fp8 (first 3 blocks in float32), 1 rank" in caplog.text
    (of_every, graphs_of_every), (of_last, graphs_of_last) = (
        errors(outputs(model, make_manager(model)), model) for model in (every, last)
    )
    print(f"4 blocks: {of_every:.3f}, the last: {of_last:.3f}")
    assert graphs_of_every == pytest.approx(of_every, rel=1e-3)
    assert graphs_of_last == pytest.approx(of_last, rel=1e-3)
    assert 1e-2 < of_last < 0.1 and 3 * of_last < of_every < 1


def test_weights_updated_in_place_are_quantised_anew(make_model, make_manager, monkeypatch) -> None:
    """As vLLM's loader writes them into a tower that serves: through `.data`."""
    monkeypatch.setenv(LINEAR_DTYPE, "fp8")
    monkeypatch.setenv(FP8_SKIP_BLOCKS, "3")
    model = make_model()
    manager = make_manager(model)
    before = outputs(model, manager)
    for layer in (model.visual.blocks[3].attn.qkv, model.visual.blocks[3].mlp.linear_fc2):
        layer.weight.data.copy_(layer.weight.data.flip(0))
    after = outputs(model, manager)
    assert max(errors(after, model)) < 0.1 < 0.3 < min(errors(before, model))


def test_what_cannot_be_had_is_named(make_model, monkeypatch, caplog) -> None:
    """Our tower serves in its own dtype."""
    monkeypatch.setenv(LINEAR_DTYPE, "int4")
    model = make_model()
    assert model.vitgraph is not None and not model.vitgraph.encoder.fp8_blocks
    said = "no FP8, the layers keep the tower's dtype: VITGRAPH_LINEAR_DTYPE=int4: linear_dtype"
    assert f"{said} 'int4' is none of same, fp8" in caplog.text
    assert "graphs on, 1 rank" in caplog.text


def test_doctor_says_it(monkeypatch) -> None:
    monkeypatch.setattr(report, "why_not_loaded", lambda: None)
    monkeypatch.setenv(LINEAR_DTYPE, "fp8")
    assert report.report()["layers"] == "fp8"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "batch_invariant has linear_dtype 'same'" in report.report()["layers"]
