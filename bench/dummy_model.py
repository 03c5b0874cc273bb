"""A Qwen3-VL or Qwen3.5 model directory without weights: configuration, byte-level tokenizer,
processors.

The tower has the geometry of a published checkpoint; the language model has few layers, so that an
engine is up in seconds (vLLM: load_format="dummy").
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, Qwen3_5Config, Qwen3VLConfig

from vitgraph.encoder import GEOMETRIES

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEXT_LAYERS, HEAD = 4, 128
FAMILIES: dict[str, type[PreTrainedConfig]] = {
    "Qwen3VLForConditionalGeneration": Qwen3VLConfig,
    "Qwen3_5ForConditionalGeneration": Qwen3_5Config,
}


def write_model(
    folder: Path, geometry: str = "8b", family: str = "Qwen3VLForConditionalGeneration"
) -> Path:
    """Write the directory of a model of a class in FAMILIES; returns it.

    Raises:
        ValueError: a geometry with deepstack for a family without.
    """
    vision = GEOMETRIES[geometry]
    is_hybrid = family.startswith("Qwen3_5")
    if is_hybrid and vision.deepstack_visual_indexes:
        raise ValueError(f"--geometry {geometry} has deepstack, {family} has not")
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _tokenizer(folder)
    text = _hybrid_text(vision.out_hidden_size) if is_hybrid else _text(vision.out_hidden_size)
    config = FAMILIES[family](
        text_config=text,
        vision_config=vision.to_dict(),
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
    )
    config.architectures, config.dtype = [family], "bfloat16"
    config.save_pretrained(folder)
    _processors(folder)
    return folder


def _text(hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": TEXT_LAYERS,
        "num_attention_heads": max(4, hidden // HEAD),
        "num_key_value_heads": max(2, hidden // (4 * HEAD)),
        "head_dim": HEAD,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }


def _hybrid_text(hidden: int) -> dict[str, Any]:
    """Of four layers the last has attention; a quarter of its heads of 256 is rotated."""
    rope = {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
    text = _text(hidden) | {"head_dim": 2 * HEAD, "num_attention_heads": max(4, hidden // 256)}
    return text | {"rope_parameters": text["rope_parameters"] | rope}


def _tokenizer(folder: Path) -> dict[str, int]:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    _write(
        folder / "tokenizer_config.json",
        tokenizer_class="Qwen2Tokenizer",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        model_max_length=262144,
        additional_special_tokens=SPECIAL[1:],
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    return vocabulary


def _processors(folder: Path) -> None:
    common = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    _write(
        folder / "preprocessor_config.json",
        **common,
        image_processor_type="Qwen2VLImageProcessorFast",
        size={"shortest_edge": 65536, "longest_edge": 16777216},
    )
    _write(
        folder / "video_preprocessor_config.json",
        **common,
        video_processor_type="Qwen3VLVideoProcessor",
        size={"shortest_edge": 4096, "longest_edge": 25165824},
    )


def _write(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(fields, indent=1))
