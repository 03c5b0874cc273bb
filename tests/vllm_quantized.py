"""Towers that vLLM would quantise, inside a real vLLM release. vllm_releases.py runs it.

Truth is vLLM's own tower, unquantised, on values times scales.
"""

import logging
import re
from pathlib import Path

import pytest
import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config
from vllm_harness import OMNI, VISION, check, make_batch, truth

from vitgraph.bench.exactness import relative_error
from vitgraph.encoder.quantized import dequantize
from vitgraph.graphs.linears import FP8_SKIP_BLOCKS, LINEAR_DTYPE
from vitgraph.graphs.vllm_plugin import quantized
from vitgraph.graphs.vllm_plugin.quantized import plain_tower, plain_weights

E4M3 = torch.float8_e4m3fn
GRIDS = [(1, 4, 4), (1, 16, 16)]
LAYERS = 4 * VISION["depth"] + 2 * (1 + len(VISION["deepstack_visual_indexes"]))


class Quantizes(LinearMethodBase):
    """A method that this release would have."""

    def __init__(self) -> None:
        self.plain = UnquantizedLinearMethod()

    def create_weights(self, layer, *arguments, **keywords) -> None:
        self.plain.create_weights(layer, *arguments, **keywords)

    def apply(self, layer, x, bias=None):
        return self.plain.apply(layer, x, bias)


class FakeConfig:
    """Of vLLM's, by the name of its class; `scheme` is compressed-tensors'."""

    online_quantization_config = None

    def __init__(self, scheme: str | None = None) -> None:
        self.scheme = scheme

    def get_quant_method(self, layer, prefix):
        if not isinstance(layer, LinearBase):
            return None
        name = "OtherLinearMethod"
        if self.scheme is not None:
            layer.scheme = type(self.scheme, (), {})()
            name = "CompressedTensorsLinearMethod"
        return type(name, (Quantizes,), {})()


def fake(name: str, scheme: str | None = None):
    return type(name, (FakeConfig,), {})(scheme)


def modelopt():
    how = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": []}
    return ModelOptFp8Config.from_config({"quantization": how})


def blocks():
    return Fp8Config(True, "dynamic", weight_block_size=[128, 128])


def compressed():
    return fake("CompressedTensorsConfig", "CompressedTensorsW8A8Fp8")


