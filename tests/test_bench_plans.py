"""bench/plans.py on the CPU: nothing is measured there, and every way computes the same."""

import json
import sys

import torch

from vitgraph.bench import plans as script
from vitgraph.bench.workloads import make_batch
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.encoder.operations import fixed_plan

GRIDS = [(1, 4, 4), (1, 8, 8)]


def test_the_ways_differ_in_their_plans_only() -> None:
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
    batch = make_batch(encoder, GRIDS)
    expected = encoder(batch.pixels, batch.grids)
    table = script.ByTable(encoder)
    assert table._plan(64, 8) is encoder.plan
    for model in (script.Qwen3VLGraphModel(encoder), table):
        output = torch.cat(list(script.capture("", model).encode(batch)))
        torch.testing.assert_close(output, expected)
    invariant = script.invariant(encoder)
    assert invariant.plan == fixed_plan()
    weight = "blocks.0.mlp.linear_fc1.weight"
    shared = invariant.get_parameter(weight), encoder.get_parameter(weight)
    assert shared[0].data_ptr() == shared[1].data_ptr()


def test_it_prints_and_saves_all(monkeypatch, tmp_path) -> None:
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
    monkeypatch.setattr(script, "ALL_WORKLOADS", {"two": GRIDS})
    monkeypatch.setattr(script, "Measured", script.ByTable)  # without a GPU
    monkeypatch.setattr(script, "require", lambda *_: None)
    monkeypatch.setattr(script, "invariant", lambda encoder: encoder)  # interpreted, it takes long
    monkeypatch.setattr(script.torch, "device", lambda name: encoder.device)
    monkeypatch.setattr(script.torch, "bfloat16", torch.float32)
    path = tmp_path / "result.json"
    command = ["plans", "--geometry", "tiny", "--seconds", "1", "--save", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    script.main()
    (row,) = json.loads(path.read_text())["rows"]
    assert row["workload"] == "two" and row["table ratio"] == row["table"] / row["measured"]
