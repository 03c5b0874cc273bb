"""A Qwen3-VL model directory without weights: configuration, byte-level tokenizer, processors.

The tower has the geometry of a published checkpoint; the language model has few layers, so that an
engine is up in seconds (vLLM: load_format="dummy").
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3VLConfig

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


def write_model(folder: Path, geometry: str = "8b") -> Path:
    """Write the directory; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _tokenizer(folder)
    vision, hidden = GEOMETRIES[geometry], GEOMETRIES[geometry].out_hidden_size
    text = {
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
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision.to_dict(),
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
    )
    config.architectures, config.dtype = ["Qwen3VLForConditionalGeneration"], "bfloat16"
    config.save_pretrained(folder)
    _processors(folder)
    return folder


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
