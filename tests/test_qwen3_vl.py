"""Qwen3-VL behind the manager's protocol: its methods one by one."""

import dataclasses

import pytest
import torch

from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.encoder.operations import Plan
from vitgraph.graphs import SupportsEncoderCudaGraph, qwen3_vl
from vitgraph.graphs.qwen3_vl import Qwen3VLGraphModel, as_model


def test_an_encoder_becomes_a_model_once(encoder) -> None:
    assert not isinstance(encoder, SupportsEncoderCudaGraph)
    model = as_model(encoder)
    assert isinstance(model, SupportsEncoderCudaGraph) and model.module is encoder
    assert as_model(model) is model


def test_items_are_selected_in_the_order_asked_for(encoder, batch) -> None:
    model = as_model(encoder)
    mm_kwargs = batch([(1, 4, 4), (1, 2, 6), (1, 4, 2)])
    first, second, third = mm_kwargs["pixel_values"].split([16, 12, 8])
    for indices, pixels in (
        ([2, 0, 1], [third, first, second]),
        ([1, 0], [second, first]),
        ([1, 2], [second, third]),
    ):
        selected = model.select_encoder_cudagraph_items(mm_kwargs, indices)
        assert torch.equal(selected["pixel_values"], torch.cat(pixels))
        assert selected["image_grid_thw"] == [mm_kwargs["image_grid_thw"][i] for i in indices]


def test_a_capacity_is_calibrated_once(monkeypatch) -> None:
    """vLLM captures twice, and so may others; another dtype or attention is measured again."""
    encoder, measured = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"]), []

    def calibrate(encoder, *capacity) -> Plan:
        measured.append(capacity)
        return Plan(encoder.attention, microseconds={"nth": {"measurement": len(measured)}})

    monkeypatch.setattr(qwen3_vl, "calibrate", calibrate)
    model = Qwen3VLGraphModel(encoder)
    first = model._measured_plan(256, 8)
    assert model._measured_plan(256, 8) is first
    assert model._measured_plan(256, 16) is not first
    assert model._measured_plan(512, 8) is not first
    assert measured == [(256, 8), (256, 16), (512, 8)]
    encoder.to(torch.float16)
    assert model._measured_plan(256, 8) is not first
    assert len(measured) == 4


@pytest.mark.parametrize("grids", [[(1, 4, 4)], [(1, 4, 4), (3, 2, 6)]], ids=["one", "several"])
def test_only_real_rows_are_computed(grids, encoder, batch, monkeypatch) -> None:
    """KNOWN_FAILURES 10 and 11: what a budget of 512 tokens does follows the rows of the batch.

    On the CPU the rows that each layer is given; on a GPU test_replay.py measures the time.
    """
    model = as_model(encoder)
    captured = model.prepare_encoder_cudagraph_capture_inputs(
        512, 8, 512, encoder.device, encoder.dtype
    )
    mm_kwargs = model.check_encoder_inputs(batch(grids))
    patches = len(mm_kwargs["pixel_values"])
    captured.mm_kwargs["pixel_values"][:patches] = mm_kwargs["pixel_values"]
    captured.buffers |= model.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, 8, 512).buffers
    rows: set[int] = set()

    def counting(function):
        def call(x, *args, **options):
            rows.add(len(x))
            return function(x, *args, **options)

        return call

    by_patch = {name: counting(getattr(encoder.ops, name)) for name in ("linear", "mlp", "rotary")}
    monkeypatch.setattr(encoder, "ops", dataclasses.replace(encoder.ops, **by_patch))
    model.encoder_cudagraph_forward(captured.mm_kwargs, captured.buffers)
    assert rows == {patches, patches // 4}  # tokens in the mergers


@pytest.mark.parametrize("linear_dtype", ["same", "fp8"])
def test_a_replay_of_no_items(linear_dtype) -> None:
    """vLLM runs a model's graph so, and its eager forward."""
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"], linear_dtype=linear_dtype)
    model = as_model(encoder)
    captured = model.prepare_encoder_cudagraph_capture_inputs(
        64, 4, 64, encoder.device, encoder.dtype
    )
    captured.buffers["grid_thw"].zero_()
    out = model.encoder_cudagraph_forward(captured.mm_kwargs, captured.buffers)
    assert out.shape == (0, encoder.config.output_width)
