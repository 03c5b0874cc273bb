"""Calibration: the fastest of what was measured, and why others were not measured."""

import json
import sys

import pytest
import torch

from vitgraph.bench.workloads import make_batch
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.encoder.attention.trial import Capability
from vitgraph.encoder.operations import LAYERS
from vitgraph.graphs import calibration

# Microseconds of a measurement, by what is measured.
LINEAR = {"triton": 3.0, "cublas": 2.0}
ATTENTION = {"triton": 5.0, "flash": 4.0}
LEFT_OUT = {
    "absent": Capability("absent", "", False, "not installed"),
    "leaky": Capability("leaky", "", True, "a NaN leaks", isolates=False),
    "host": Capability("host", "", True, "reads lengths", capturable=False),
}


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """Stand-ins for the GPU: both providers of every layer, and two backends that serve."""
    calls: list[str] = []

    def linear(*_, provider: str, **options) -> None:
        calls.append(provider)

    def attention(name: str):
        def build(layout, heads):
            if name == "broken":
                raise RuntimeError("no such kernel\nand a long trace")
            return lambda qkv: calls.append(name)

        return build

    def microseconds(call, num_rows=None, rows=(0,), give_up=0.0) -> float:
        call()
        return (LINEAR | ATTENTION if num_rows is None else LINEAR)[calls[-1]] * len(rows)

    monkeypatch.setattr(calibration, "linear", linear)
    monkeypatch.setattr(calibration, "linear_providers", lambda *_: tuple(LINEAR))
    monkeypatch.setattr(calibration, "_microseconds", microseconds)
    names = ("triton", "flash", "broken", *LEFT_OUT)
    monkeypatch.setattr(calibration, "BACKENDS", {name: attention(name) for name in names})
    return calls


def serves(name: str, heads, device) -> Capability:
    return LEFT_OUT.get(name, Capability(name, "", True))


def test_the_fastest_is_chosen_and_the_others_are_explained(measured, monkeypatch) -> None:
    """A library that raises while it is measured costs its place, never the capture."""
    monkeypatch.setattr(calibration, "capability", serves)
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
    monkeypatch.setattr(type(encoder), "auto_attention", True)
    plan = calibration.calibrate(encoder, 64, 8)
    assert plan.providers == dict.fromkeys(LAYERS, "cublas")
    assert plan.attention == "flash"
    assert plan.microseconds == {
        **dict.fromkeys(LAYERS, LINEAR),
        "attention": {name: 2 * us for name, us in ATTENTION.items()},  # two layouts
    }
    reasons = {name: found.reason for name, found in LEFT_OUT.items()}
    assert plan.left_out == reasons | {"broken": "RuntimeError: no such kernel"}


def test_an_attention_that_was_asked_for_is_not_measured(measured) -> None:
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"], attention="sdpa")
    plan = calibration.calibrate(encoder, 64, 8)
    assert plan.attention == "sdpa" and not set(measured) & set(ATTENTION) - {"triton"}
    assert "attention" not in plan.microseconds


def test_ours_must_serve(measured, monkeypatch) -> None:
    """Nothing else is sure to."""

    def fails(name: str, heads, device) -> Capability:
        raise RuntimeError(f"{name} is broken")

    monkeypatch.setattr(calibration, "capability", fails)
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
    with pytest.raises(RuntimeError, match="triton is broken"):
        calibration.calibrate(encoder, 64, 8)


def test_the_benchmark_prints_and_saves_both(monkeypatch, tmp_path) -> None:
    """On the CPU, where nothing is measured: both are what the encoder computes."""
    from vitgraph.bench import calibration as script

    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
    batch = make_batch(encoder, [(1, 4, 4), (1, 8, 8)])
    expected = encoder(batch.pixels, batch.grids)
    for model in (script.Qwen3VLGraphModel(encoder), script.ByTable(encoder)):
        output = torch.cat(list(script.capture("", model).encode(batch)))
        torch.testing.assert_close(output, expected)
    table = script.ByTable(encoder)
    assert table._calibrated_plan(64, 8) is encoder.plan

    monkeypatch.setattr(script, "ALL_WORKLOADS", {"two": [(1, 4, 4), (1, 8, 8)]})
    monkeypatch.setattr(script, "require", lambda *_: None)
    monkeypatch.setattr(script.torch, "device", lambda name: encoder.device)
    monkeypatch.setattr(script.torch, "bfloat16", torch.float32)
    path = tmp_path / "result.json"
    command = ["calibration", "--geometry", "tiny", "--seconds", "1", "--save", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    script.main()
    (row,) = json.loads(path.read_text())["rows"]
    assert row["workload"] == "two" and row["ratio"] == row["table"] / row["calibrated"]
