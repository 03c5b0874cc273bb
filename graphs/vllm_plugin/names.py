"""Logger, replaced classes and the VITGRAPH_DISABLE switch of the plugin."""

import logging
import os

# A child of vLLM's logger: its handlers and level apply.
logger = logging.getLogger("vllm.plugins.vitgraph")

MODELS = "vitgraph.graphs.vllm_plugin.models"
ARCHITECTURES = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")


def is_disabled() -> bool:
    """Whether the environment asks for vLLM's own tower."""
    return os.environ.get("VITGRAPH_DISABLE", "0").strip().lower() not in ("", "0", "false")
