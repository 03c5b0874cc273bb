"""The plugin's metrics inside a real vLLM release: what its manager and its `/metrics` say.
vllm_releases.py runs it."""

import os
import subprocess
import sys
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from vllm_harness import BATCHES, MINOR, captured_graphs, make_batch

from vitgraph.graphs.vllm_plugin.metrics import OURS, SHARED
from vitgraph.graphs.vllm_plugin.protocol import detect_shape

# vLLM's API server, as far as metrics go: it imports them, loads plugins, mounts the registry.
API_SERVER = """
import pathlib, sys, vllm_releases
sys.meta_path.append(vllm_releases._AbsentPackages())
from vllm.v1.metrics.prometheus import get_prometheus_registry
from vllm.plugins import load_general_plugins
load_general_plugins()
from prometheus_client import generate_latest
pathlib.Path(sys.argv[1]).write_bytes(generate_latest(get_prometheus_registry()))
"""


@pytest.fixture(params=[OURS, SHARED], ids=["one_api_server", "several_api_servers"])
def folder(request, tmp_path, monkeypatch):
    for name in (OURS, SHARED):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "metrics"
    path.mkdir()
    monkeypatch.setenv(request.param, str(path))
    return path


def counters(folder) -> dict[tuple[str, ...], float]:
    """(family, label) -> value, without those that are zero."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    return samples(registry.collect())


def samples(families) -> dict[tuple[str, ...], float]:
    found = {}
    for family in families:
        if family.name.startswith("vitgraph_encoder_"):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("encoder") == "vision"
                (label,) = labels.values()
                name = family.name.removeprefix("vitgraph_encoder_")
                assert sample.name == f"{family.name}_total"
                found[name, label] = sample.value
    return found


def test_what_vllm_serves(folder, make_model, make_manager, tmp_path) -> None:
    """Hits, misses and replays are those of vLLM's manager, and its `/metrics` has them."""
    model = make_model()
    manager = make_manager(model)
    tokens = 0
    for modality in ("image", "video"):
        for grids in BATCHES.values():
            manager.execute(make_batch(grids, modality))
            sizes = [t * h * w // 4 for t, h, w in grids]
            tokens += sum(size for size in sizes if size <= manager.token_budgets[-1])
    replays = Counter()
    for captured in captured_graphs(manager):
        replays[captured.token_budget] += captured.graph.count
    assert min(replays.values()) > 0
    assert manager.graph_misses > 0

    said = subprocess.run(
        [sys.executable, "-c", API_SERVER, str(tmp_path / "scraped")],
        env=os.environ | {"VLLM_PLUGINS": "vitgraph"},
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    text = (tmp_path / "scraped").read_text()
    found = samples(text_string_to_metric_families(text))
    assert found == counters(folder)
    assert found["items", "graph"] == manager.graph_hits
    assert found["items", "eager"] == manager.graph_misses
    assert found["misses", "too_large"] == manager.graph_misses
    budgets = {label for name, label in found if name == "replays"}
    assert {int(budget): found["replays", budget] for budget in budgets} == replays
    assert sum(found["tokens", budget] for budget in budgets) == tokens
    for budget in budgets:
        assert found["capacity_tokens", budget] == int(budget) * found["replays", budget]
    assert sum(found["replayed_items", budget] for budget in budgets) == manager.graph_hits
    assert found["seconds", "eager"] > 0
    assert (("seconds", "graph") in found) == detect_shape().item_specs


def test_reasons(folder, make_model, make_manager) -> None:
    """Why nothing was replayed: no graphs wanted, none captured yet, weights that moved."""
    batch = make_batch([(1, 4, 4), (1, 8, 8)])
    model = make_model(video_pruning_rate=0.5)
    model.visual(batch["pixel_values"], batch["image_grid_thw"])
    assert counters(folder)["misses", "graphs_off"] == 2
    model = make_model()
    model.visual(batch["pixel_values"], batch["image_grid_thw"])
    assert counters(folder)["misses", "not_captured"] == 2
    manager = make_manager(model)
    before = counters(folder)
    for weight in model.visual.parameters():
        weight.data = weight.data * 1.1
    if not detect_shape().item_specs:
        pytest.skip(f"vLLM 0.{MINOR} cannot take a pack back")
    manager.execute(batch)
    after = counters(folder)
    assert after["misses", "declined"] == 2
    assert ("items", "graph") not in after
    assert after["items", "eager"] == before["items", "eager"] + 2 == 6


def test_capture_is_not_counted(folder, make_model, make_manager) -> None:
    make_manager(make_model())
    assert counters(folder) == {}
