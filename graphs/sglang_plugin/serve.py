"""Whether and how our encoder serves a model that SGLang has loaded."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vitgraph.encoder.attention.trial import Heads
from vitgraph.graphs.linears import choose_linears
from vitgraph.graphs.sglang_plugin.names import logger
from vitgraph.graphs.sglang_plugin.settings import choose_attention, read_budgets
from vitgraph.graphs.sglang_plugin.tower import ServedTower, TowerService, adopt, read_config
from vitgraph.graphs.vllm_plugin.names import describe

TOWER = "Qwen3VLMoeVisionModel"


def serve(model: Any) -> None:
    """Put our forward on the vision towers of a model, of which most have one or none, and say in
    the log what serves; never raises."""
    for tower in find_towers(model):
        if isinstance(tower, ServedTower):
            continue
        try:
            started = time.perf_counter()
            service = _service(tower)
            served_by = _describe(service, time.perf_counter() - started)
            adopt(tower, service)
        except Exception as error:
            logger.warning(
                "vitgraph: SGLang's own vision tower serves %s: %s",
                type(model).__name__,
                describe(error),
            )
            continue
        logger.info("vitgraph serves the vision tower of %s: %s", type(model).__name__, served_by)


def find_towers(model: Any) -> Iterator[nn.Module]:
    """The vision towers that we know, wherever they are in a model. Later stages of a pipeline hold
    one without its first layers, which nobody calls."""
    parts = model.modules() if isinstance(model, nn.Module) else ()
    for part in parts:
        is_tower = any(kind.__name__ == TOWER for kind in type(part).__mro__)
        if is_tower and type(getattr(part, "pos_embed", None)).__name__ != "PPMissingLayer":
            yield part


def why_not_served(tower: Any, flags: Any) -> str | None:
    """What asks for SGLang's own tower, or None: flags of the server, and what shows on the tower
    before its weights are looked at."""
    if getattr(flags, "language_only", False):
        return "this server leaves the encoding to others (--language-only)"
    if getattr(flags, "disaggregation_mode", None) == "decode":
        return "this server only decodes (--disaggregation-mode)"
    definer = next(kind for kind in type(tower).__mro__ if "forward" in vars(kind))
    if "forward" in vars(tower) or definer.__name__ != TOWER:
        return "it has a forward of its own"
    ranks = tower.blocks[0].attn.tp_size
    if ranks > 1:
        advice = (
            "" if getattr(flags, "mm_enable_dp_encoder", False) else ": give --mm-enable-dp-encoder"
        )
        return f"its weights are sharded over {ranks} ranks{advice}"
    if torch.version.hip is not None or tower.device.type not in ("cuda", "cpu"):
        return "vitgraph is made for NVIDIA GPUs"
    norms = {type(norm) for block in tower.blocks for norm in (block.norm1, block.norm2)}
    if odd := norms - {nn.LayerNorm}:
        return f"its norms are {odd.pop().__name__}, a kernel of another device"
    x = torch.linspace(-4, 4, 33, dtype=torch.float32, device="cpu")
    for depth, block in enumerate(tower.blocks):
        if not torch.allclose(block.mlp.act(x), nn.functional.gelu(x, approximate="tanh")):
            return f"blocks.{depth}.mlp.act is {block.mlp.act}, vitgraph computes tanh-GELU"
    return None


def _service(tower: Any) -> TowerService:
    """Raises ValueError: what keeps our encoder from serving."""
    from sglang.srt.runtime_context import get_server_args

    flags = get_server_args()  # as typed: what SGLang fills in is its choice, not the user's
    if reason := why_not_served(tower, flags):
        raise ValueError(reason)
    config = read_budgets()
    heads = Heads(tower.num_heads, tower.hidden_size // tower.num_heads, tower.dtype)
    attention = choose_attention(flags.mm_attention_backend, heads, tower.device)
    on_gpu = tower.device.type == "cuda"
    if attention == "sdpa" and on_gpu and config.cudagraph_mm_encoder:
        logger.warning("vitgraph: no encoder graphs: sdpa reads sequence lengths on the host")
        config = type(config)()
    invariant = on_gpu and bool(getattr(flags, "enable_deterministic_inference", False))
    linears = choose_linears(read_config(tower), tower.device, invariant, logger)
    return TowerService(tower, config, "triton" if invariant else attention, invariant, linears)


def _describe(service: TowerService, seconds: float) -> str:
    encoder, manager = service.encoder, service.manager
    # Of the captured budgets, or the eager one.
    backends = dict.fromkeys(plan.attention for plan in manager.model.plans.values())
    attention = " and ".join(backends) or encoder.attention
    graphs = "graphs off"
    if manager.is_captured():
        used = manager.memory_report()["total"] / 2**30
        graphs = (
            f"graphs on: {', '.join(map(str, manager.budgets))} tokens, {used:.2f} GiB, "
            f"captured in {seconds:.0f} s"
        )
    invariant = ", batch-invariant" if encoder.batch_invariant else ""
    options = invariant + service.linears.said(encoder.dtype)
    return f"attention {attention} ({encoder.requested_attention}){options}, {graphs}"
