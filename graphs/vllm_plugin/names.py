"""Logger, replaced classes and the VITGRAPH_DISABLE switch of the plugin."""

import logging
import os
from collections.abc import Callable
from typing import Any

# A child of vLLM's logger: its handlers and level apply.
logger = logging.getLogger("vllm.plugins.vitgraph")

MODELS = "vitgraph.graphs.vllm_plugin.models"
ARCHITECTURES = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")


def is_disabled() -> bool:
    """Whether the environment asks for vLLM's own tower."""
    return os.environ.get("VITGRAPH_DISABLE", "0").strip().lower() not in ("", "0", "false")


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """(result, None) of a look into vLLM's configuration, or (None, why that failed)."""
    try:
        return function(*arguments), None
    except Exception as error:
        return None, describe(error)


def describe(error: Exception) -> str:
    """Our own reasons as they are, what Python says of others with its kind."""
    ours = isinstance(error, ValueError | RuntimeError)
    return str(error) if ours else f"{type(error).__name__}: {error}"
