"""Calibration: the fastest of what was measured, and why others were not measured."""

import pytest

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
