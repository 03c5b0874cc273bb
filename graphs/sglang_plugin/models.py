"""SGLang's models as an external package (`SGLANG_EXTERNAL_MODEL_PACKAGE`), under their own names.

For servers that load no plugins: encoder-only ones. SGLang lets a model prepare its kernels once it
is loaded (0.5.18 and later), which is when its tower becomes ours. Models that this SGLang lacks
are left out.
"""

from importlib import import_module
from typing import Any

from vitgraph.graphs.sglang_plugin import after_loading
from vitgraph.graphs.sglang_plugin.names import logger
from vitgraph.graphs.vllm_plugin.names import is_disabled

FAMILIES = {
    "qwen3_vl": ("Qwen3VLForConditionalGeneration",),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration",),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    "qwen3_omni_moe": ("Qwen3OmniMoeForConditionalGeneration",),
    "qwen4_exp": ("Qwen4ExpForConditionalGeneration",),
    "interns1pro": ("InternS1ProForConditionalGeneration",),
}


class Served:
    """First base of each model here, before SGLang's."""

    def precompile_kernels_after_loading(self) -> None:
        """SGLang's own, if it has one, then our tower."""
        own = getattr(super(), "precompile_kernels_after_loading", None)
        if own is not None:
            own()
        if not is_disabled():
            after_loading(None, self)


def _served_models() -> list[type]:
    found: list[type] = []
    for module, names in FAMILIES.items():
        try:
            theirs: Any = import_module(f"sglang.srt.models.{module}")
        except ImportError as error:
            logger.info("vitgraph: no models of sglang.srt.models.%s: %s", module, error)
            continue
        for name in names:
            if (model := getattr(theirs, name, None)) is not None:
                found.append(type(name, (Served, model), {"__module__": __name__}))
    return found


EntryClass = _served_models()
