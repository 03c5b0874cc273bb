"""The SGLang plugin: what can be shown without SGLang, and then inside real releases of it."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from vitgraph.bench.exactness import relative_error
from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.encoder.attention import backends
from vitgraph.encoder.attention.trial import Capability, Heads
from vitgraph.encoder.checkpoint import our_name
from vitgraph.graphs import CompilationConfig, replace_vision_tower, sglang_plugin
from vitgraph.graphs.sglang_plugin import names, report, serve, settings
from vitgraph.graphs.sglang_plugin.tower import ServedTower, TowerService, adopt

_SPEC = importlib.util.spec_from_file_location(
    "sglang_releases", Path(__file__).parent / "sglang_releases.py"
)
releases = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(releases)

# "all" or releases separated by commas, with their engines; without it one, which CI downloads.
ASKED = os.environ.get("VITGRAPH_SGLANG_RELEASES")
CHOSEN = (
    releases.RELEASES if ASKED == "all" else ASKED.split(",") if ASKED else releases.CI_RELEASES
)


@pytest.mark.sglang
@pytest.mark.parametrize("release", CHOSEN)
def test_inside_a_real_release(release) -> None:
    """tests/sglang_contract.py, in a process of its own."""
    if not (ASKED or os.environ.get("CI") or releases.is_cached(release)):
        pytest.skip(f"SGLang {release} is a download of 100 MB: make test-sglang, or CI=1")
    try:
        releases.fetch(release)
    except OSError as error:
        pytest.skip(f"SGLang {release} cannot be downloaded: {error}")
    assert releases.run(release, "-q", "--tb=short", engine=bool(ASKED)) == 0


@pytest.fixture
def registry(monkeypatch):
    """A SGLang that only knows its hooks; `targets` are what can be hooked."""
    hooks: list[tuple] = []
    found = ModuleType("sglang.srt.plugins.hook_registry")
    found.HookRegistry = SimpleNamespace(register=lambda *hook: hooks.append(hook))
    found.HookType = SimpleNamespace(AFTER="after")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, found.__name__, found)
    monkeypatch.delenv("VITGRAPH_DISABLE", raising=False)
    return hooks


def test_the_newest_hook_is_taken(registry, monkeypatch) -> None:
    present = set(names.TARGETS)

    def resolve(target: str) -> object:
        if target not in present:
            raise AttributeError(target)
        return object()

    monkeypatch.setattr(names, "resolve_name", resolve)
    for target in names.TARGETS:
        sglang_plugin.register()
        present.remove(target)
    assert registry == [(target, sglang_plugin.after_loading, "after") for target in names.TARGETS]


def test_a_release_without_the_hook(registry, caplog) -> None:
    sglang_plugin.register()
    assert not registry
    assert caplog.messages == [
        "vitgraph: SGLang's own vision tower serves: this release has no hook"
    ]


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_it_can_be_turned_off(value, registry, monkeypatch, caplog) -> None:
    monkeypatch.setenv("VITGRAPH_DISABLE", value)
    sglang_plugin.register()
    assert not registry and not caplog.messages


def test_a_failure_is_one_line(monkeypatch, caplog) -> None:
    """KNOWN_FAILURES 27: a SGLang that is broken or unlike any other is left alone."""
    monkeypatch.delenv("VITGRAPH_DISABLE", raising=False)
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    sglang_plugin.register()
    (line,) = caplog.messages
    assert line.startswith("vitgraph: SGLang's own vision tower serves: ModuleNotFoundError")


def test_the_entry_point_is_light() -> None:
    """SGLang loads it in each of its processes: no torch, no kernels, nothing that could fail."""
    code = (
        "import sys, vitgraph.graphs.sglang_plugin as p; "
        "heavy = {'torch', 'triton', 'transformers', 'sglang'} & sys.modules.keys(); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_entry_point_is_installed() -> None:
    assert report.PLUGIN in {e.value for e in report.entry_points(group=names.GROUP)}


def test_models_without_a_tower_are_left_alone(caplog) -> None:
    """No line for each text model: the plugin is in every server of its environment."""
    caplog.set_level(logging.DEBUG)
    for loaded in (nn.Linear(1, 1), SimpleNamespace(model=nn.Linear(1, 1), load_model=None), None):
        sglang_plugin.after_loading(None, loaded, "cpu")
    assert not caplog.messages


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("blocks.3.attn.qkv_proj.weight", "blocks.3.attn.qkv.weight"),
        ("blocks.3.mlp.linear_fc1.bias", "blocks.3.mlp.linear_fc1.bias"),
        ("merger.ln_q.weight", "merger.norm.weight"),
        ("merger.mlp.0.weight", "merger.linear_fc1.weight"),
        ("merger_list.1.mlp.2.bias", "deepstack_merger_list.1.linear_fc2.bias"),
        ("merger_list.0.ln_q", "deepstack_merger_list.0.norm"),
        ("deepstack_merger_list.2.linear_fc2.weight", "deepstack_merger_list.2.linear_fc2.weight"),
    ],
)
def test_names_are_hugging_faces(theirs, ours) -> None:
    assert our_name(theirs) == ours


@pytest.mark.parametrize(
    ("value", "config"),
    [
        ("", CompilationConfig(True)),
        ("off", CompilationConfig()),
        ("2048", CompilationConfig(True, (2048,))),
        (" 512, 128 ", CompilationConfig(True, (128, 512))),
        ("ladder:8", CompilationConfig(True, "ladder:8")),
    ],
)
def test_budgets_of_the_variable(value, config, monkeypatch) -> None:
    monkeypatch.setenv(names.BUDGETS, value)
    assert settings.read_budgets() == config
    monkeypatch.delenv(names.BUDGETS)
    assert settings.read_budgets() == CompilationConfig(True)


def test_budgets_of_a_file(tmp_path) -> None:
    """As the manager reads it; graphs are on where it does not say."""
    file = tmp_path / "graphs.json"
    fields = {"encoder_cudagraph_token_budgets": [64], "encoder_cudagraph_max_images_per_batch": 4}
    file.write_text(json.dumps(fields))
    assert settings.read_budgets(str(file)) == CompilationConfig(True, (64,), 4)
    file.write_text('{"cudagraph_mm_encoder": false}')
    assert settings.read_budgets(str(file)) == CompilationConfig()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("many", "'many' is none of"),
        ("64,x", "invalid literal"),
        ("64,-1", "-1 in [64, -1] is no positive integer"),
        ("missing.json", "No such file"),
        ("list.json", "list.json holds no JSON object"),
        ("field.json", "no field 'budgets'"),
    ],
)
def test_budgets_that_are_none(value, problem, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[64]")
    Path("field.json").write_text('{"budgets": [64]}')
    with pytest.raises(ValueError, match=names.BUDGETS) as error:
        settings.read_budgets(value)
    assert problem in str(error.value)


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS = Heads(8, 64, torch.bfloat16)


def test_attention_of_sglang_is_ours(monkeypatch) -> None:
    """The same backend; ours where FlashInfer does not serve; the measured one by default."""
    failing = {"flashinfer"}

    def capability(name, heads, device):
        assert (heads, device) == (HEADS, CUDA)
        return Capability(name, "fake", name not in failing, "is not installed")

    monkeypatch.setattr(backends, "capability", capability)
    ours = {asked: settings.choose_attention(asked, HEADS, CUDA) for asked in settings.ATTENTION}
    assert ours == {
        "fa3": "flash_attn",
        "fa4": "flash_attn",
        "flashinfer_cudnn": "triton",
        "triton_attn": "triton",
        "sdpa": "sdpa",
    }
    failing.clear()
    assert settings.choose_attention("flashinfer_cudnn", HEADS, CUDA) == "flashinfer"
    failing.update(("flashinfer", "triton"))
    with pytest.raises(ValueError, match=r"flashinfer_cudnn: .*'flashinfer': is not installed"):
        settings.choose_attention("flashinfer_cudnn", HEADS, CUDA)
    assert settings.choose_attention(None, HEADS, CUDA) == "auto"
    with pytest.raises(ValueError, match="--mm-attention-backend amx_attn has no counterpart"):
        settings.choose_attention("amx_attn", HEADS, CPU)


class Qwen3VLMoeVisionModel(nn.Module):
    """SGLang's interface on one of our encoders."""

    def __init__(self, encoder: Qwen3VLVisionEncoder) -> None:
        super().__init__()
        for name, part in encoder.named_children():
            self.add_module(name, part)
        vars(self).update(encoder.config.to_dict())
        self.dtype, self.device = encoder.dtype, encoder.device
        self.patch_embed.in_channels = encoder.config.in_channels
        for block in self.blocks:
            block.attn.tp_size = 1
            block.mlp.act = nn.GELU(approximate="tanh")

    def forward(self, x, grid_thw):
        return "SGLang's own"


