"""Logger, replaced classes and the VITGRAPH_DISABLE switch of the plugin."""

import logging
import os
from collections.abc import Callable
from typing import Any

# A child of vLLM's logger: its handlers and level apply.
logger = logging.getLogger("vllm.plugins.vitgraph")

MODELS = "vitgraph.graphs.vllm_plugin.models"
# vLLM's models with this tower: name in its registry -> (module, class); a release has some.
_THEIRS = "vllm.model_executor.models."
ARCHITECTURES = {
    "Qwen3VLForConditionalGeneration": (
        f"{_THEIRS}qwen3_vl",
        "Qwen3VLForConditionalGeneration",
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        f"{_THEIRS}qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
    ),
    "Qwen3_5ForConditionalGeneration": (
        f"{_THEIRS}qwen3_5",
        "Qwen3_5ForConditionalGeneration",
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        f"{_THEIRS}qwen3_5",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    "Qwen4ExpForConditionalGeneration": (
        "vllm.models.qwen4_exp",
        "Qwen4ExpForConditionalGeneration",
    ),
    "Qwen3OmniMoeForConditionalGeneration": (
        f"{_THEIRS}qwen3_omni_moe_thinker",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
    ),
    "InternS1ProForConditionalGeneration": (
        f"{_THEIRS}interns1_pro",
        "InternS1ProForConditionalGeneration",
    ),
    "InternS2PreviewForConditionalGeneration": (
        f"{_THEIRS}interns2_preview",
        "InternS2PreviewForConditionalGeneration",
    ),
    "InternS2MobiusForConditionalGeneration": (
        f"{_THEIRS}interns2_mobius",
        "InternS2MobiusForConditionalGeneration",
    ),
    "Cosmos3ForConditionalGeneration": (
        f"{_THEIRS}cosmos3",
        "Cosmos3ForConditionalGeneration",
    ),
    "CohereCompassForConditionalGeneration": (
        f"{_THEIRS}cohere_compass",
        "CohereCompassForConditionalGeneration",
    ),
    "Alpamayo2Super": (f"{_THEIRS}alpamayo2_super", "Alpamayo2SuperForConditionalGeneration"),
    # Models that embed, rank or classify; Qwen3-VL-Embedding and -Reranker are Qwen3-VL's class.
    "ColQwen3": (f"{_THEIRS}colqwen3", "ColQwen3Model"),
    "OpsColQwen3Model": (f"{_THEIRS}colqwen3", "ColQwen3Model"),
    "Qwen3VLNemotronEmbedModel": (f"{_THEIRS}colqwen3", "ColQwen3Model"),
    "ColQwen3_5": (f"{_THEIRS}colqwen3_5", "ColQwen3_5Model"),
    "ClefFlashForJointSchema": (f"{_THEIRS}clef_flash", "ClefFlashForJointSchema"),
    "ClefOmniForJointSchema": (f"{_THEIRS}clef_omni", "ClefOmniForJointSchema"),
    "D3ForSequenceClassification": (f"{_THEIRS}d3", "D3ForSequenceClassification"),
}


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
