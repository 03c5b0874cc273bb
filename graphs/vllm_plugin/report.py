"""What vLLM would do here: the lines of `vitgraph doctor`."""

import os
import re
from importlib.metadata import entry_points
from importlib.util import find_spec

from vitgraph.graphs.vllm_plugin.names import (
    ARCHITECTURES,
    MODELS,
    collect,
    is_disabled,
    is_invariant,
)

PLUGIN = "vitgraph.graphs.vllm_plugin:register"
# The first releases that take the V2 model runner by themselves, for a dense model, MoE, and one
# with linear attention.
V2_SINCE = {
    "Qwen3VLForConditionalGeneration": (0, 25),
    "Qwen3VLMoeForConditionalGeneration": (0, 29),
    "Qwen3_5ForConditionalGeneration": (0, 29),
}


def report() -> dict[str, str]:
    """Which tower would serve, with which attention, kernels and graphs; never raises.

    vLLM is imported, which takes seconds, and no engine is started: what a given server's flags
    decide (quantisation, LoRA, pruning) is in that server's log instead.
    """
    find = {
        "vLLM": _release,
        "tower": _tower,
        "model runner": _model_runner,
        "protocol": _protocol,
        "attention": _attention,
        "kernels": _kernels,
        "layers": _layers,
        "several ranks": _ranks,
        "graphs": _graphs,
        "metrics": _metrics,
    }
    return collect("vllm", find)


def _release() -> str:
    import vllm

    return vllm.__version__


def why_not_loaded() -> str | None:
    """What keeps vLLM from loading the plugin, or None.

    vLLM compares names as they are written, spaces and all, and an empty VLLM_PLUGINS names none.
    """
    found = entry_points(group="vllm.general_plugins")
    names = {entry.name for entry in found if entry.value == PLUGIN}
    if not names:
        return "the plugin's entry point is not installed"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and names.isdisjoint(allowed.split(",")):
        return f"VLLM_PLUGINS={allowed!r} does not name {' or '.join(names)}"
    return "VITGRAPH_DISABLE is set" if is_disabled() else None


def _tower() -> str:
    if reason := why_not_loaded():
        return f"vLLM's own: {reason}"
    from vllm import ModelRegistry

    from vitgraph.graphs.vllm_plugin import register

    register()
    entries = {name: ModelRegistry.models.get(name) for name in ARCHITECTURES}
    ours = [n for n, entry in entries.items() if getattr(entry, "module_name", None) == MODELS]
    others = [name for name, entry in entries.items() if entry is not None and name not in ours]
    if others or not ours:
        return f"vLLM's own: another plugin registered {', '.join(others) or 'its models'}"
    import vllm.model_executor.models.qwen3_vl as theirs

    from vitgraph.graphs.vllm_plugin import models

    if models.Qwen3VLForConditionalGeneration is theirs.Qwen3VLForConditionalGeneration:
        return "vLLM's own: vitgraph cannot be imported beside it (the log says why)"
    return f"vitgraph, for {', '.join(ours)}"


def runner(architecture: str) -> str:
    """vLLM's model runner for one of `V2_SINCE` that generates text: "V1" or "V2"."""
    from vllm import envs

    asked = getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", None)  # None: vLLM decides
    if asked is None:
        major, minor, *_ = map(int, re.findall(r"\d+", _release()))
        asked = (major, minor) >= V2_SINCE[architecture]
    return "V2" if asked else "V1"


def _model_runner() -> str:
    from vitgraph.graphs.vllm_plugin.wrapper import new_runner_has_graphs

    dense, *others = map(runner, V2_SINCE)
    line = dense if {dense} == {*others} else f"{dense} for dense models, V1 for MoE and Qwen3.5"
    if "V2" in line and not new_runner_has_graphs():
        line += "; V2 of this release has no encoder graphs: set VLLM_USE_V2_MODEL_RUNNER=0"
    return line


def _protocol() -> str:
    from vitgraph.graphs.vllm_plugin.protocol import detect_shape

    return f"encoder graphs of vLLM {detect_shape().releases}"


def _attention() -> str:
    import torch

    from vitgraph.graphs.vllm_plugin.backends import COUNTERPARTS, counterpart

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs = []
    for theirs in COUNTERPARTS:
        try:
            ours = counterpart(theirs, device, torch.bfloat16)
        except ValueError:
            continue
        pairs.append(f"{theirs} -> {ours}{' (eager)' if ours == 'sdpa' else ''}")
    return ", ".join(pairs) or f"none serves {device}"


def _kernels() -> str:
    import torch

    from vitgraph.encoder.operations import resolve_operations

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return f"{resolve_operations('auto', device, torch.bfloat16).name} on {device}"


def _layers() -> str:
    from vitgraph.graphs.linears import report_linears

    return report_linears(is_invariant())


def _ranks() -> str:
    from vitgraph.graphs.vllm_plugin.ranks import report_ranks

    return report_ranks(is_invariant())


def _graphs() -> str:
    line = (
        "with --compilation-config '{\"cudagraph_mm_encoder\": true}', otherwise eager; "
        "none with --enforce-eager"
    )
    if "V1" in map(runner, V2_SINCE):
        line += " or, on V1, with cudagraph_mode NONE"
    return line


def _metrics() -> str:
    if find_spec("prometheus_client") is None:
        return "none: prometheus_client is not installed"
    return "vitgraph_encoder_* on vLLM's /metrics"
