"""A tiny Qwen3-VL of transformers with its language model, and prompts: for the tests of towers."""

import torch
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

IMAGE, VIDEO, START, END = 60, 61, 62, 63
TEXT = dict(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1)


def make(kind: str, vision: dict, device: str) -> torch.nn.Module:
    tokens = dict(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(1)
    if kind == "dense":
        config = Qwen3VLConfig(text_config=TEXT, vision_config=vision, **tokens)
        model = Qwen3VLForConditionalGeneration(config)
    else:
        config = Qwen3VLMoeConfig(text_config=TEXT | MOE, vision_config=vision, **tokens)
        model = Qwen3VLMoeForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            parameter.normal_(std=0.1)
    return model.eval().to(device)


def inputs(device: str, dtype: torch.dtype, *, video: bool = False) -> dict:
    grids = torch.tensor([[1, 4, 6], [1, 8, 4]])
    tokens = [1, START, *[IMAGE] * 6, END, 2, START, *[IMAGE] * 8, END, 3]
    pixels = torch.randn(56, 1536)
    if video:
        grids = torch.tensor([[2, 4, 4]])
        tokens = [1, START, *[VIDEO] * 4, END, START, *[VIDEO] * 4, END, 3]
        pixels = torch.randn(32, 1536)
    ids = torch.tensor([tokens])
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    names = (
        ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
    )
    values = {
        "input_ids": ids,
        "mm_token_type_ids": kinds,
        names[0]: pixels.to(dtype),
        names[1]: grids,
    }
    return {name: value.to(device) for name, value in values.items()}
