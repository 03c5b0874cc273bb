"""vLLM plugin: Qwen3-VL's vision tower through vitgraph.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`), possibly
twice. Nothing heavy is imported here: the models are registered by name, and vLLM imports them when
it serves one of them. `VITGRAPH_DISABLE=1` leaves vLLM as it is.
"""

import logging
import os

# A child of vLLM's logger: its handlers and level apply.
logger = logging.getLogger("vllm.plugins.vitgraph")

MODELS = "vitgraph.graphs.vllm_plugin.models"
ARCHITECTURES = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")


def is_disabled() -> bool:
    """Whether the environment asks for vLLM's own tower."""
    return os.environ.get("VITGRAPH_DISABLE", "0").strip().lower() not in ("", "0", "false")


def register() -> None:
    """Put our classes in the place of vLLM's in its model registry, and what they will count on
    its `/metrics`; never raises."""
    if is_disabled():
        return
    try:
        from vitgraph.graphs.vllm_plugin.metrics import publish

        publish()
    except Exception as error:
        logger.warning("vitgraph: no metrics: %s: %s", type(error).__name__, error)
    try:
        from vllm import ModelRegistry

        for architecture in ARCHITECTURES:
            ModelRegistry.register_model(architecture, f"{MODELS}:{architecture}")
    except Exception as error:
        logger.warning(
            "vitgraph: not registered, vLLM's own vision tower serves (%s: %s)",
            type(error).__name__,
            error,
        )
