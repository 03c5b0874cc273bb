"""Logger, replaced classes and the VITGRAPH_DISABLE switch of the plugin."""

import logging
import os
from collections.abc import Callable
from typing import Any

# A child of vLLM's logger: its handlers and level apply.
logger = logging.getLogger("vllm.plugins.vitgraph")

MODELS = "vitgraph.graphs.vllm_plugin.models"
# vLLM's models with this tower: name in its registry, module, class where that is another name.
# A release has some of them.
_MODELS = (
    ("Qwen3VLForConditionalGeneration", "qwen3_vl", ""),
    ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", ""),
    ("Qwen3_5ForConditionalGeneration", "qwen3_5", ""),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5", ""),
    ("Qwen4ExpForConditionalGeneration", "vllm.models.qwen4_exp", ""),
    (
        "Qwen3OmniMoeForConditionalGeneration",
        "qwen3_omni_moe_thinker",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
    ),
    ("InternS1ProForConditionalGeneration", "interns1_pro", ""),
    ("InternS2PreviewForConditionalGeneration", "interns2_preview", ""),
    ("InternS2MobiusForConditionalGeneration", "interns2_mobius", ""),
    ("Cosmos3ForConditionalGeneration", "cosmos3", ""),
    ("CohereCompassForConditionalGeneration", "cohere_compass", ""),
    ("Alpamayo2Super", "alpamayo2_super", "Alpamayo2SuperForConditionalGeneration"),
    # Models that embed, rank or classify; Qwen3-VL-Embedding and -Reranker are Qwen3-VL's class.
    ("ColQwen3", "colqwen3", "ColQwen3Model"),
    ("OpsColQwen3Model", "colqwen3", "ColQwen3Model"),
    ("Qwen3VLNemotronEmbedModel", "colqwen3", "ColQwen3Model"),
    ("ColQwen3_5", "colqwen3_5", "ColQwen3_5Model"),
    ("ClefFlashForJointSchema", "clef_flash", ""),
    ("ClefOmniForJointSchema", "clef_omni", ""),
    ("D3ForSequenceClassification", "d3", ""),
)
# Name in the registry -> (module, class).
ARCHITECTURES = {
    architecture: (
        module if "." in module else f"vllm.model_executor.models.{module}",
        name or architecture,
    )
    for architecture, module, name in _MODELS
}


def is_disabled() -> bool:
    """Whether the environment asks for vLLM's own tower."""
    return os.environ.get("VITGRAPH_DISABLE", "0").strip().lower() not in ("", "0", "false")


def is_invariant() -> bool:
    """Whether the environment asks vLLM for results that do not depend on the batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0").strip() not in ("", "0")


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


def collect(module: str, find: dict[str, Callable[[], str]]) -> dict[str, str]:
    """Lines of a plugin's report, each by what finds it; never raises.

    Args:
        module: what is imported for them.
        find: first the release, by the project's name, and among the others "tower": where that is
            not ours, the rest is left out.
    """
    lines: dict[str, str] = {}
    host = next(iter(find))
    for key, finder in find.items():
        try:
            lines[key] = finder()
        except Exception as error:
            if key == host and getattr(error, "name", None) == module:
                return {key: "not installed"}
            whose = f"{host}'s own: " if key == "tower" else ""
            lines[key] = f"{whose}{type(error).__name__}: {error}"
        if key == "tower" and not lines[key].startswith("vitgraph"):
            break
    return lines
