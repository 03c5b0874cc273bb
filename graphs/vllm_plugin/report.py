"""What vLLM would do here: the lines of `vitgraph doctor`."""

from importlib.metadata import PackageNotFoundError, entry_points, version

from vitgraph.graphs.vllm_plugin import ARCHITECTURES, MODELS, is_disabled


def report() -> dict[str, str]:
    """Which tower would serve, with which attention, kernels and graphs; never raises.

    vLLM is imported, which takes seconds, and no engine is started: what a given server's flags
    decide (quantisation, LoRA, pruning) is in that server's log instead.
    """
    try:
        lines = {"vLLM": version("vllm")}
    except PackageNotFoundError:
        return {"vLLM": "not installed"}
    names = [e.value for e in entry_points(group="vllm.general_plugins")]
    plugin = "vitgraph.graphs.vllm_plugin:register"
    if plugin not in names:
        return lines | {"tower": "vLLM's own: the plugin's entry point is not installed"}
    if is_disabled():
        return lines | {"tower": "vLLM's own: VITGRAPH_DISABLE is set"}
    for key, find in (
        ("tower", _tower),
        ("protocol", _protocol),
        ("attention", _attention),
        ("kernels", _kernels),
    ):
        try:
            lines[key] = find()
        except Exception as error:
            whose = "vLLM's own: " if key == "tower" else ""
            lines[key] = f"{whose}{type(error).__name__}: {error}"
    lines["graphs"] = _GRAPHS
    return lines


_GRAPHS = "with --compilation-config '{\"cudagraph_mm_encoder\": true}', otherwise eager"


def _tower() -> str:
    from vllm import ModelRegistry

    from vitgraph.graphs.vllm_plugin import register

    register()
    entries = [ModelRegistry.models.get(name) for name in ARCHITECTURES]
    if any(getattr(entry, "module_name", None) != MODELS for entry in entries):
        return "vLLM's own: another plugin registered its models"
    import vllm.model_executor.models.qwen3_vl as theirs

    from vitgraph.graphs.vllm_plugin import models

    if models.Qwen3VLForConditionalGeneration is theirs.Qwen3VLForConditionalGeneration:
        return "vLLM's own: vitgraph cannot be imported beside it (the log says why)"
    return f"vitgraph, for {' and '.join(ARCHITECTURES)}"


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
