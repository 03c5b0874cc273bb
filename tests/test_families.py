"""Every model of transformers whose vision tower this is: encoder, manager, tower, checkpoint."""

import importlib
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from vitgraph.bench.exactness import relative_error
from vitgraph.encoder import TOWERS, Qwen3VLVisionEncoder, VisionConfig
from vitgraph.encoder.attention.backends import BACKENDS
from vitgraph.graphs import (
    CompilationConfig,
    EncoderCudaGraphManager,
    replace_vision_tower,
    restore_vision_tower,
)
from vitgraph.graphs.calibration import calibrate
from vitgraph.graphs.cli.main import main
from vitgraph.graphs.media import MediaLoader

PHOTOS = Path(__file__).parents[1] / "graphs" / "cli" / "photos"
IMAGE, VIDEO, START, END, AUDIO = 60, 61, 62, 63, 59
TOKENS = dict(
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=START,
    vision_end_token_id=END,
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = ROPE | {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
TEXT = dict(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    rope_parameters=MROPE,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
# Of Qwen3.5's linear attention, and a rotary embedding over a quarter of the head.
LINEAR = dict(
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    rope_parameters=MROPE | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.25},
)
SHARED = EXPERTS | {"shared_expert_intermediate_size": 64}
# Of Qwen4Exp's attention over an index of keys.
QSA = dict(
    hc_lowrank=8,
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=16,
    indexer_budget=64,
    indexer_compress_ratio=4,
)
DEEPSTACK = {"deepstack_visual_indexes": [0, 1, 2]}

# Class of the tower -> module, prefix of the classes, fields of the text and of the vision config.
FAMILIES = {
    "Qwen3VLVisionModel": ("qwen3_vl", "Qwen3VL", TEXT, DEEPSTACK),
    "Qwen3VLMoeVisionModel": (
        "qwen3_vl_moe",
        "Qwen3VLMoe",
        TEXT | EXPERTS | {"decoder_sparse_step": 1},
        DEEPSTACK,
    ),
    "Qwen3_5VisionModel": ("qwen3_5", "Qwen3_5", TEXT | LINEAR, {}),
    "Qwen3_5MoeVisionModel": ("qwen3_5_moe", "Qwen3_5Moe", TEXT | LINEAR | SHARED, {}),
    "Qwen4ExpVisionModel": (
        "qwen4_exp",
        "Qwen4Exp",
        TEXT | LINEAR | SHARED | QSA,
        {},
    ),
    "Qwen3OmniMoeVisionEncoder": (
        "qwen3_omni_moe",
        "Qwen3OmniMoeThinker",
        TEXT | EXPERTS,
        DEEPSTACK,
    ),
    "CohereCompassVisionModel": (
        "cohere_compass",
        "CohereCompass",
        TEXT | dict(rope_parameters={"full_attention": MROPE, "sliding_attention": MROPE}),
        DEEPSTACK,
    ),
}
GRIDS = {
    "images": [(1, 4, 6), (1, 8, 4), (1, 2, 2)],
    "videos": [(3, 4, 4), (2, 8, 6)],
    "mixed": [(1, 4, 6), (3, 4, 4), (1, 12, 8)],
}


def build(name: str, vision: dict) -> nn.Module:
    """The model around a tower of that class, every weight random."""
    module, prefix, text, levels = FAMILIES[name]
    classes = importlib.import_module(f"transformers.models.{module}")
    vision = {k: v for k, v in vision.items() if k != "deepstack_visual_indexes"} | levels
    fields = dict(text_config=text, vision_config=vision) | TOKENS
    if module == "qwen3_omni_moe":
        audio = dict(encoder_layers=1, encoder_attention_heads=2, d_model=32, encoder_ffn_dim=32)
        fields |= dict(audio_config=audio | dict(output_dim=128), audio_token_id=AUDIO)
    torch.manual_seed(1)
    model = getattr(classes, f"{prefix}ForConditionalGeneration")(
        getattr(classes, f"{prefix}Config")(**fields)
    )
    (tower,) = (part for part in model.modules() if type(part).__name__ == name)
    sharpen(tower)
    return model.eval()


@torch.no_grad()
def sharpen(tower: nn.Module) -> None:
    """Weights on which every part matters: norms near one, attention to few patches."""
    for name, parameter in tower.named_parameters():
        parameter.normal_(std=0.25 if ".qkv.weight" in name else 0.05)
        if ("norm" in name or "ln_q" in name) and name.endswith("weight"):
            parameter.add_(1)


def tower_of(model: nn.Module) -> nn.Module:
    """The only one."""
    (tower,) = (part for part in model.modules() if type(part).__name__ in TOWERS)
    return tower


@pytest.fixture(params=TOWERS)
def model(request, tools, one_thread) -> nn.Module:
    return build(request.param, tools.tiny)


@torch.no_grad()
def truth(tower: nn.Module, pixels: torch.Tensor, grids) -> torch.Tensor:
    """transformers' rows, those of the levels beside them."""
    output = tower(pixels, torch.tensor(grids, device=pixels.device))
    return torch.cat([output.pooler_output, *getattr(output, "deepstack_features", ())], dim=1)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to 1e-4 of the largest value."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_every_tower_is_tested() -> None:
    assert FAMILIES.keys() == TOWERS.keys()


def test_attention_is_sharp(tools) -> None:
    """Or these tests would not see it."""
    tower = tower_of(build("Qwen3_5VisionModel", tools.tiny))
    weights = []
    attend = nn.functional.scaled_dot_product_attention

    def watch(query, key, value, **options):
        scores = query @ key.transpose(-1, -2) * options["scale"]
        weights.append(scores.softmax(-1).amax(-1).mean())
        return attend(query, key, value, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", watch)
        truth(tower, torch.randn(96, 1536), [(1, 8, 12)])
    assert len(weights) == 4 and min(weights) > 0.3  # 0.01 were all patches alike


def test_encoder_and_manager_equal_transformers(model) -> None:
    tower = tower_of(model)
    encoder = Qwen3VLVisionEncoder.from_transformers(tower)
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (32, 64), 4))
    manager.capture()
    for grids in GRIDS.values():
        pixels = torch.randn(sum(t * h * w for t, h, w in grids), 1536)
        expected = truth(tower, pixels, grids)
        assert_equal(encoder(pixels, grids), expected)
        outputs = manager.execute({"pixel_values": pixels, "image_grid_thw": grids})
        assert_equal(torch.cat(outputs), expected)
    assert manager.get_cumulative_stats()["graph_misses"] == 0


WIDTHS = {
    "head_dim_72": {},
    "head_dim_64": {"hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096},  # 2B and 4B
}


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TOWERS)
def test_graphs_in_bf16_are_as_exact_as_transformers(name, width, tools) -> None:
    """And every attention backend can be measured, at either size of a head."""
    tower = tower_of(build(name, tools.tiny | WIDTHS[width])).cuda()
    grids = [(1, 32, 32), (4, 20, 20), (1, 48, 64)]
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), 1536, device="cuda")
    expected, half = truth(tower, pixels, grids), pixels.bfloat16()
    tower = tower.bfloat16()
    manager = EncoderCudaGraphManager(
        Qwen3VLVisionEncoder.from_transformers(tower), CompilationConfig(True, (256, 2048), 8)
    )
    manager.capture()
    ours = torch.cat(manager.execute({"pixel_values": half, "image_grid_thw": grids}))
    theirs = truth(tower, half, grids)
    assert relative_error(ours, expected) <= 1.1 * relative_error(theirs, expected)
    assert manager.get_cumulative_stats()["graph_misses"] == 0
    plan = calibrate(manager.model.module, 8192, 8)
    measured = plan.microseconds["attention"]
    assert measured.keys() | plan.left_out.keys() == BACKENDS.keys()
    assert plan.attention == min(measured, key=measured.__getitem__)


