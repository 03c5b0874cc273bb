"""Weights from safetensors: prefixes, shards, and errors that name the tensor."""

import json
import time

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.encoder import checkpoint as checkpoint_module


@pytest.fixture
def tower(reference):
    """The tiny tower's tensors as a checkpoint stores them."""
    return {name: tensor.clone() for name, tensor in reference.state_dict().items()}


def write(directory, tensors, config, shards=None) -> None:
    """A checkpoint directory; `shards` maps file name -> tensor names."""
    (directory / "config.json").write_text(json.dumps({"vision_config": config}))
    if shards is None:
        save_file(tensors, directory / "model.safetensors")
        return
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, directory / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("prefix", ["model.visual.", "visual.", ""])
def test_prefixes(prefix, tower, encoder, tools, tmp_path) -> None:
    tensors = {prefix + name: tensor for name, tensor in tower.items()}
    if prefix:
        tensors["model.language_model.embed_tokens.weight"] = torch.zeros(4, 4)
    write(tmp_path, tensors, tools.tiny)
    loaded = Qwen3VLVisionEncoder.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, encoder.get_parameter(name)), name


def test_two_towers_are_refused(tower, tools, tmp_path) -> None:
    """KNOWN_FAILURES 43: nothing says which of them the model would use."""
    tensors = {f"visual.{name}": tensor for name, tensor in tower.items()}
    others = {f"thinker.{name}": tensor + 1 for name, tensor in tensors.items()}
    write(tmp_path, tensors | others, tools.tiny)
    with pytest.raises(ValueError, match=r"holds 2 vision towers.* visual\..* thinker\.visual\."):
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)


def test_a_tensor_under_two_names_is_refused(tower, tools, tmp_path) -> None:
    """KNOWN_FAILURES 43: ours, and Qwen3-Omni's."""
    tensors = {f"visual.{name}": tensor for name, tensor in tower.items()}
    tensors["visual.merger.ln_q.weight"] = tower["merger.norm.weight"] + 1
    write(tmp_path, tensors, tools.tiny)
    with pytest.raises(ValueError, match="are the same tensor under two names") as error:
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)
    assert {"visual.merger.ln_q.weight", "visual.merger.norm.weight"} <= {*str(error.value).split()}


def test_only_the_towers_shards_are_opened(tower, tools, tmp_path) -> None:
    tensors = {f"model.visual.{name}": tensor for name, tensor in tower.items()}
    names = sorted(tensors)
    shards = {
        "model-1.safetensors": names[:20],
        "model-2.safetensors": names[20:],
        "model-3.safetensors": ["lm_head.weight"],
    }
    write(tmp_path, tensors | {"lm_head.weight": torch.zeros(2, 2)}, tools.tiny, shards)
    # A shard without tower tensors may be absent: it is never opened, nor downloaded from a hub.
    (tmp_path / "model-3.safetensors").unlink()
    loaded = Qwen3VLVisionEncoder.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = tower["blocks.3.attn.qkv.weight"].bfloat16()
    assert torch.equal(loaded.blocks[3].attn.qkv.weight, expected)


def test_hub_downloads_only_what_it_needs(tower, tools, tmp_path, monkeypatch) -> None:
    tensors = {f"visual.{name}": tensor for name, tensor in tower.items()}
    shards = {"a.safetensors": sorted(tensors), "b.safetensors": ["lm_head.weight"]}
    write(tmp_path, tensors | {"lm_head.weight": torch.zeros(2, 2)}, tools.tiny, shards)
    asked = []

    def download(repo: str, filename: str, revision: str | None, local_files_only: bool) -> str:
        assert not local_files_only
        asked.append((repo, filename, revision))
        return str(tmp_path / filename)

    monkeypatch.setattr(checkpoint_module, "hf_hub_download", download)
    monkeypatch.setattr(checkpoint_module, "_hub_answers", lambda: True)
    Qwen3VLVisionEncoder.from_pretrained("some/repository", revision="v1")
    files = {filename for _, filename, _ in asked}
    # asked for, may be missing
    files -= {f"{name}_config.json" for name in ("processor", "preprocessor", "video_preprocessor")}
    assert files == {"config.json", "model.safetensors.index.json", "a.safetensors"}
    assert {(repo, revision) for repo, _, revision in asked} == {("some/repository", "v1")}


def test_every_problem_is_in_one_message(tower, tools, tmp_path) -> None:
    del tower["blocks.2.norm1.bias"]
    tower["blocks.0.attn.qkv.bias"] = torch.zeros(7)
    tower["blocks.9.extra"] = torch.zeros(1)
    write(tmp_path, {f"visual.{k}": v for k, v in tower.items()}, tools.tiny)
    with pytest.raises(ValueError) as error:
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)
    message = str(error.value)
    assert "missing blocks.2.norm1.bias" in message
    assert "unexpected blocks.9.extra" in message
    assert "blocks.0.attn.qkv.bias has shape (7,), the config wants (432,)" in message


