"""Calibration: the fastest of what was measured, and why others were not measured."""

from types import SimpleNamespace

import pytest
import torch

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


def test_the_tables_serve_hopper_with_its_kernels(monkeypatch) -> None:
    """Elsewhere on GPUs plans are measured; of one way for all capacities there is nothing to."""
    unavailable = {"cuda:0": None, "cuda:1": "another GPU"}
    monkeypatch.setattr(calibration, "hopper_tier_unavailable", lambda d: unavailable[str(d)])

    def measured(
        device: str,
        ops: str = "triton",
        batch_invariant: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> bool:
        encoder = SimpleNamespace(
            device=torch.device(device),
            ops=SimpleNamespace(name=ops),
            batch_invariant=batch_invariant,
            dtype=dtype,
        )
        return calibration.is_measured(encoder)

    assert measured("cuda:1") and not measured("cuda:0")
    assert not measured("cpu") and not measured("cuda:1", ops="torch")
    assert not measured("cuda:1", batch_invariant=True)
    # the tables are for 16 bits
    assert not measured("cuda:0", dtype=torch.float16) and measured("cuda:0", dtype=torch.float32)


def test_a_layer_is_timed_on_the_weights_of_all_blocks(measured, monkeypatch) -> None:
    """As in a forward: those of one block would stay in the cache."""
    weights = []
    monkeypatch.setattr(calibration, "linear", lambda x, weight, *_, **__: weights.append(weight))
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])

    def microseconds(call, *_) -> float:
        for _ in range(2 * len(encoder.blocks)):
            call()
        return 1.0

    monkeypatch.setattr(calibration, "_microseconds", microseconds)
    calibration._time_layer(encoder, "fc1", 64)
    expected = [block.mlp.linear_fc1.weight for block in encoder.blocks]
    assert len(expected) > 1 and weights == 2 * len(LINEAR) * expected


def test_ours_must_serve(measured, monkeypatch) -> None:
    """Nothing else is sure to."""

    def fails(name: str, heads, device) -> Capability:
        raise RuntimeError(f"{name} is broken")

    monkeypatch.setattr(calibration, "capability", fails)
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
    with pytest.raises(RuntimeError, match="triton is broken"):
        calibration.calibrate(encoder, 64, 8)