@pytest.fixture
def tower(encoder) -> Qwen3VLMoeVisionModel:
    own = Qwen3VLVisionEncoder(encoder.config)
    own.load_state_dict(encoder.state_dict())
    return Qwen3VLMoeVisionModel(own)


@pytest.fixture
def plain_modules(monkeypatch) -> None:
    """Ours and this file's, in the place of SGLang's."""
    from vitgraph.graphs.sglang_plugin import tower as module

    monkeypatch.setattr(module, "ORIGINS", (*module.ORIGINS, "vitgraph.", __name__))


@pytest.mark.usefixtures("plain_modules")
def test_a_tower_is_served_and_outputs_are_its_callers_own(tower, encoder, batch) -> None:
    """KNOWN_FAILURES 44: the next replay leaves what was returned as it is."""
    config = CompilationConfig(True, (64, 128))
    adopt(tower, TowerService(tower, config, "auto", batch_invariant=False))
    assert isinstance(tower, ServedTower) and type(tower).__name__ == "Qwen3VLMoeVisionModel"
    one, other = batch([(1, 4, 6), (2, 2, 4)]), batch([(1, 4, 6), (2, 2, 4)])
    first = tower(one["pixel_values"], one["image_grid_thw"])
    kept = first.clone()
    second = tower(other["pixel_values"], grid_thw=torch.tensor(other["image_grid_thw"]))
    assert torch.equal(first, kept) and not torch.equal(first, second)
    torch.testing.assert_close(first, encoder(one["pixel_values"], one["image_grid_thw"]))
    counted = tower.vitgraph.manager.get_cumulative_stats()
    assert (counted["graph_hits"], counted["graph_misses"]) == (4, 0)


