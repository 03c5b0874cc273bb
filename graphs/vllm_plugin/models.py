"""The classes vLLM imports, under the names of its own.

If anything of ours fails to import, they are vLLM's own classes and one line of the log says why.
"""

from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLForConditionalGeneration as VllmQwen3VL,
)
from vllm.model_executor.models.qwen3_vl_moe import (
    Qwen3VLMoeForConditionalGeneration as VllmQwen3VLMoe,
)

from vitgraph.graphs.vllm_plugin.names import logger

__all__ = ["Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"]

try:
    from vitgraph.graphs.vllm_plugin.wrapper import VisionTowerWrapper

    class Qwen3VLForConditionalGeneration(VisionTowerWrapper, VllmQwen3VL):
        """vLLM's dense model with our vision tower."""

    class Qwen3VLMoeForConditionalGeneration(VisionTowerWrapper, VllmQwen3VLMoe):
        """vLLM's mixture-of-experts model with our vision tower."""

except Exception as error:
    logger.warning(
        "vitgraph: cannot be imported, vLLM's own vision tower serves (%s: %s)",
        type(error).__name__,
        error,
    )
    # A name has one class to a type checker; to vLLM it has whichever could be made.
    Qwen3VLForConditionalGeneration = VllmQwen3VL  # type: ignore[misc]
    Qwen3VLMoeForConditionalGeneration = VllmQwen3VLMoe  # type: ignore[misc]
