"""`vitgraph bench` with a real vLLM release: its tower, its graph manager, its streams.
vllm_releases.py runs it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import vllm.distributed.parallel_state as parallel_state
from vllm_harness import MINOR, Replay, captured_graphs, check, stub_capture

from vitgraph.bench import report, vllm_tower
from vitgraph.bench.systems import Setup
from vitgraph.bench.workloads import make_batch
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder

pytestmark = pytest.mark.skipif(MINOR < 23, reason="it runs vLLM's manager as of 0.23")
SETUP = {"budgets": (64, 128, 256), "max_items": 8, "backends": ("TORCH_SDPA",)}


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup(Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"]), **SETUP)


@pytest.fixture
def systems(setup, monkeypatch) -> list:
    """Eager and graph; a replay runs the captured forward again."""
    stub_capture(monkeypatch)
    capture = vllm_tower._capture

    def capture_in_name(manager, device) -> None:
        for module in manager.model.visual.modules():
            module.cpu_linear = torch.nn.functional.linear  # set after loading, by a CPU build
        capture(manager, device)
        for captured in captured_graphs(manager):
            buffers = captured.input_buffers
            captured.graph = Replay(manager.model, (buffers,), captured.output_buffer)

    monkeypatch.setattr(vllm_tower, "_capture", capture_in_name)
    return vllm_tower.vllm_systems(setup, "TORCH_SDPA")


@pytest.mark.parametrize(
    ("grids", "budgets"),
    [
        ([(1, 16, 16)], [64]),
        ([(1, 16, 16), (1, 16, 32), (1, 8, 32)], [256]),
        ([(4, 8, 8)], [64]),
        ([(1, 8, 8)] * 16, [128, 128]),
        ([(1, 32, 64)], [None]),
    ],
    ids=["image", "images", "video", "more_than_fit", "above_every_budget"],
)
def test_both_ways_give_our_encoders_rows(setup, systems, grids, budgets) -> None:
    """Batches that fill their graphs: vLLM's SDPA cannot do with less."""
    batch = make_batch(setup.encoder, grids)
    expected = setup.encoder(batch.pixels, batch.grids)
    eager, graph = systems
    check([eager.encode(batch)], [expected])
    check([torch.cat(graph.encode(batch))], [expected])
    replays = graph.replays(batch)
    assert [budget for budget, _ in replays] == budgets
    assert [captured is None for _, captured in replays] == [b is None for b in budgets]


def test_capture_is_on_a_stream_of_its_own(monkeypatch) -> None:
    """0.29 and later capture on the current stream, which must not be the default one."""
    current, seen = ["default"], []

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    side = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    for name in ("tp", "pp", "dp"):
        group = getattr(parallel_state, f"get_{name}_group")()
        monkeypatch.setattr(group, "device_communicator", None)
    manager = SimpleNamespace(capture=lambda pool: seen.append((current[-1], pool)))
    vllm_tower._capture(manager, torch.device("cuda"))
    assert seen == [(side, "pool")] and current == ["default"]


def test_the_header_names_the_release_in_use() -> None:
    import vllm

    assert report.header(torch.device("cpu"))["vllm"] == vllm.__version__