@pytest.mark.usefixtures("plain_modules")
def test_a_capture_that_fails_again_leaves_the_eager_encoder(
    tower, encoder, batch, monkeypatch, caplog
) -> None:
    service = TowerService(tower, CompilationConfig(True, (64,)), "auto", batch_invariant=False)
    adopt(tower, service)
    tower.pos_embed.weight.data = tower.pos_embed.weight.data.clone()

    def fail() -> None:
        raise RuntimeError("the device is busy")

    monkeypatch.setattr(service.manager, "capture", fail)
    grids = batch([(1, 4, 6)])
    rows = tower(grids["pixel_values"], grids["image_grid_thw"])
    torch.testing.assert_close(rows, encoder(grids["pixel_values"], grids["image_grid_thw"]))
    assert "the encoder runs eagerly from now on: the device is busy" in caplog.text
    assert not service.manager.is_captured()


def flags(**given) -> SimpleNamespace:
    return SimpleNamespace(**{"language_only": False, "mm_enable_dp_encoder": False, **given})


def test_who_serves(tower) -> None:
    """KNOWN_FAILURES 32: a sharded tower stays SGLang's."""
    assert serve.why_not_served(tower, flags()) is None
    assert "--language-only" in serve.why_not_served(tower, flags(language_only=True))
    assert "only decodes" in serve.why_not_served(tower, flags(disaggregation_mode="decode"))
    assert serve.why_not_served(tower, flags(disaggregation_mode="prefill")) is None
    for block in tower.blocks:
        block.attn.tp_size = 3
    reason = serve.why_not_served(tower, flags())
    assert reason == "its weights are sharded over 3 ranks: give --mm-enable-dp-encoder"
    reason = serve.why_not_served(tower, flags(mm_enable_dp_encoder=True))  # Omni ignores it
    assert reason == "its weights are sharded over 3 ranks"


def test_norms_of_another_device(tower) -> None:
    tower.blocks[1].norm2 = type("LayerNorm", (nn.LayerNorm,), {})(144)
    assert "its norms are LayerNorm" in serve.why_not_served(tower, flags())


def test_a_forward_of_its_own_is_left_alone(tower) -> None:
    """KNOWN_FAILURES 33: of a subclass; Qwen3-Omni's has none."""
    tower.__class__ = type("Omni", (type(tower),), {})
    assert serve.why_not_served(tower, flags()) is None
    tower.__class__ = type("Doubled", (type(tower),), {"forward": lambda self, x, grid_thw: 2 * x})
    assert serve.why_not_served(tower, flags()) == "it has a forward of its own"


def test_towers_are_found_anywhere_but_in_later_stages_of_a_pipeline(tower) -> None:
    model = nn.ModuleDict({"thinker": nn.ModuleDict({"visual": tower})})
    assert list(serve.find_towers(model)) == [tower]
    tower.pos_embed = type("PPMissingLayer", (nn.Identity,), {})()
    assert list(serve.find_towers(model)) == []


def test_a_tower_unlike_any_other_is_left_alone(tower, caplog) -> None:
    """KNOWN_FAILURES 27: SGLang goes on."""
    del tower.pos_embed
    serve.serve(nn.ModuleDict({"visual": tower}))
    (line,) = caplog.messages
    assert line.startswith("vitgraph: SGLang's own vision tower serves ModuleDict: ")


