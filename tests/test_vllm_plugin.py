"""The vLLM plugin: what can be shown without vLLM, and then inside real releases of it."""

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vitgraph.encoder.attention import backends as attention
from vitgraph.encoder.attention.trial import Capability
from vitgraph.graphs import vllm_plugin
from vitgraph.graphs.vllm_plugin import backends, metrics, wrapper
from vitgraph.graphs.vllm_plugin.protocol import SHAPES
from vitgraph.graphs.vllm_plugin.ranks import report_ranks, share_rows

_SPEC = importlib.util.spec_from_file_location(
    "vllm_releases", Path(__file__).parent / "vllm_releases.py"
)
releases = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(releases)

# "all" or releases separated by commas; without it two of them, downloaded by CI only.
ASKED = os.environ.get("VITGRAPH_VLLM_RELEASES")
CHOSEN = (
    releases.RELEASES if ASKED == "all" else ASKED.split(",") if ASKED else releases.CI_RELEASES
)


@pytest.mark.vllm
@pytest.mark.parametrize("release", CHOSEN)
def test_inside_a_real_release(release) -> None:
    """tests/vllm_contract.py, vllm_modes.py and vllm_bench.py, in a process of its own."""
    if not (ASKED or os.environ.get("CI") or releases.is_cached(release)):
        pytest.skip(f"vLLM {release} is a download of 300 MB: make test-vllm, or CI=1")
    try:
        releases.fetch(release)
    except OSError as error:
        pytest.skip(f"vLLM {release} cannot be downloaded: {error}")
    assert releases.run(release, "-q", "--tb=short") == 0


@pytest.fixture
def registry(monkeypatch):
    """A vLLM that only knows its registry: models of a release that has not all of ours."""
    models = {
        architecture: SimpleNamespace(module_name=module, class_name=name)
        for architecture, (module, name) in vllm_plugin.ARCHITECTURES.items()
        if "InternS2" not in architecture
    }
    models["Qwen2VLForConditionalGeneration"] = SimpleNamespace(module_name="a", class_name="B")
    found: dict[str, str] = {}

    def register_model(architecture: str, name: str) -> None:
        assert architecture not in models, "vLLM warns of a model that is there already"
        found[architecture] = name
        module, _, kind = name.partition(":")
        models[architecture] = SimpleNamespace(module_name=module, class_name=kind)

    vllm = ModuleType("vllm")
    vllm.ModelRegistry = SimpleNamespace(models=models, register_model=register_model)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.delenv("VITGRAPH_DISABLE", raising=False)
    monkeypatch.setattr(metrics, "publish", lambda: None)  # in the registry of this process
    return found


def test_models_are_registered_by_name(registry) -> None:
    for _ in range(2):
        vllm_plugin.register()
    module = "vitgraph.graphs.vllm_plugin.models"
    assert registry == {
        architecture: f"{module}:{name}"
        for architecture, (_, name) in vllm_plugin.ARCHITECTURES.items()
        if "InternS2" not in architecture  # which this release has not
    }
    thinker = f"{module}:Qwen3OmniMoeThinkerForConditionalGeneration"
    assert registry["Qwen3OmniMoeForConditionalGeneration"] == thinker


def test_a_registry_that_refuses_keeps_vllms_models(registry, caplog) -> None:
    import vllm

    def refuse(*_: str) -> None:
        raise TypeError("another signature")

    vllm.ModelRegistry.register_model = refuse
    before = dict(vllm.ModelRegistry.models)
    vllm_plugin.register()
    assert vllm.ModelRegistry.models == before
    assert "vLLM's own vision tower serves (TypeError: another signature)" in caplog.text


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_it_can_be_turned_off(value, registry, monkeypatch) -> None:
    monkeypatch.setenv("VITGRAPH_DISABLE", value)
    vllm_plugin.register()
    assert registry == {}


def test_metrics_that_fail_keep_nobody_from_serving(registry, monkeypatch, caplog) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metrics, "publish", fail)
    vllm_plugin.register()
    assert len(registry) > 2
    assert "vitgraph: no metrics: OSError: [Errno 28] No space left on device" in caplog.text