def prompt_of(kind: str, modalities: str) -> dict[str, torch.Tensor]:
    """Two images, a video of two frames, or both, as processors give them."""
    # The frames of a video stand apart, with their times between them; Qwen3-Omni's do not.
    joint = kind == "Qwen3OmniMoeVisionEncoder"
    frames = [[VIDEO] * 8] if joint else [[VIDEO] * 4] * 2
    image = [1, START, *[IMAGE] * 6, END, 2, START, *[IMAGE] * 8, END, 3]
    video = [4, *(token for frame in frames for token in (START, *frame, END)), 5]
    torch.manual_seed(2)
    values, tokens = {}, []
    if modalities != "videos":
        tokens += image
        values["pixel_values"] = torch.randn(56, 1536)
        values["image_grid_thw"] = torch.tensor([[1, 4, 6], [1, 8, 4]])
    if modalities != "images":
        tokens += video
        values["pixel_values_videos"] = torch.randn(32, 1536)
        values["video_grid_thw"] = torch.tensor([[2, 4, 4]])
        if joint:
            values["video_second_per_grid"] = torch.tensor([1.0])
    ids = torch.tensor([tokens])
    values |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not joint:
        values["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return values


@pytest.mark.parametrize("modalities", GRIDS)
def test_same_generation(model, modalities) -> None:
    kind = type(tower_of(model)).__name__
    prompt = prompt_of(kind, modalities)
    own, names = tower_of(model), set(model.state_dict())
    with torch.no_grad():
        logits = model(**prompt).logits
    generated = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    blind = {name: torch.zeros_like(v) if "pixel" in name else v for name, v in prompt.items()}
    with torch.no_grad():
        assert (model(**blind).logits - logits).abs().max() > 1e-2  # the pixels are seen

    manager = replace_vision_tower(model, CompilationConfig(True, (16, 64), 4))
    with torch.no_grad():
        assert_equal(model(**prompt).logits, logits)
    assert torch.equal(model.generate(**prompt, max_new_tokens=5, do_sample=False), generated)
    counted = manager.get_cumulative_stats()
    assert counted["graph_hits"] > 0 and counted["graph_misses"] == 0
    assert type(own).__name__ == kind and set(model.state_dict()) == names
    restore_vision_tower(model)
    assert tower_of(model) is own and type(own).__module__.startswith("transformers.models.")
    with torch.no_grad():
        assert torch.equal(model(**prompt).logits, logits)


@pytest.mark.parametrize("wrapper", [None, "thinker", "vlm"])
def test_checkpoints(model, wrapper, tmp_path) -> None:
    """As the model is saved, in shards; and as part of a model around it. KNOWN_FAILURES 43."""
    tower = tower_of(model)
    model.save_pretrained(tmp_path, max_shard_size="400KB")
    index = tmp_path / "model.safetensors.index.json"
    shards = json.loads(index.read_text())["weight_map"]
    assert len(set(shards.values())) > 1
    if wrapper is not None:
        if wrapper == "vlm" and not any(name.startswith("model.visual.") for name in shards):
            pytest.skip("those that are saved as vlm. have model.visual. inside")
        rename(tmp_path, shards, f"{wrapper}.", "model." if wrapper == "thinker" else "")
    encoder = Qwen3VLVisionEncoder.from_pretrained(tmp_path)
    pixels, grids = torch.randn(96, 1536), [(1, 4, 6), (3, 4, 6)]
    assert encoder.config == VisionConfig.from_dict(tower.config.to_dict())
    assert_equal(encoder(pixels, grids), truth(tower, pixels, grids))


def rename(folder, shards: dict[str, str], prefix: str, without: str) -> None:
    """The same checkpoint as part of another model."""

    def outer(name: str) -> str:
        return prefix + name.removeprefix(without)

    for file in set(shards.values()):
        tensors = load_file(folder / file)
        save_file({outer(name): tensor for name, tensor in tensors.items()}, folder / file)
    names = {outer(name): file for name, file in shards.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    config = json.loads((folder / "config.json").read_text())
    inner = {"model_type": "other", f"{prefix.rstrip('.')}_config": config}
    (folder / "config.json").write_text(json.dumps(inner))


def test_other_towers_are_refused_with_what_is_supported(tools) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=128)
    text = TEXT | dict(num_hidden_layers=1, rope_parameters=ROPE | {"mrope_section": [8, 12, 12]})
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    model = Qwen2_5_VLForConditionalGeneration(config)
    names = "supported are the towers of Qwen3-VL, .*Qwen3.5 .*Qwen3-Omni"
    with pytest.raises(ValueError, match=f"has no vision tower of this kind; {names}"):
        replace_vision_tower(model)
    with pytest.raises(ValueError, match=f"another kind of tower; {names}"):
        Qwen3VLVisionEncoder.from_transformers(model.model.visual)
    with pytest.raises(ValueError, match=f"qwen2_5_vl.* is another kind of tower: .*{names}"):
        VisionConfig.from_dict(config.to_dict())
    siglip = transformers.SiglipVisionConfig().to_dict()
    with pytest.raises(ValueError, match=f"siglip.* lacks depth, num_heads; {names}"):
        VisionConfig.from_dict(siglip)


@pytest.mark.parametrize("name", ["Qwen3_5VisionModel", "Qwen3OmniMoeVisionEncoder"])
def test_files_from_the_command_line(name, tools, tmp_path, one_thread) -> None:
    """The rows of transformers' tower, and a tensor for each deepstack level, or none."""
    model, photo = build(name, tools.tiny), PHOTOS / "cat.jpg"
    model.save_pretrained(tmp_path / "model")
    size = {"shortest_edge": 65536, "longest_edge": 65536}
    settings = {"patch_size": 16, "image_mean": [0.4] * 3, "image_std": [0.6] * 3, "size": size}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(settings))
    output = tmp_path / "embeddings.safetensors"
    command = ["encode", str(photo), "--model", str(tmp_path / "model"), "--device", "cpu"]
    assert main([*command, "--tensors", "split", "--output", str(output)]) == 0

    media = MediaLoader(tmp_path / "model").image(photo)
    expected = truth(tower_of(model), media.pixel_values, [media.grid])
    tensors = load_file(output)
    levels = FAMILIES[name][3].get("deepstack_visual_indexes", [])
    assert sorted(tensors) == [str(photo), *(f"{photo}#deepstack{i}" for i in range(len(levels)))]
    assert_equal(torch.cat([tensors[key] for key in sorted(tensors)], dim=1), expected)


