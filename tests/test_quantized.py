"""Checkpoints whose tower comes in e4m3: every format against the values times the scales, and what
is refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vitgraph.bench.exactness import relative_error
from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.encoder.quantized import dequantize
from vitgraph.graphs.cli.main import main
from vitgraph.kernels.fp8.quantize import quantize_reference

E4M3 = torch.float8_e4m3fn
GRIDS = [(1, 8, 12), (2, 4, 4)]
CAT = str(Path(__file__).parents[1] / "graphs" / "cli" / "photos" / "cat.jpg")
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
QWEN = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def blocks_of(weight: torch.Tensor, size: int = 128) -> torch.Tensor:
    """The largest value of each block, [N / size, K / size] counted up, one by one."""
    return torch.stack(
        [
            torch.stack([block.abs().amax() for block in rows.split(size, dim=1)])
            for rows in weight.split(size, dim=0)
        ]
    )


def per_tensor(weight):
    return weight.abs().amax()


def per_channel(weight):
    return weight.abs().amax(dim=1)


# name of the scale, its values from a weight, its shape (None: as they are), its dtype, the config
FORMATS = {
    "modelopt_tensor": ("weight_scale", per_tensor, None, torch.float32, MODELOPT),
    "modelopt_channel": ("weight_scale", per_channel, None, torch.float32, MODELOPT),
    "modelopt_blocks": (
        "weight_scale",
        blocks_of,
        lambda scale: (scale.shape[0], 1, scale.shape[1], 1),
        torch.float32,
        MODELOPT,
    ),
    "compressed_tensor": ("weight_scale", per_tensor, lambda _: (1,), torch.float32, COMPRESSED),
    "compressed_channel": (
        "weight_scale",
        per_channel,
        lambda scale: (len(scale), 1),
        torch.bfloat16,
        COMPRESSED,
    ),
    "compressed_blocks": ("weight_scale", blocks_of, None, torch.bfloat16, COMPRESSED),
    "qwen_blocks": ("weight_scale_inv", blocks_of, None, torch.bfloat16, QWEN),
}


def expanded(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One scale for each value, by its place."""
    if scale.ndim < 2:
        return scale.reshape(-1, 1).expand(weight.shape)
    places = torch.meshgrid(*(torch.arange(size) // 128 for size in weight.shape), indexing="ij")
    return scale[places]


def quantized(tower: dict, kind: str) -> tuple[dict, dict]:
    """Tensors of a tower with every linear layer of blocks and mergers quantised, and the truth."""
    name_of_scale, largest, shape, dtype, _ = FORMATS[kind]
    stored, truth = {}, {}
    for name, tensor in tower.items():
        stored[name] = truth[name] = tensor
        if tensor.ndim != 2 or name == "pos_embed.weight":
            continue
        scale = (largest(tensor) / 448).to(dtype)
        everywhere = expanded(scale.float(), tensor)
        stored[name] = (tensor / everywhere).clamp(-448, 448).to(E4M3)
        truth[name] = stored[name].float() * everywhere
        layer = name.removesuffix("weight")
        stored[layer + name_of_scale] = scale.reshape(shape(scale)) if shape else scale
        if kind == "modelopt_tensor":
            stored[f"{layer}input_scale"] = torch.tensor(0.01)
    return stored, truth


@pytest.fixture
def tower(reference):
    return {name: tensor.clone() for name, tensor in reference.state_dict().items()}


def write(folder, tensors, vision, kind=None) -> None:
    config = {"vision_config": vision}
    if kind is not None:
        config["quantization_config"] = FORMATS[kind][-1]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_values_times_scales(kind, tower, tools, tmp_path) -> None:
    stored, truth = quantized(tower, kind)
    assert sum(tensor.dtype == E4M3 for tensor in stored.values()) == 4 * 4 + 4 * 2
    write(tmp_path, {f"model.visual.{k}": v for k, v in stored.items()}, tools.tiny, kind)
    loaded = Qwen3VLVisionEncoder.from_pretrained(tmp_path)
    half = Qwen3VLVisionEncoder.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        expected = truth[name].reshape(parameter.shape)
        assert torch.equal(parameter, expected), name
        assert torch.equal(half.get_parameter(name), expected.bfloat16()), name
        if f"{name}_scale" in stored or f"{name}_scale_inv" in stored:
            assert 1e-3 < relative_error(parameter, tower[name]) < 0.04


def test_a_tower_that_was_left_out_of_it(tower, encoder, tools, tmp_path) -> None:
    """As in Qwen's own releases: only the language model is quantised, the config says so."""
    tensors = {f"model.visual.{name}": tensor for name, tensor in tower.items()}
    layer = "model.language_model.layers.0.mlp.up_proj"
    tensors |= {f"{layer}.weight": torch.ones(4, 4).to(E4M3)}
    tensors |= {f"{layer}.weight_scale_inv": torch.ones(1, 1)}
    write(tmp_path, tensors, tools.tiny, "qwen_blocks")
    for name, parameter in Qwen3VLVisionEncoder.from_pretrained(tmp_path).named_parameters():
        assert torch.equal(parameter, encoder.get_parameter(name)), name


def test_scales_in_another_shard_and_mergers_of_other_names(tower, tools, tmp_path) -> None:
    """Qwen3-Omni's names; the tensors as a model with an index has them."""
    stored, truth = quantized(tower, "compressed_channel")
    parts = {"norm": "ln_q", "linear_fc1": "mlp.0", "linear_fc2": "mlp.2"}

    def omni(name: str) -> str:
        if not (found := re.fullmatch(r"(?:deepstack_)?(merger\w*(?:\.\d)?)\.(\w+)\.(\w+)", name)):
            return f"thinker.visual.{name}"
        return f"thinker.visual.{found[1]}.{parts[found[2]]}.{found[3]}"

    weight_map = {}
    for file in ("a.safetensors", "b.safetensors"):
        held = {omni(k): v for k, v in stored.items() if ("scale" in k) == (file[0] == "b")}
        save_file(held, tmp_path / file)
        weight_map |= dict.fromkeys(held, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": tools.tiny}))
    assert "thinker.visual.merger_list.2.mlp.0.weight_scale" in weight_map
    for name, parameter in Qwen3VLVisionEncoder.from_pretrained(tmp_path).named_parameters():
        assert torch.equal(parameter, truth[name].reshape(parameter.shape)), name


@pytest.mark.parametrize("options", [{}, {"linear_dtype": "fp8", "fp8_skip_blocks": 1}])
def test_every_mode_works_on_such_weights(options, tower, tools, tmp_path) -> None:
    """The same embeddings as from a checkpoint with the products."""
    stored, truth = quantized(tower, "modelopt_tensor")
    encoders = []
    for name, tensors in (("stored", stored), ("truth", truth)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, tensors, tools.tiny)
        encoders.append(Qwen3VLVisionEncoder.from_pretrained(tmp_path / name, **options))
    pixels = torch.randn(128, 1536, generator=torch.Generator().manual_seed(0))
    found, expected = (encoder(pixels, GRIDS) for encoder in encoders)
    assert torch.equal(found, expected)
    plain = Qwen3VLVisionEncoder(encoders[0].config)
    plain.load_state_dict({k: v.reshape(plain.get_parameter(k).shape) for k, v in tower.items()})
    assert 1e-3 < relative_error(found, plain(pixels, GRIDS)) < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_without_a_norm_before_it_is_quantised_as_it_came(tower, dtype) -> None:
    """fc2 of a checkpoint with a scale a channel: our own scales give back the same values."""
    stored, truth = quantized(tower, "modelopt_channel")
    name = "blocks.1.mlp.linear_fc2"
    ours = quantize_reference(truth[f"{name}.weight"].to(dtype), tower[f"{name}.bias"])
    assert torch.equal(ours.weight.float(), stored[f"{name}.weight"].float())
    torch.testing.assert_close(ours.scale, stored[f"{name}.weight_scale"], rtol=4e-3, atol=0)


def test_the_command_line_takes_such_a_model(tower, tools, tmp_path) -> None:
    stored, truth = quantized(tower, "qwen_blocks")
    rows = []
    for name, tensors in (("stored", stored), ("truth", truth)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, tensors, tools.tiny)
        processor = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        processor["size"] = {"shortest_edge": 4096, "longest_edge": 65536}
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(processor))
        output = tmp_path / f"{name}.safetensors"
        command = ["encode", CAT, "--model", str(tmp_path / name), "--device", "cpu"]
        assert main([*command, "--output", str(output)]) == 0
        rows.append(load_file(output)[CAT])
    assert torch.equal(*rows)


def test_one_row_has_blocks_too() -> None:
    weight, scale = torch.ones(1, 300).to(E4M3), torch.tensor([[1.0, 2.0, 3.0]])
    found = dequantize(weight, scale)
    assert found[0, [0, 127, 128, 255, 256, 299]].tolist() == [1, 1, 2, 2, 3, 3]


LAYER = "blocks.2.mlp.linear_fc1"  # [304, 144]
FLOAT8, SCALE = torch.ones(304, 144).to(E4M3), torch.tensor(0.5)
WEIGHT = f"{LAYER}.weight"
REFUSED = {
    "no_scale": ({"weight": FLOAT8}, f"{WEIGHT} is F8_E4M3 with no scale"),
    "input_scale_alone": (
        {"weight": FLOAT8, "input_scale": SCALE},
        f"{WEIGHT} is F8_E4M3 with no scale, one of weight_scale and weight_scale_inv",
    ),
    "two_scales": (
        {"weight": FLOAT8, "weight_scale": SCALE, "weight_scale_inv": SCALE + 1},
        f"{WEIGHT} is F8_E4M3 with weight_scale and weight_scale_inv",
    ),
    "e5m2": (
        {"weight": FLOAT8.float().to(torch.float8_e5m2), "weight_scale": SCALE},
        f"{WEIGHT} is F8_E5M2 with weight_scale",
    ),
    "int8": (
        {"weight": FLOAT8.to(torch.int8), "weight_scale": torch.ones(304, 1)},
        f"{WEIGHT} is I8 with weight_scale",
    ),
    "a_scale_for_nothing": (
        {"weight": FLOAT8.bfloat16(), "weight_scale": SCALE},
        f"{WEIGHT} is BF16 with weight_scale",
    ),
    "scaled_inputs": (
        {"weight": FLOAT8, "weight_scale": SCALE, "pre_quant_scale": torch.ones(144)},
        f"{WEIGHT} is F8_E4M3 with pre_quant_scale and weight_scale",
    ),
    "int4": (
        {
            "weight_packed": torch.ones(304, 18, dtype=torch.int32),
            "weight_scale": torch.ones(304, 2),
            "weight_shape": torch.tensor([304, 144]),
        },
        f"missing {WEIGHT}, there is weight_packed and weight_scale and weight_shape",
    ),
    "awq": (
        {"qweight": torch.ones(144, 38, dtype=torch.int32), "scales": torch.ones(2, 304)},
        f"missing {WEIGHT}, there is qweight and scales",
    ),
    "nvfp4": (
        {
            "weight": torch.ones(304, 72, dtype=torch.uint8),
            "weight_scale": torch.ones(304, 9).to(E4M3),
            "weight_scale_2": SCALE,
        },
        f"{WEIGHT} is U8 with weight_scale and weight_scale_2",
    ),
    "mxfp8": (
        {"weight": FLOAT8, "weight_scale": torch.ones(304, 5, dtype=torch.uint8)},
        f"{LAYER}.weight_scale is U8, not BF16 or F16 or F32 or F64",
    ),
    "small_blocks": (
        {"weight": FLOAT8, "weight_scale_inv": torch.ones(5, 3)},
        f"{LAYER}.weight_scale_inv has shape (5, 3), {WEIGHT} (304, 144)",
    ),
    "other_weight": (
        {"weight": FLOAT8.t().contiguous(), "weight_scale": SCALE},
        f"{WEIGHT} has shape (144, 304), the config wants (304, 144)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tower, tools, tmp_path) -> None:
    tensors, reason = REFUSED[case]
    del tower[WEIGHT]
    write(tmp_path, tower | {f"{LAYER}.{name}": t for name, t in tensors.items()}, tools.tiny)
    with pytest.raises(ValueError) as error:
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{tmp_path} does not fit the vision config: {reason}")
    supported = "one scale a tensor, an output channel or a block of 128 x 128"
    assert (supported in message) == (case != "other_weight")


def test_many_of_them_are_one_sentence(tower, tools, tmp_path) -> None:
    for name in [name for name, tensor in tower.items() if tensor.ndim == 2]:
        if name != "pos_embed.weight":
            tower[name] = tower[name].to(E4M3)
    write(tmp_path, tower, tools.tiny)
    with pytest.raises(ValueError) as error:
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)
    assert str(error.value).count("with no scale") == 1
    assert "(and 23 more like it)" in str(error.value)


def test_a_scale_that_the_index_lies_about(tower, tools, tmp_path) -> None:
    stored, _ = quantized(tower, "modelopt_tensor")
    save_file(stored, tmp_path / "a.safetensors")
    weight_map = dict.fromkeys(stored, "a.safetensors")
    del stored[f"{LAYER}.weight_scale"]
    save_file(stored, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": tools.tiny}))
    with pytest.raises(ValueError, match=rf"missing {LAYER}.weight_scale \(the index names a\.s"):
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)