def test_a_tower_that_was_declined_for_a_while(tower, plain_modules, caplog, batch) -> None:
    """Said when it begins, and when it ends."""
    service = TowerService(tower, CompilationConfig(), "auto", False)
    call = batch([(1, 4, 4)])
    arguments = call["pixel_values"], call["image_grid_thw"]
    hook = tower.blocks[0].register_forward_hook(lambda *_: None)
    assert service.encode(*arguments) is None and service.encode(*arguments) is None
    hook.remove()
    assert service.encode(*arguments) is not None and service.encode(*arguments) is not None
    first, second = caplog.messages
    assert "SGLang's own vision tower serves: the tower's blocks.0 has 1 forward hook" in first
    assert second == "vitgraph serves the vision tower again"


def test_sglangs_tower_is_not_transformers(tower) -> None:
    """Of the same name."""
    with pytest.raises(ValueError, match="Qwen3VLMoeVisionModel is not transformers' tower"):
        replace_vision_tower(nn.ModuleDict({"visual": tower}))


@pytest.mark.parametrize(
    ("installed", "plugins", "disabled", "reason"),
    [
        (["vitgraph"], None, "0", None),
        (["vitgraph"], "", "0", None),
        (["vitgraph"], "a, vitgraph", "0", None),
        (["vitgraph"], "a", "0", "SGLANG_PLUGINS='a' does not name vitgraph"),
        (["vitgraph"], None, "1", "VITGRAPH_DISABLE is set"),
        ([], None, "0", "the plugin's entry point is not installed"),
    ],
)
def test_what_keeps_sglang_from_the_plugin(
    installed, plugins, disabled, reason, monkeypatch
) -> None:
    entries = [SimpleNamespace(name=name, value=report.PLUGIN) for name in installed]
    other = SimpleNamespace(name="a", value="a:register")
    monkeypatch.setattr(report, "entry_points", lambda group: [other, *entries])
    monkeypatch.setattr(report, "has_hooks", lambda: True)
    monkeypatch.setenv("VITGRAPH_DISABLE", disabled)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    assert report.why_not_loaded() == reason


def test_doctor_without_sglang_and_before_its_plugins(monkeypatch) -> None:
    def absent() -> str:
        raise PackageNotFoundError("sglang")

    monkeypatch.setattr(report, "_release", absent)
    assert report.report() == {"SGLang": "not installed"}
    monkeypatch.setattr(report, "_release", lambda: "0.5.10")
    monkeypatch.setattr(report, "has_hooks", lambda: False)
    assert report.report() == {
        "SGLang": "0.5.10",
        "tower": "SGLang's own: this release loads no plugins; 0.5.11 and later do",
    }


@pytest.mark.parametrize("target", names.TARGETS)
def test_doctor_with_a_hook(target, monkeypatch) -> None:
    monkeypatch.setattr(report, "_release", lambda: "0.5.20")
    monkeypatch.setattr(report, "why_not_loaded", lambda: None)
    monkeypatch.setattr(report, "find_target", lambda: target)
    monkeypatch.setenv(names.BUDGETS, "off")
    lines = report.report()
    assert lines["tower"].startswith("vitgraph, for Qwen3-VL")
    assert lines["graphs"] == f"off ({names.BUDGETS})"
    package = "SGLANG_EXTERNAL_MODEL_PACKAGE=vitgraph.graphs.sglang_plugin"
    assert (package in lines["encoder-only servers"]) == (target == names.AFTER_LOADING)
    monkeypatch.setattr(report, "find_target", lambda: None)
    assert report.report()["tower"] == (
        "SGLang's own: this release has no hook after loading that we know"
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("plain_modules")
def test_graphs_on_a_gpu(batch) -> None:
    """Real captures on a tower of SGLang's interface: own outputs, updated and moved weights."""
    from vitgraph.encoder import GEOMETRIES

    own = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"], device="cuda", dtype=torch.bfloat16)
    tower = Qwen3VLMoeVisionModel(own)
    service = TowerService(tower, CompilationConfig(True, (64, 256)), "triton", False)
    adopt(tower, service)
    inputs = batch([(1, 16, 16), (2, 8, 8)], device="cuda", dtype=torch.bfloat16)
    pixels, grids = inputs["pixel_values"], inputs["image_grid_thw"]
    with torch.inference_mode():
        first = tower(pixels, grids)
        kept = first.clone()
        tower(pixels * 2, grids)
        assert torch.equal(first, kept)
        tower.merger.linear_fc2.weight.data.mul_(0.5)
        assert relative_error(tower(pixels, grids), service.encoder(pixels, grids)) < 2e-2
        tower.merger.linear_fc1.weight.data = tower.merger.linear_fc1.weight.data.clone() * 8
        assert relative_error(tower(pixels, grids), service.encoder(pixels, grids)) < 2e-2
        assert relative_error(tower(pixels, grids), kept) > 0.2  # the weights are the new ones
    assert service.manager.get_cumulative_stats()["graph_misses"] == 0
