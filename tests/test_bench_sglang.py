"""The script that drives SGLang's engines, without SGLang: what it finds wrong, its plugin."""

import sys
from importlib.metadata import entry_points

import pytest
import torch
from torch import nn

from vitgraph.bench import sglang_engine, sglang_inside

STEP = [(3, -0.5), (4, -0.6)]
OTHER = [(4, -0.5), (3, -2.6)]


@pytest.fixture
def engines(tmp_path) -> dict[str, dict]:
    """Three engines that agree: ours is faster, and its first call is fast, too."""
    rows = {"one": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
    for name in ("eager", "vitgraph"):
        torch.save(rows, tmp_path / f"{name}.pt")
    served = {
        "sent": {"items": 40, "tokens": 900},
        "encoded": {"calls": 9, "items": 40, "tokens": 900, "graph_hits": 40, "graph_misses": 0},
        "memory_mib": {"0": 100, "300": 500, "1000": 600},
    }
    common = {"tokens": [[STEP], [STEP]], "requests": served}
    return {
        "eager": common | {"serves": "SGLang", "first": {"one": 30.0}, "warm": {"one": 20.0}},
        "graphs": common | {"serves": "SGLang", "first": {"one": 300.0}, "warm": {"one": 4.0}},
        "vitgraph": common | {"serves": "vitgraph", "first": {"one": 3.2}, "warm": {"one": 3.0}},
    }


def problems(engines: dict, tmp_path) -> list[str]:
    return sglang_engine.compare(engines, tmp_path)["problems"]


def test_nothing_is_wrong(engines, tmp_path) -> None:
    found = sglang_engine.compare(engines, tmp_path)
    assert found == {"embedding_error": {"one": 0.0}, "prompts": ["same"] * 2, "problems": []}
    sglang_engine.print_result({"engines": engines, "comparison": found})


def slower(engines) -> None:
    engines["vitgraph"]["warm"] = {"one": 4.2}


def slow_first_call(engines) -> None:
    engines["vitgraph"]["first"] = {"one": 70.0}


def not_ours(engines) -> None:
    engines["vitgraph"]["serves"] = "SGLang"


def other_tokens(engines) -> None:
    engines["vitgraph"]["tokens"] = [[STEP], [OTHER]]


def crashed(engines) -> None:
    engines["graphs"] = {"error": "Traceback\nRuntimeError: no capture"}


def in_requests(**changes):
    def change(engines) -> None:
        served = engines["vitgraph"]["requests"]
        for name, value in changes.items():
            engines["vitgraph"]["requests"] = served = served | {name: served[name] | value}

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (slower, "one: 4.20 ms, SGLang's best 4.00"),
        (slow_first_call, "one: first 70.0 ms, cold capture 300.0"),
        (not_ours, "our tower does not serve"),
        (other_tokens, "different at token 0, gaps 2.100 and 0.100"),
        (crashed, "graphs: RuntimeError: no capture"),
        (in_requests(encoded={"items": 39}), "40 items sent, 39 encoded"),
        (in_requests(encoded={"graph_misses": 2}), "hits and misses (40, 2) of 40 items"),
        (in_requests(memory_mib={"1000": 800}), "memory grew from 500 to 800 MiB"),
    ],
)
def test_what_is_wrong_is_said(change, said, engines, tmp_path) -> None:
    change(engines)
    assert any(said in line for line in problems(engines, tmp_path))


def test_other_embeddings(engines, tmp_path) -> None:
    torch.save({"one": torch.ones(4, 8)}, tmp_path / "vitgraph.pt")
    assert any("embeddings differ" in line for line in problems(engines, tmp_path))


def test_sglang_finds_the_plugin(tmp_path, monkeypatch) -> None:
    """Both entry points, ours before the one that measures, and the names that they have."""
    sglang_inside.install(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = [(e.name, e.value) for e in entry_points(group="sglang.srt.plugins")]
    assert found == [
        ("vitgraph", "vitgraph.graphs.sglang_plugin:register"),
        ("bench", "vitgraph.bench.sglang_inside:register"),
    ]


def test_calls_are_counted(tmp_path) -> None:
    class Tower(nn.Module):
        def forward(self, x, grid_thw):
            return x

    tower, path = Tower(), tmp_path / "counts.json"
    sglang_inside.count_calls(tower, path)
    assert path.read_text() == '{"calls": 0, "items": 0, "tokens": 0}'
    tower(torch.zeros(5, 2), grid_thw=torch.tensor([[1, 2, 2], [1, 2, 8]]))
    tower(torch.zeros(4, 2), [[1, 4, 4]])
    assert path.read_text() == '{"calls": 2, "items": 3, "tokens": 9}'
