"""Encoder graphs for Qwen3-Omni, whose model in vLLM has none.

The methods of vLLM's protocol come from its Qwen3-VL model, so that they fit the running release;
those that concern the tower are replaced by the wrapper, as for all models.
"""

import inspect
import re
from typing import Any

from vitgraph.graphs.vllm_plugin.protocol import VllmModel


class OmniWrapper(VllmModel):
    """What the borrowed methods read, and Qwen3-Omni's model and tower lack."""

    is_multimodal_pruning_enabled = False

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model_config = vllm_config.model_config
        vision = self.config.vision_config
        levels = len(vision.deepstack_visual_indexes or ())
        self.visual.out_hidden_size = (1 + levels) * vision.out_hidden_size

    def get_max_frames_per_video(self) -> int:
        """As Qwen3-VL's model has it, which takes no other processor than its own."""
        from vllm.multimodal import MULTIMODAL_REGISTRY

        info = MULTIMODAL_REGISTRY.get_processing_info(self.model_config)
        limit = self.multimodal_config.get_limit_per_prompt("video")
        return info.get_num_frames_with_most_features(
            seq_len=self.model_config.max_model_len, mm_counts={"video": limit}
        )


def graph_methods() -> tuple[type, type]:
    """A base with the methods of the protocol, for before vLLM's class, and the protocol, which has
    some itself and comes after it."""
    from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

    helper = re.compile(r"_get_\w+_by_modality")
    lent = {
        name: inspect.getattr_static(Qwen3VLForConditionalGeneration, name)
        for name in vars(Qwen3VLForConditionalGeneration)
        if helper.fullmatch(name) or name in _methods(SupportsEncoderCudaGraph)
    }
    return type("GraphMethods", (), lent), SupportsEncoderCudaGraph


def _methods(protocol: type) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}