def test_a_failure_is_one_line(monkeypatch, caplog) -> None:
    """KNOWN_FAILURES 27: a vLLM that is broken or unlike any other is left alone."""
    monkeypatch.setattr(metrics, "publish", lambda: None)
    monkeypatch.delenv("VITGRAPH_DISABLE", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    assert len(caplog.records) == 1
    assert "vLLM's own vision tower serves (ImportError" in caplog.text


def test_the_entry_point_is_light() -> None:
    """vLLM loads it in each of its processes: no torch, no kernels, nothing that could fail."""
    code = (
        "import sys, vitgraph.graphs.vllm_plugin as p; "
        "heavy = {'torch', 'triton', 'transformers', 'vllm'} & sys.modules.keys(); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_shapes_differ() -> None:
    assert len({shape.releases for shape in SHAPES}) == len(SHAPES) == 6
    assert len(set(SHAPES)) == 6


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_attention_of_vllm_is_ours(monkeypatch) -> None:
    """The same backend; ours where FlashInfer does not serve."""
    bf16, failing = torch.bfloat16, {"flashinfer"}

    def capability(name, heads, device):
        assert (heads.count, heads.dim, heads.dtype, device) == (8, 64, bf16, CUDA)
        return Capability(name, "fake", name not in failing, "is not installed")

    monkeypatch.setattr(attention, "capability", capability)
    ours = {name: backends.counterpart(name, CUDA, bf16, 8, 64) for name in backends.COUNTERPARTS}
    assert ours == attention.VLLM_NAMES | {"FLASHINFER": "triton"}
    failing.clear()
    assert backends.counterpart("FLASHINFER", CUDA, bf16, 8, 64) == "flashinfer"
    failing.update(("flashinfer", "triton"))
    with pytest.raises(ValueError, match="'flashinfer': is not installed"):
        backends.counterpart("FLASHINFER", CUDA, bf16, 8, 64)


def test_attention_without_counterpart() -> None:
    with pytest.raises(ValueError, match="ROCM_AITER_FA has no counterpart"):
        backends.counterpart("ROCM_AITER_FA", CUDA, torch.bfloat16)
    with pytest.raises(ValueError, match=r"'flash_attn': needs CUDA, not cpu"):
        backends.counterpart("FLASH_ATTN", CPU, torch.bfloat16)


def make_config(*, pruning=False, lora=False, **multimodal) -> SimpleNamespace:
    """The fields of a vLLM configuration that decide who serves."""
    multimodal = SimpleNamespace(
        mm_encoder_tp_mode="weights", is_multimodal_pruning_enabled=lambda: pruning, **multimodal
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal, enforce_eager=False),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=3),
        lora_config=SimpleNamespace(enable_tower_connector_lora=lora),
    )


@pytest.mark.parametrize(
    ("config", "served", "graphs"),
    [
        (make_config(), True, True),
        (make_config(pruning=True), True, False),
        (make_config(lora=True), False, False),
        (make_config(mm_encoder_attn_dtype="fp8"), False, False),
        (make_config(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path="s"), False, True),
        (make_config(mm_encoder_attn_dtype=None), True, True),
    ],
    ids=["plain", "video_pruning", "tower_lora", "fp8_dynamic", "fp8_static", "not_fp8"],
)
def test_who_serves(config, served, graphs) -> None:
    """KNOWN_FAILURES 19, 24, 25, 32: 3 ranks replicate the tower where it is ours."""
    assert (wrapper.why_not_served(config) is None) == served
    assert (wrapper.why_no_graphs(config, None) is None) == graphs
    assert wrapper.replicate_tower(config) == 3
    mode = config.model_config.multimodal_config.mm_encoder_tp_mode
    assert mode == ("data" if served else "weights")


def test_a_tower_that_vllm_cannot_replicate_stays_split() -> None:
    """Qwen3-Omni's: in "data" mode vLLM would split half of its layers."""
    config = make_config()
    assert wrapper.replicate_tower(config, False) == 3
    assert config.model_config.multimodal_config.mm_encoder_tp_mode == "weights"


@pytest.mark.parametrize(
    ("asked", "invariant", "said"),
    [
        ("", False, "items shared out; VITGRAPH_SPLIT_FROM for the rows of large ones"),
        (" 512 ", False, "rows shared out from 512 tokens"),
        ("0", False, "items shared out: VITGRAPH_SPLIT_FROM=0 is no number of tokens from 1"),
        ("many", False, "items shared out: VITGRAPH_SPLIT_FROM=many is no number of tokens from 1"),
        ("512", True, "items shared out: VITGRAPH_SPLIT_FROM=512: batch-invariant sequences are"),
    ],
)
def test_rows_over_ranks(asked, invariant, said, monkeypatch, caplog) -> None:
    """What cannot be had leaves items to be shared out, and vLLM's configuration as it was."""
    monkeypatch.setenv("VITGRAPH_SPLIT_FROM", asked)
    assert report_ranks(invariant).startswith(said)
    config = make_config()
    wrapper.replicate_tower(config)
    if not said.startswith("rows"):
        assert share_rows(SimpleNamespace(), config, invariant) is None
        assert config.model_config.multimodal_config.mm_encoder_tp_mode == "data"
        assert ("items are shared out, not rows" in caplog.text) == (": " in said)


def test_sdpa_on_a_gpu_has_no_graphs() -> None:
    for device, graphs in ((CUDA, False), (CPU, True)):
        encoder = SimpleNamespace(attention="sdpa", tower=SimpleNamespace(device=device))
        assert (wrapper.why_no_graphs(make_config(), encoder) is None) == graphs


def test_no_graphs_where_vllm_captures_none() -> None:
    """Found in an engine: the log had said that graphs were on."""
    config = make_config()
    config.compilation_config.cudagraph_mode = SimpleNamespace(name="NONE")
    assert "cudagraph_mode NONE" in wrapper.why_no_graphs(config, None)
    config.use_v2_model_runner = True  # from 0.28 on, which captures encoders even so
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapper, "new_runner_has_graphs", lambda: True)
        assert wrapper.why_no_graphs(config, None) is None
        config.model_config.enforce_eager = True
        assert "enforce_eager" in wrapper.why_no_graphs(config, None)


@pytest.mark.parametrize("has_graphs", [True, False], ids=["from_0.28", "0.26"])
def test_a_model_runner_without_graphs(has_graphs, monkeypatch) -> None:
    config = make_config()
    config.use_v2_model_runner = True
    monkeypatch.setattr(wrapper, "new_runner_has_graphs", lambda: has_graphs)
    reason = wrapper.why_no_graphs(config, None)
    assert reason is None if has_graphs else "VLLM_USE_V2_MODEL_RUNNER=0" in reason