def test_the_parts_of_omnis_mergers_are_followed_or_refused(tools, one_thread) -> None:
    """Under names of their own: eps, weights that move, another activation, an adapter."""
    model = build("Qwen3OmniMoeVisionEncoder", tools.tiny)
    tower = tower_of(model)
    tower.merger_list[0].ln_q.eps = 0.5
    pixels, grids = torch.randn(24, 1536), [(1, 4, 6)]
    expected = truth(tower, pixels, grids)
    replace_vision_tower(model)
    assert_equal(truth(tower, pixels, grids), expected)
    for parameter in tower.merger.parameters():
        parameter.data = 1.5 * parameter.data
    served = truth(tower, pixels, grids)
    restore_vision_tower(model)
    assert_equal(served, truth(tower, pixels, grids))
    tower.merger.mlp[1] = nn.GELU(approximate="tanh")
    with pytest.raises(ValueError, match=r"merger\.mlp\.1 is GELU.*vitgraph computes GELU"):
        replace_vision_tower(model)
    tower.merger.mlp[1] = nn.GELU()
    tower.merger_list[1].mlp[0] = type("Adapter", (nn.Linear,), {})(576, 576)
    with pytest.raises(ValueError, match=r"merger_list\.1\.mlp\.0 is a .*Adapter"):
        replace_vision_tower(model)