def scale_of(weight: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "modelopt":
        return weight.abs().amax() / 448
    if kind == "compressed":
        return weight.abs().amax(dim=1, keepdim=True) / 448
    down, across = (-(-size // 128) for size in weight.shape)
    return torch.full((down, across), weight.abs().amax() / 448) * torch.rand(1, across).add(1)


KINDS = {"modelopt": modelopt, "blocks": blocks, "compressed": compressed}


def checkpoint(model, kind: str, prefix: str = "model.visual.") -> tuple[dict, dict]:
    """A model's tower with its linear layers in FP8, and the values times scales."""
    stored, values = {}, {}
    for name, weight in model.visual.named_parameters():
        stored[prefix + name] = values[prefix + name] = weight = weight.detach().clone()
        if weight.ndim != 2 or "pos_embed" in name:
            continue
        scale = scale_of(weight, kind)
        whole = dequantize(torch.ones_like(weight).to(E4M3), scale)
        stored[prefix + name] = (weight / whole).clamp(-448, 448).to(E4M3)
        values[prefix + name] = stored[prefix + name].float() * whole
        last = "weight_scale_inv" if kind == "blocks" else "weight_scale"
        stored[f"{prefix}{name.removesuffix('weight')}{last}"] = scale
        if kind == "modelopt":
            stored[f"{prefix}{name.removesuffix('weight')}input_scale"] = torch.tensor(0.1)
    return stored, values


@pytest.fixture(autouse=True)
def _log(caplog) -> None:
    caplog.set_level(logging.INFO, logger="vllm.plugins.vitgraph")


@pytest.mark.parametrize("kind", KINDS)
def test_ours_serves_what_the_checkpoint_has_in_fp8(kind, make_model, make_manager, caplog) -> None:
    """Eagerly and in graphs, and again when other weights were loaded into the tower in use."""
    model, plain = make_model(quant_config=KINDS[kind]()), make_model()
    assert model.vitgraph is not None
    assert f"{LAYERS} layers of the vision tower, which vLLM would have quantised" in caplog.text
    assert "vitgraph serves the vision tower" in caplog.text
    assert not any(hasattr(module, "scheme") for module in model.visual.modules())
    batch, manager = make_batch(GRIDS), None
    for factor in (1, -0.5):
        with torch.no_grad():
            for weight in plain.visual.parameters():
                weight.mul_(factor)
        stored, values = checkpoint(plain, kind)
        assert sum(tensor.dtype == E4M3 for tensor in stored.values()) == LAYERS
        plain.load_weights(iter(values.items()))
        loaded = model.load_weights(iter(stored.items()))
        assert loaded == {name for name, _ in model.named_parameters()}
        for name, weight in model.visual.named_parameters():
            assert torch.equal(weight, values[f"model.visual.{name}"]), name
        expected = truth(plain, batch["pixel_values"], GRIDS)
        manager = manager or make_manager(model)
        check([model.visual(batch["pixel_values"], GRIDS)], [torch.cat(expected)])
        manager.graph_hits = manager.graph_misses = 0
        check(manager.execute(batch), expected)
        assert (manager.graph_hits, manager.graph_misses) == (2, 0)


def test_qwen3_omni_too(make_model) -> None:
    """Other names of the mergers' layers."""
    model, plain = make_model(OMNI, quant_config=modelopt()), make_model(OMNI)
    stored, values = checkpoint(plain, "modelopt", "thinker.visual.")
    model.load_weights(iter(stored.items()))
    assert model.vitgraph is not None
    for name, weight in model.visual.named_parameters():
        assert torch.equal(weight, values[f"thinker.visual.{name}"]), name


def test_and_multiplies_in_fp8_where_that_is_asked_for(make_model, monkeypatch, caplog) -> None:
    monkeypatch.setenv(LINEAR_DTYPE, "fp8")
    monkeypatch.setenv(FP8_SKIP_BLOCKS, "3")
    model, plain = make_model(quant_config=modelopt()), make_model()
    stored, values = checkpoint(plain, "modelopt")
    model.load_weights(iter(stored.items()))
    plain.load_weights(iter(values.items()))
    batch = make_batch(GRIDS)
    expected = torch.cat(truth(plain, batch["pixel_values"], GRIDS))
    assert 1e-2 < relative_error(model.visual(batch["pixel_values"], GRIDS), expected) < 0.1


def test_a_tower_that_vllm_would_quantise_itself(make_model, caplog) -> None:
    """--quantization fp8: the checkpoint's weights are plain, and so they stay."""
    model, plain = make_model(quant_config=fake("OnlineQuantizationConfig")), make_model()
    assert f"{LAYERS} layers of the vision tower" in caplog.text and model.vitgraph is not None
    weights = {f"model.visual.{name}": w.detach() for name, w in plain.visual.named_parameters()}
    model.load_weights(iter(weights.items()))
    batch = make_batch(GRIDS)
    expected = truth(plain, batch["pixel_values"], GRIDS)
    check([model.visual(batch["pixel_values"], GRIDS)], [torch.cat(expected)])


@pytest.mark.parametrize(
    "config",
    [
        fake("AutoAWQConfig"),
        fake("ModelOptNvFp4Config"),
        fake("CompressedTensorsConfig", "CompressedTensorsWNA16"),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_formats_stay_vllms(config, make_model, caplog) -> None:
    model = make_model(quant_config=config)
    assert model.vitgraph is None and "would have quantised" not in caplog.text
    assert "the tower is quantised (merger.linear_fc1: " in caplog.text
    assert isinstance(model.visual.blocks[0].attn.qkv.quant_method, Quantizes)


def test_a_tower_that_is_not_ours_is_left_as_it_is(make_model, caplog) -> None:
    """LoRA on the tower: vLLM's own serves, quantised as vLLM would have it."""
    model = make_model(quant_config=fake("OnlineQuantizationConfig"), lora=True)
    assert model.vitgraph is None and "would have quantised" not in caplog.text
    assert isinstance(model.visual.blocks[0].attn.qkv.quant_method, Quantizes)


def test_only_the_tower_is_changed(make_model) -> None:
    """The language model's layers are quantised, then and later."""
    config = modelopt()
    made = []
    with set_current_vllm_config(make_model().test_config):
        with plain_tower(config) as names:
            for name in ("visual.blocks.0.mlp.linear_fc1", "language_model.model.layers.0.mlp.up"):
                made.append(ColumnParallelLinear(128, 128, quant_config=config, prefix=name))
        after = ColumnParallelLinear(128, 128, quant_config=config, prefix=names[0])
    assert names == ["visual.blocks.0.mlp.linear_fc1"]
    dtypes = [layer.weight.dtype for layer in (*made, after)]
    assert dtypes == [torch.float32, E4M3, E4M3]
    scaled = [("language_model.up.weight", made[1].weight), ("language_model.up.weight_scale", 1)]
    assert list(plain_weights(scaled)) == scaled


def test_layers_in_another_format_are_vllm_s() -> None:
    """int4 beside FP8, say: vLLM kept those, and loads them."""
    named = [
        ("visual.blocks.0.attn.qkv.weight_packed", torch.ones(4, 2, dtype=torch.int32)),
        ("visual.blocks.0.attn.qkv.weight_scale", torch.full((4, 1), 2.0)),
    ]
    found = list(plain_weights(named))
    assert [name for name, _ in found] == [name for name, _ in named]
    assert all(ours.equal(theirs) for (_, ours), (_, theirs) in zip(found, named, strict=True))


def test_a_plain_tower_inside_another() -> None:
    """Of models in models; what the configuration had of its own is there again."""
    config = fake("OnlineQuantizationConfig")
    config.get_quant_method = own = config.get_quant_method
    with plain_tower(config), plain_tower(config):
        assert config.get_quant_method is not own
    assert config.get_quant_method is own


def test_a_vllm_without_these_classes_is_left_as_it_is(make_model, monkeypatch) -> None:
    """KNOWN_FAILURES 27: its own tower serves, quantised, and the engine lives."""
    monkeypatch.setattr(quantized, "_layer_classes", lambda: 1 / 0)
    model = make_model(quant_config=fake("OnlineQuantizationConfig"))
    assert model.vitgraph is None
    assert isinstance(model.visual.blocks[0].attn.qkv.quant_method, Quantizes)


def test_this_release_has_the_classes_that_are_told_by_name() -> None:
    """compressed-tensors is not installed here: what stands in for it is named as vLLM's own."""
    folder = Path(vllm.__file__).parent / "model_executor" / "layers" / "quantization"
    source = "".join(file.read_text() for file in folder.rglob("*.py"))
    names = {*quantized._READ, *quantized._SCHEMES, "CompressedTensorsLinearMethod"}
    assert {name for name in names if not re.search(rf"^class {name}\b", source, re.M)} == set()


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"weight": torch.ones(4, 4).to(E4M3)}, "the checkpoint has its weight in e4m3 without a"),
        ({"weight": torch.ones(4, 4).to(torch.float8_e5m2)}, "the weight is torch.float8_e5m2; qu"),
        (
            {
                "weight_scale": torch.ones(()),
                "weight_scale_inv": torch.ones(1, 1),
                "weight": torch.ones(4, 4).to(E4M3),
            },
            "the checkpoint has both weight_scale and weight_scale_inv",
        ),
        (
            {
                "weight_scale": torch.ones(()),
                "weight": torch.ones(4, 4).to(E4M3),
                "weight_scale_inv": torch.ones(1, 1),
            },
            "the checkpoint has both weight_scale and weight_scale_inv",
        ),
        (
            {"weight_scale": torch.ones(3), "weight": torch.ones(4, 4).to(E4M3)},
            r"the scale is torch.float32 \(3,\), the weight \(4, 4\); quantised weights are read",
        ),
        (
            {"weight": torch.ones(4, 4).to(E4M3), "weight_scale": torch.ones(4, 1).byte()},
            r"the scale is torch.uint8 \(4, 1\)",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tensors, problem) -> None:
    named = [(f"model.visual.blocks.0.attn.qkv.{name}", t) for name, t in tensors.items()]
    with pytest.raises(ValueError, match=rf"qkv: {problem}.*VITGRAPH_DISABLE=1 keeps vLLM's"):
        list(plain_weights(named))