def test_an_index_that_lies_is_named(tower, tools, tmp_path) -> None:
    tensors = {f"visual.{name}": tensor for name, tensor in tower.items()}
    write(tmp_path, tensors, tools.tiny, {"a.safetensors": sorted(tensors)})
    del tensors["visual.merger.norm.bias"]
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"missing merger.norm.bias \(the index names a.safeten"):
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)


def test_no_checkpoint_says_what_is_missing(tools, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tools.tiny))
    with pytest.raises(
        ValueError, match=r"neither model\.safetensors\.index\.json nor model\.safe"
    ):
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds no vision tower: none of its 1 tensors"):
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)


def test_names_that_are_no_checkpoint(tmp_path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="is a file"):
        Qwen3VLVisionEncoder.from_pretrained(tmp_path / "weights.bin")
    with pytest.raises(ValueError, match="neither a directory nor a hub repository id"):
        Qwen3VLVisionEncoder.from_pretrained("/no/such/place")


def test_mean_and_std_of_bytes_come_from_the_processor(tower, tools, tmp_path) -> None:
    write(tmp_path, {f"visual.{name}": tensor for name, tensor in tower.items()}, tools.tiny)
    assert Qwen3VLVisionEncoder.from_pretrained(tmp_path).normalization.mean == (0.5, 0.5, 0.5)
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    normalization = Qwen3VLVisionEncoder.from_pretrained(tmp_path).normalization
    assert normalization == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    (tmp_path / "preprocessor_config.json").rename(tmp_path / "unused.json")
    together = {"image_processor": {"image_mean": [0.3] * 3, "image_std": [0.2] * 3}}
    (tmp_path / "processor_config.json").write_text(json.dumps(together))
    assert Qwen3VLVisionEncoder.from_pretrained(tmp_path).normalization.std == (0.2, 0.2, 0.2)


def test_a_hub_out_of_reach_is_not_a_missing_file(monkeypatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*arguments, **keywords) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(checkpoint_module, "hf_hub_download", offline)
    with pytest.raises(ValueError, match=r"some/repository is no .* the hub cannot be reached"):
        Qwen3VLVisionEncoder.from_pretrained("some/repository")


def test_where_no_network_answers_a_mistyped_name_is_told_at_once(monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    started = time.perf_counter()
    with pytest.raises(ValueError, match=r"photos/modle is no directory here, the hub cannot"):
        Qwen3VLVisionEncoder.from_pretrained("photos/modle")
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize("file", ["../weights.safetensors", "/tmp/weights.safetensors", 7])
def test_an_index_stays_inside_the_checkpoint(file, tools, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tools.tiny))
    index = {"weight_map": {"visual.patch_embed.proj.weight": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names a file outside the checkpoint"):
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "content, problem",
    [("{}", "has no weight_map"), ("[]", "is no JSON obj"), ("{", "is no JSON:")],
)
def test_a_broken_index_is_named(content, problem, tools, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tools.tiny))
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=rf"index\.json {problem}"):
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)


def test_a_truncated_file_is_named(tower, tools, tmp_path) -> None:
    write(tmp_path, {f"visual.{name}": tensor for name, tensor in tower.items()}, tools.tiny)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file"):
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)


def test_other_layouts_and_dtypes_are_refused(tower, tools, tmp_path) -> None:
    weight = tower["patch_embed.proj.weight"]
    tower["patch_embed.proj.weight"] = weight.permute(0, 2, 3, 4, 1).contiguous()
    tower["blocks.0.attn.qkv.weight"] = tower["blocks.0.attn.qkv.weight"].view(432, 12, 12)
    tower["merger.norm.bias"] = tower["merger.norm.bias"].to(torch.int32)
    write(tmp_path, {f"visual.{name}": tensor for name, tensor in tower.items()}, tools.tiny)
    with pytest.raises(ValueError) as error:
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)
    for problem in (
        "patch_embed.proj.weight has shape (144, 2, 16, 16, 3)",
        "blocks.0.attn.qkv.weight has shape (432, 12, 12)",
        "merger.norm.bias has dtype I32",
    ):
        assert problem in str(error.value)


@pytest.mark.parametrize("content, problem", [("[]", "is no JSON object"), ("{", "is no JSON:")])
def test_a_broken_config_is_named(content, problem, tmp_path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"config\.json {problem}"):
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("mean, std", [([0.5] * 3, [0.5, 0, 0.5]), ([0.5], [0.5]), ("a", 1)])
def test_settings_that_normalise_nothing(mean, std, tower, tools, tmp_path) -> None:
    write(tmp_path, {f"visual.{k}": v for k, v in tower.items()}, tools.tiny)
    settings = {"image_mean": mean, "image_std": std}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"image_mean .* do not normalise"):
        Qwen3VLVisionEncoder.from_pretrained(tmp_path)
