"""Tensor-parallel ranks: the tower's weights are replicated; items, or all rows, are shared out."""

import os
from typing import Any

from vitgraph.encoder.sequence_parallel import SequenceParallel
from vitgraph.graphs.vllm_plugin.names import describe, logger

SPLIT_FROM = "VITGRAPH_SPLIT_FROM"


def replicate_tower(vllm_config: Any, can: bool = True) -> int:
    """Replicate the tower over tensor-parallel ranks, sharing out items, where vLLM's model can;
    returns the ranks.

    "data" is what vLLM calls this. It is right for any number of ranks and heads, keeps collectives
    out of the graphs (one gather of embeddings a batch, against two reductions a layer), and gives
    every rank the same embeddings, bit by bit. The tower is small: 1.2 GB a rank for the largest.
    """
    multimodal = vllm_config.model_config.multimodal_config
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if (
        can
        and ranks > 1
        and multimodal.mm_encoder_tp_mode != "data"
        and not why_not_served(vllm_config)
    ):
        multimodal.mm_encoder_tp_mode = "data"
        logger.info(
            "vitgraph: mm_encoder_tp_mode is 'data' for this tower: its weights are replicated "
            "over %d ranks, which share the items. An image is not split unless %s says from how "
            "many tokens on: where large ones come one at a time, VITGRAPH_DISABLE=1 may be faster",
            ranks,
            SPLIT_FROM,
        )
    return ranks


def share_rows(model: Any, vllm_config: Any, batch_invariant: bool) -> SequenceParallel | None:
    """Take the sharing out over from vLLM, once `model` was built, where VITGRAPH_SPLIT_FROM asks
    for it.

    vLLM gives every rank the whole batch then, as for a tower whose weights are split, and each
    pack is one forward of all ranks, eager or captured: smaller ones are computed by every rank,
    the rows of larger ones shared. Ranks meet inside the forward, so what keeps a pack out of a
    graph has to do so on all of them: weights are moved and reloaded everywhere or nowhere.

    Returns:
        The ranks, or None where vLLM goes on to share out the items.
    """
    multimodal = vllm_config.model_config.multimodal_config
    replicated = multimodal.mm_encoder_tp_mode == "data"
    if not replicated or vllm_config.parallel_config.tensor_parallel_size == 1:
        return None
    try:
        if (tokens := read_split_from(batch_invariant)) is None:
            return None
        from vllm.distributed.parallel_state import get_tp_group

        unit = model.visual.spatial_merge_size**2
        parallel = SequenceParallel(get_tp_group().device_group, min_patches=tokens * unit)
    except Exception as error:  # another release's groups, say
        logger.warning("vitgraph: items are shared out, not rows: %s", describe(error))
        return None
    multimodal.mm_encoder_tp_mode = "weights"  # what vLLM's graph manager asks; the model, below
    model.use_data_parallel = False
    return parallel


def report_ranks(batch_invariant: bool) -> str:
    """For `vitgraph doctor`."""
    try:
        tokens = read_split_from(batch_invariant)
    except ValueError as error:
        return f"items shared out: {error}"
    if tokens is None:
        return f"items shared out; {SPLIT_FROM} for the rows of large ones"
    return f"rows shared out from {tokens} tokens"


def read_split_from(batch_invariant: bool = False) -> int | None:
    """VITGRAPH_SPLIT_FROM, in tokens; None where it is not set.

    Raises:
        ValueError: no positive number, or beside batch-invariant results.
    """
    asked = os.environ.get(SPLIT_FROM, "").strip()
    if not asked:
        return None
    if not asked.isdecimal() or int(asked) < 1:
        raise ValueError(f"{SPLIT_FROM}={asked} is no number of tokens from 1")
    if batch_invariant:
        raise ValueError(f"{SPLIT_FROM}={asked}: batch-invariant sequences are not cut")
    return int(asked)


def why_not_served(vllm_config: Any) -> str | None:
    """What in the configuration asks for vLLM's own tower, or None."""
    multimodal = vllm_config.model_config.multimodal_config
    if getattr(vllm_config.lora_config, "enable_tower_connector_lora", False):
        return "LoRA on the vision tower (enable_tower_connector_lora)"
    if getattr(multimodal, "mm_encoder_attn_dtype", None) is not None:
        return f"attention in {multimodal.mm_encoder_attn_dtype} (mm_encoder_attn_dtype)"
    return None
