"""What the user asked for: SGLang's flags and our environment variable."""

import json
import os
from pathlib import Path

from torch import device as Device

from vitgraph.encoder.attention.backends import resolve_backend
from vitgraph.encoder.attention.trial import Heads
from vitgraph.graphs.config import CompilationConfig
from vitgraph.graphs.sglang_plugin.names import BUDGETS

# SGLang's names -> ours, in the order in which they are tried. FlashInfer's stands for "lengths are
# read on the device", as our own does.
ATTENTION = {
    "fa3": ("flash_attn",),
    "fa4": ("flash_attn",),
    "flashinfer_cudnn": ("flashinfer", "triton"),
    "triton_attn": ("triton",),
    "sdpa": ("sdpa",),
}


def read_budgets(value: str | None = None) -> CompilationConfig:
    """Graphs as VITGRAPH_SGLANG_BUDGETS asks for them: a list of capacities ("512,2048"), a named
    choice ("ladder"), "off", or a JSON file of a `CompilationConfig`. Without it, the defaults.

    Raises:
        ValueError: none of these, naming the variable.
    """
    value = (os.environ.get(BUDGETS, "") if value is None else value).strip()
    try:
        if value.lower() == "off":
            return CompilationConfig()
        if value.endswith(".json"):
            fields = json.loads(Path(value).read_text())
            if not isinstance(fields, dict):
                raise ValueError(f"{value} holds no JSON object")
            return CompilationConfig.from_json({"cudagraph_mm_encoder": True} | fields)
        is_list = value[:1].isdecimal()
        budgets = tuple(int(part) for part in value.split(",")) if is_list else value or ()
        return CompilationConfig(True, budgets)
    except (OSError, ValueError) as error:
        raise ValueError(f"{BUDGETS}: {error}") from None


def choose_attention(asked: str | None, heads: Heads, device: Device) -> str:
    """Our backend for `--mm-attention-backend`; "auto", which a capture measures, without it.

    Raises:
        ValueError: a backend without counterpart, or none that serves these heads here.
    """
    if asked is None:
        return "auto"
    if asked not in ATTENTION:
        raise ValueError(f"--mm-attention-backend {asked} has no counterpart in vitgraph")
    problem = None
    for name in ATTENTION[asked]:
        try:
            return resolve_backend(name, heads, device)
        except ValueError as error:
            problem = problem or error
    raise ValueError(f"--mm-attention-backend {asked}: {problem}")
