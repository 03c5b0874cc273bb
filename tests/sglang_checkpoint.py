"""Writes a tiny Qwen3-VL with random weights; SGLang's CPU loader wants sizes in multiples of 32.

python tests/sglang_checkpoint.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from vitgraph.bench.dummy_model import write_model

folder = write_model(Path(sys.argv[1]), "tiny")
config = Qwen3VLConfig.from_pretrained(folder)
config.vision_config.intermediate_size, config.text_config.num_hidden_layers = 320, 2
torch.manual_seed(0)
model = Qwen3VLForConditionalGeneration(config).float()
with torch.no_grad():
    for name, weight in model.named_parameters():
        weight.normal_(std=0.2 if "qkv" in name else 0.05)
        if "norm" in name and name.endswith("weight"):
            weight.add_(1)
model.save_pretrained(folder)
settings = json.loads((folder / "config.json").read_text())
settings["dtype"] = settings["text_config"]["dtype"] = "float32"
(folder / "config.json").write_text(json.dumps(settings))
