"""What SGLang would do here: the lines of `vitgraph doctor`."""

import os
from importlib.metadata import entry_points, version

from vitgraph.graphs.sglang_plugin.names import (
    AFTER_LOADING,
    BUDGETS,
    GROUP,
    PLUGIN,
    find_target,
    has_hooks,
)
from vitgraph.graphs.vllm_plugin.names import collect, is_disabled


def report() -> dict[str, str]:
    """Which tower would serve, with which attention, kernels and graphs; never raises.

    SGLang is imported, which takes seconds, and no engine is started: what a given server's flags
    decide (ranks, quantisation, --language-only) is in that server's log instead.
    """
    find = {
        "SGLang": _release,
        "tower": _tower,
        "encoder-only servers": _encoder_only,
        "attention": _attention,
        "layers": _layers,
        "graphs": _graphs,
    }
    return collect("sglang", find)


def _release() -> str:
    return version("sglang")


def why_not_loaded() -> str | None:
    """What keeps SGLang from loading the plugin, or None.

    SGLang takes the spaces from the names in SGLANG_PLUGINS; an empty value names all.
    """
    if not has_hooks():
        return "this release loads no plugins; 0.5.11 and later do"
    names = {entry.name for entry in entry_points(group=GROUP) if entry.value == PLUGIN}
    if not names:
        return "the plugin's entry point is not installed"
    asked = os.environ.get("SGLANG_PLUGINS", "")
    allowed = {name.strip() for name in asked.split(",")} - {""}
    if allowed and names.isdisjoint(allowed):
        return f"SGLANG_PLUGINS={asked!r} does not name {' or '.join(names)}"
    return "VITGRAPH_DISABLE is set" if is_disabled() else None


def _tower() -> str:
    if reason := why_not_loaded():
        return f"SGLang's own: {reason}"
    if find_target() is None:
        return "SGLang's own: this release has no hook after loading that we know"
    import vitgraph.graphs.sglang_plugin.serve  # noqa: F401  what the hook imports

    return "vitgraph, for Qwen3-VL, Qwen3.5, Qwen3-Omni and others that share their tower"


def _encoder_only() -> str:
    if find_target() != AFTER_LOADING:
        return "SGLang's own tower; releases from 0.5.18 on can use ours"
    package = PLUGIN.partition(":")[0]
    if os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE") == package:
        return "vitgraph"
    return f"SGLang's own tower, unless SGLANG_EXTERNAL_MODEL_PACKAGE={package}"


def _attention() -> str:
    import torch

    from vitgraph.encoder.attention.trial import Heads
    from vitgraph.graphs.sglang_plugin.settings import ATTENTION, choose_attention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs = []
    for theirs in ATTENTION:
        try:
            ours = choose_attention(theirs, Heads(16, 72, torch.bfloat16), device)
        except ValueError:
            continue
        pairs.append(f"{theirs} -> {ours}{' (eager)' if ours == 'sdpa' else ''}")
    chosen = "ours on Hopper, elsewhere measured at capture"
    return f"{chosen}, unless --mm-attention-backend: {', '.join(pairs)}"


def _layers() -> str:
    from vitgraph.graphs.linears import report_linears

    return report_linears()


def _graphs() -> str:
    from vitgraph.graphs.sglang_plugin.settings import read_budgets

    config = read_budgets()
    if not config.cudagraph_mm_encoder:
        return f"off ({BUDGETS})"
    budgets = config.encoder_cudagraph_token_budgets or "powers of two"
    return f"on, budgets {budgets} ({BUDGETS} for others)"
