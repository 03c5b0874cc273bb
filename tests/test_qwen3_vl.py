"""Qwen3-VL behind the manager's protocol: its methods one by one."""

import dataclasses

import pytest
import torch

from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.encoder.operations import LAYERS, Plan
from vitgraph.graphs import SupportsEncoderCudaGraph, qwen3_vl
from vitgraph.graphs.calibration import layer_of
from vitgraph.graphs.qwen3_vl import Qwen3VLGraphModel, as_model
from vitgraph.kernels import attention_config, linear
from vitgraph.kernels.sm90 import attention as sm90_attention

FP8_MIN_PATCHES = Qwen3VLVisionEncoder.fp8_min_patches  # tests have another


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


@pytest.mark.parametrize(
    "linears", [{}, {"linear_dtype": "fp8"}, {"linear_dtype": "fp8", "fp8_skip_blocks": 3}]
)
@pytest.mark.parametrize("geometry", ["2b", "8b"])
def test_eager_forwards_before_a_capture_choose_in_every_way(
    geometry, linears, monkeypatch
) -> None:
    """KNOWN_FAILURES 12: on a Hopper GPU with its kernels, a miss of any size compiles nothing."""
    for module in (linear, attention_config):
        monkeypatch.setattr(module, "capability_of", lambda device: (9, 0))
        monkeypatch.setattr(module, "hopper_tier_unavailable", lambda device: None)
    monkeypatch.setattr(attention_config, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(sm90_attention, "hopper_tier_unavailable", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch.device("meta"):
        encoder = Qwen3VLVisionEncoder(
            GEOMETRIES[geometry], dtype=torch.bfloat16, ops="torch", **linears
        )
    cuda, heads = torch.device("cuda"), encoder.config.num_heads
    layers = {name: layer_of(encoder, name) for name in LAYERS}

    def ways(patches: int, sequences: tuple[int, ...]) -> set:
        found = set()
        for name, layer in layers.items():
            rows = patches // 4 if layer.per_token else patches
            shape = torch.bfloat16, rows, *layer.modules[0].weight.shape
            provider = linear.linear_providers(cuda, *shape)[0]
            tiles = linear.linear_config((9, 0), *shape) if provider == "triton" else None
            found.add((name, provider, tiles))
        apart = {name: (name, "cublas", None) in found for name in ("proj", "fc2")}
        in_fp8 = encoder.fp8_blocks if patches >= FP8_MIN_PATCHES else range(0)
        fc2_adds = False  # of the block before
        for depth in range(encoder.config.depth):
            found.add(("norm1", depth in in_fp8, fc2_adds))
            found.add(("norm2", depth in in_fp8, apart["proj"]))
            fc2_adds = apart["fc2"] and depth not in in_fp8
            if depth in encoder.config.deepstack_visual_indexes:
                found.add(("norm of a level", fc2_adds))
                fc2_adds = False
        found.add(("last norm", fc2_adds))
        for count in sequences:
            about = heads, encoder.config.head_dim, torch.bfloat16, cuda
            found.add(attention_config.attention_config(patches, count, *about))
        return found

    shapes = [
        (sum(t * h * w for t, h, w in grids), sum(t for t, _, _ in grids))
        for grids in qwen3_vl.EAGER_SHAPES
    ]
    warm = set().union(*(ways(patches, (frames,)) for patches, frames in shapes))
    every = range(4, 1 << 16, 4)
    needed = set().union(*(ways(n, (1, 2, 4, 8, 16, 64, n // 4)) for n in every))
    assert needed - warm == set()
