"""Geometries are read from config.json, never assumed."""

import json

import numpy as np
import pytest
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from vitgraph.encoder import GEOMETRIES, VisionConfig


@pytest.mark.parametrize("name", GEOMETRIES)
def test_round_trip_through_transformers(name) -> None:
    config = GEOMETRIES[name]
    assert VisionConfig.from_dict(Qwen3VLVisionConfig(**config.to_dict()).to_dict()) == config


def test_read_from_a_whole_models_config(tmp_path) -> None:
    vision = {"depth": 6, "hidden_size": 128, "num_heads": 2, "out_hidden_size": 96}
    vision |= {"intermediate_size": 200, "deepstack_visual_indexes": [1, 4]}
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": vision, "hidden_size": 7}))
    config = VisionConfig.from_pretrained(tmp_path)
    assert (config.depth, config.hidden_size, config.head_dim) == (6, 128, 64)
    assert config.output_width == 3 * 96
    assert config.patch_width == 1536


def test_no_deepstack_levels_is_a_geometry() -> None:
    config = VisionConfig.from_dict({"depth": 2, "hidden_size": 64, "num_heads": 1})
    assert config.deepstack_visual_indexes == ()
    assert config.output_width == config.out_hidden_size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 100, "num_heads": 16}, "hidden_size 100 over num_heads 16"),
        ({"num_position_embeddings": 2300}, "num_position_embeddings 2300 is no square"),
        ({"deepstack_visual_indexes": (8, 27)}, "deepstack level 27 is outside the depth 27"),
        ({"deepstack_visual_indexes": (8, 8)}, "deepstack_visual_indexes [8, 8] must ascend"),
        ({"deepstack_visual_indexes": ("8",)}, "deepstack_visual_indexes ['8'] are no integers"),
        ({"deepstack_visual_indexes": (8, 4)}, "deepstack_visual_indexes [8, 4] must ascend"),
        ({"hidden_size": 2**40}, "hidden_size 1099511627776 is no positive integer below 2**24"),
        ({"rope_theta": 0.0}, "rope_theta 0.0 is no positive number"),
        ({"rope_theta": float("nan")}, "rope_theta nan is no positive number"),
        ({"rope_theta": 10**400}, "is no positive number"),
        ({"rope_theta": "abc"}, "rope_theta 'abc' is no positive number"),
        ({"num_heads": 0}, "num_heads 0 is no positive integer"),
        ({"hidden_size": 144.0}, "hidden_size 144.0 is no positive integer"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not 'gelu_pytorch_tanh'"),
    ],
)
def test_contradictions_are_named(change, message) -> None:
    with pytest.raises(ValueError) as error:
        VisionConfig(**change)
    assert message in str(error.value)


def test_other_configs_are_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    with pytest.raises(ValueError, match="it lacks depth, num_heads"):
        VisionConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("config", "name", "field"),
    [
        (Qwen2_5_VLConfig, "qwen2_5_vl", "fullatt_block_indexes"),
        (Qwen2VLConfig, "qwen2_vl", "embed_dim"),
    ],
)
def test_towers_before_qwen3_are_named(config, name, field, tmp_path) -> None:
    """Whole or alone, with what is supported."""
    config().save_pretrained(tmp_path)
    message = rf"{name}(_vision)? is another kind of tower: it has {field}; supported are the"
    with pytest.raises(ValueError, match=message):
        VisionConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        VisionConfig.from_dict(config().vision_config.to_dict())


def test_levels_that_are_no_list_are_named() -> None:
    sizes = {"depth": 2, "hidden_size": 64, "num_heads": 1}
    with pytest.raises(ValueError, match="deepstack_visual_indexes 5 is no list"):
        VisionConfig.from_dict(sizes | {"deepstack_visual_indexes": 5})


def test_numbers_of_other_kinds() -> None:
    sizes = {"depth": 2, "hidden_size": 64, "num_heads": 1}
    assert VisionConfig.from_dict(sizes | {"rope_theta": 5000}).rope_theta == 5000.0
    rope = {"rope_parameters": {"rope_theta": 5000}}
    assert VisionConfig.from_dict(sizes | rope).rope_theta == 5000.0
    levels = (np.int64(0), np.int64(1))
    assert VisionConfig(depth=2, deepstack_visual_indexes=levels).output_width == 3 * 4096
