"""The plugin inside a real SGLang release: hooks, towers, weights, reasons to decline.
sglang_releases.py runs it.

SGLang's own tower, run eagerly by its own code in float32 on the same weights, is the truth that
outputs are compared with. Models are built without their language models, as encoder-only servers
do it. Nothing is captured on a CPU: a replay runs the captured forward again.
"""

import itertools
import logging
import socket
from types import SimpleNamespace

import pytest
import sglang.srt.models.qwen3_vl as dense
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.qwen3_5 import Qwen3_5Config, Qwen3_5MoeConfig
from sglang.srt.configs.qwen3_omni import Qwen3OmniMoeThinkerConfig
from sglang.srt.configs.qwen3_vl import Qwen3VLConfig, Qwen3VLMoeConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers import dp_attention
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.models import qwen3_5, qwen3_omni_moe, qwen3_vl_moe
from sglang.srt.models.registry import import_model_classes
from sglang.srt.plugins import hook_registry, load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__ as RELEASE

from vitgraph.bench.dummy_model import write_model
from vitgraph.bench.exactness import relative_error
from vitgraph.encoder import GEOMETRIES
from vitgraph.graphs import sglang_plugin
from vitgraph.graphs.linears import FP8_SKIP_BLOCKS, LINEAR_DTYPE
from vitgraph.graphs.sglang_plugin import names, report
from vitgraph.graphs.sglang_plugin.tower import ServedTower, read_config

NEW = tuple(map(int, RELEASE.split(".")[:3])) >= (0, 5, 18)
VISION = GEOMETRIES["tiny"].to_dict()
ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}
TEXT = {
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "pad_token_id": 0,
    "rope_scaling": ROPE,
}
AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
NO_LEVELS = {**VISION, "deepstack_visual_indexes": []}
FAMILIES = {
    "qwen3_vl": (dense.Qwen3VLForConditionalGeneration, Qwen3VLConfig, VISION),
    "qwen3_vl_moe": (qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig, VISION),
    "qwen3_5": (qwen3_5.Qwen3_5ForConditionalGeneration, Qwen3_5Config, NO_LEVELS),
    "qwen3_5_moe": (qwen3_5.Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig, NO_LEVELS),
    "qwen3_omni": (
        qwen3_omni_moe.Qwen3OmniMoeThinkerForConditionalGeneration,
        Qwen3OmniMoeThinkerConfig,
        VISION,
    ),
}
BATCHES = {
    "one_image": [[(1, 8, 12)]],
    "several_images": [[(1, 4, 4)], [(1, 16, 8), (1, 2, 24)], [(1, 20, 20)]],
    "above_every_budget": [[(1, 4, 6)], [(1, 2, 1026)]],
    "video": [[(3, 4, 6)], [(70, 2, 4)]],
}


@pytest.fixture(scope="session", autouse=True)
def _process(tmp_path_factory) -> None:
    """Make this process SGLang's only rank."""
    folder = write_model(tmp_path_factory.mktemp("model"), "tiny")
    args = ServerArgs(model_path=str(folder), device="cpu", dtype="float32")
    if hasattr(runtime_context, "publish"):
        runtime_context.publish(args, role="encoder")
    else:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(args)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=rendezvous
    )
    parallel = runtime_context.get_parallel()
    if hasattr(parallel, "override_permanently"):
        ranks = ("tp", "pp", "attn_dp", "attn_tp", "attn_cp", "moe_ep", "moe_dp")
        sizes = ("pp", "attn_dp", "attn_tp", "attn_dcp", "moe_ep", "moe_tp")
        parallel.override_permanently(
            **{f"{name}_rank": 0 for name in ranks if name != "moe_dp"},
            **{f"{name}_size": 1 for name in sizes},
        )
    initialize_model_parallel()
    if hasattr(dp_attention, "initialize_dp_attention_flags"):
        dp_attention.initialize_dp_attention_flags(args)


@pytest.fixture
def flags(monkeypatch) -> SimpleNamespace:
    """What the server was started with."""
    found = SimpleNamespace(
        mm_attention_backend=None,
        mm_enable_dp_encoder=False,
        language_only=False,
        enable_deterministic_inference=False,
    )
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: found)
    monkeypatch.setenv(names.BUDGETS, "64,128,512")
    return found


@pytest.fixture(autouse=True)
def _log(caplog) -> None:
    caplog.set_level(logging.INFO, logger="vitgraph.sglang")


def build(family: str = "qwen3_vl") -> torch.nn.Module:
    """A model as SGLang builds it, its tower with random weights: norms near one, attention sharp
    enough that every part of a score matters."""
    model_class, config_class, vision = FAMILIES[family]
    keywords = {"audio_config": AUDIO} if family == "qwen3_omni" else {}
    config = config_class(text_config=dict(TEXT), vision_config=dict(vision), **keywords)
    config.architectures, config.encoder_only = [model_class.__name__], True
    if config_class is Qwen3VLConfig:  # SGLang lifts the text's fields when it reads a config.json
        for name, value in TEXT.items():
            setattr(config, name, value)
    model = model_class(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.visual.named_parameters():
            weight.normal_(std=0.2 if "qkv" in name else 0.05, generator=generator)
            if ("norm" in name or "ln_q" in name) and name.endswith("weight"):
                weight.add_(1)
    return model.eval()


def serve(model: torch.nn.Module) -> torch.nn.Module:
    sglang_plugin.after_loading(None, model, "cpu")
    return model


@pytest.fixture
def model(flags) -> torch.nn.Module:
    found = serve(build())
    assert isinstance(found.visual, ServedTower)
    return found


def pixels_for(grids) -> torch.Tensor:
    rows = sum(t * h * w for t, h, w in grids)
    return torch.randn(rows, 1536, generator=torch.Generator().manual_seed(rows))


def truth(tower, pixels, grids) -> torch.Tensor:
    """SGLang's own forward."""
    with torch.no_grad():
        return dense.Qwen3VLMoeVisionModel.forward(tower, pixels, torch.tensor(grids))


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Two float32 evaluations: within 1e-4 of the largest value, 1e-5 in the mean. Single values
    differ by what the processor's kernels make of a sum."""
    largest = expected.abs().amax()
    assert actual.shape == expected.shape and largest > 0.1
    torch.testing.assert_close(actual / largest, expected / largest, atol=1e-4, rtol=0)
    assert (actual - expected).norm() < 1e-5 * expected.norm()


def check_one(model, grids=((1, 8, 12), (2, 4, 6))) -> None:
    grids = list(grids)
    pixels = pixels_for(grids)
    check(model.visual(pixels, grid_thw=torch.tensor(grids)), truth(model.visual, pixels, grids))


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_sglangs_own_tower(family, flags, caplog) -> None:
    """Through the calls that SGLang makes; each item is one request's images or videos."""
    model = build(family)
    own, keys = type(model.visual), list(model.visual.state_dict())
    serve(model)
    said = f"vitgraph serves the vision tower of {type(model).__name__}: attention sdpa (auto)"
    assert said in caplog.text and "graphs on: 64, 128, 512 tokens" in caplog.text
    tower = type(model.visual)
    assert issubclass(tower, (ServedTower, own))
    assert (tower.__name__, tower.__module__) == (own.__name__, own.__module__)
    assert list(model.visual.state_dict()) == keys
    for name, items in BATCHES.items():
        key = "video_grid_thw" if name == "video" else "image_grid_thw"
        batch = [
            MultimodalDataItem(
                modality=Modality.VIDEO if name == "video" else Modality.IMAGE,
                feature=pixels_for(grids),
                model_specific_data={key: torch.tensor(grids)},
            )
            for grids in items
        ]
        encode = model.get_video_feature if name == "video" else model.get_image_feature
        pixels = torch.cat([item.feature for item in batch])
        with torch.inference_mode():
            rows = encode(batch)
        check(rows, truth(model.visual, pixels, list(itertools.chain(*items))))
    counted = model.visual.vitgraph.manager.get_cumulative_stats()
    assert (counted["graph_hits"], counted["graph_misses"]) == (8, 1)
    assert counted["misses_by_reason"] == {"too_large": 1}


def test_the_config_is_read_from_the_tower(flags) -> None:
    for family, (_, _, vision) in FAMILIES.items():
        assert read_config(build(family).visual).to_dict() == vision


def test_sglang_knows_the_model_as_its_own(model) -> None:
    """What it decides by class names: pixels of all requests are moved to the GPU at once."""
    for module in ("mm_schedule", "mm_utils"):
        try:
            managers = __import__(f"sglang.srt.managers.{module}", fromlist=["_"])
            can_skip = managers._can_skip_pre_embed_feature_move
        except (ImportError, AttributeError):
            continue
        assert can_skip(model.get_image_feature)
        return
    pytest.fail("SGLang decides this elsewhere now")


def test_outputs_are_the_callers_own(model) -> None:
    """KNOWN_FAILURES 44: SGLang's embedding cache keeps them."""
    grids = [(1, 8, 12)]
    pixels = pixels_for(grids)
    first = model.visual(pixels, torch.tensor(grids))
    kept = first.clone()
    model.visual(pixels * 2, torch.tensor(grids))
    assert torch.equal(first, kept)


def test_updated_weights_are_seen(model) -> None:
    """Through SGLang's own loader, from Hugging Face's names, in place."""
    other = build()
    with torch.no_grad():
        for weight in other.visual.parameters():
            weight.mul_(0.9)
    checkpoint = {
        f"model.visual.{name}".replace("qkv_proj", "qkv"): weight.clone()
        for name, weight in other.visual.named_parameters()
    }
    check_one(model)
    model.load_weights(iter(checkpoint.items()))
    grids = [(1, 8, 12)]
    pixels = pixels_for(grids)
    check(model.visual(pixels, torch.tensor(grids)), truth(other.visual, pixels, grids))


def test_moved_weights_are_followed(model, caplog) -> None:
    """KNOWN_FAILURES 26: graphs of before are captured again, in inference mode, too."""
    check_one(model)
    weight = model.visual.blocks[1].mlp.linear_fc1.weight
    weight.data = weight.data.clone() * 0.5
    with torch.inference_mode():
        check_one(model)
    assert "weights moved: encoder graphs are captured again" in caplog.text
    assert model.visual.vitgraph.manager.is_captured()
    caplog.clear()
    check_one(model)
    assert not caplog.text


def test_rotary_tables_of_sglangs_may_grow(model, caplog) -> None:
    """SGLang replaces them after loading; ours are our own."""
    model.visual.rotary_pos_emb.cos_sin_cache = model.visual.rotary_pos_emb.cos_sin_cache.clone()
    check_one(model)
    assert "moved" not in caplog.text


def test_what_is_put_on_the_tower_later_is_not_left_out(model, caplog) -> None:
    """KNOWN_FAILURES 33: SGLang's own forward runs the modules, until it is gone."""
    calls = []
    layer = model.visual.blocks[0].mlp.linear_fc1
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        check_one(model)
    assert len(calls) == 4  # ours and the truth's, twice
    assert caplog.text.count("blocks.0.mlp.linear_fc1 has 1 forward hook") == 1
    manager = model.visual.vitgraph.manager
    assert manager.get_cumulative_stats()["batches"] == 0
    handle.remove()
    check_one(model)
    assert manager.get_cumulative_stats()["batches"] == 1
    model.visual.blocks[0].norm1.eps = 0.1  # is followed
    check_one(model)


def fake_quantised(model, flags) -> None:
    model.visual.blocks[0].mlp.linear_fc1.quant_method = type("Fp8LinearMethod", (), {})()


def fake_ranks(model, flags) -> None:
    model.visual.blocks[0].attn.tp_size = 2


def other_activation(model, flags) -> None:
    model.visual.blocks[1].mlp.act = torch.nn.GELU()


REASONS = {
    "language_only": (
        lambda model, flags: setattr(flags, "language_only", True),
        "this server leaves the encoding to others (--language-only)",
    ),
    "quantised": (fake_quantised, "quantised (blocks.0.mlp.linear_fc1: Fp8LinearMethod)"),
    "sharded": (fake_ranks, "sharded over 2 ranks: give --mm-enable-dp-encoder"),
    "other_activation": (other_activation, "blocks.1.mlp.act is GELU"),
    "no_counterpart": (
        lambda model, flags: setattr(flags, "mm_attention_backend", "aiter_attn"),
        "--mm-attention-backend aiter_attn has no counterpart",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_sglangs_own_tower_is_kept(case, flags, caplog) -> None:
    spoil, reason = REASONS[case]
    model = build()
    own = type(model.visual)
    spoil(model, flags)
    serve(model)
    assert type(model.visual) is own
    (line,) = [r.message for r in caplog.records if r.name == "vitgraph.sglang"]
    assert line.startswith(f"vitgraph: SGLang's own vision tower serves {type(model).__name__}: ")
    assert reason in line


def test_budgets_that_are_none(flags, caplog, monkeypatch) -> None:
    monkeypatch.setenv(names.BUDGETS, "many")
    model = serve(build())
    assert not isinstance(model.visual, ServedTower)
    assert f"{names.BUDGETS}: encoder_cudagraph_token_budgets: 'many' is none of" in caplog.text


def test_layers_in_fp8(flags, caplog, monkeypatch) -> None:
    """Of the last block; attention is sharp in the others, and amplifies what came before."""
    monkeypatch.setenv(LINEAR_DTYPE, "fp8")
    monkeypatch.setenv(FP8_SKIP_BLOCKS, "3")
    model = serve(build())
    assert "attention sdpa (auto), fp8 (first 3 blocks in float32), graphs on" in caplog.text
    grids = [(1, 8, 12), (2, 4, 6)]
    pixels = pixels_for(grids)
    before = model.visual(pixels, torch.tensor(grids))
    found = relative_error(before, truth(model.visual, pixels, grids))
    # in place, as SGLang updates weights
    model.visual.blocks[3].attn.qkv_proj.weight.data.neg_()
    after = model.visual(pixels, torch.tensor(grids))
    expected = truth(model.visual, pixels, grids)
    print(f"{found:.3f}, then {relative_error(after, expected):.3f}")
    assert 3e-3 < found < 0.1 and relative_error(after, expected) < 0.1
    assert relative_error(before, expected) > 0.3


def test_fp8_that_cannot_be_had_is_named(flags, caplog, monkeypatch) -> None:
    monkeypatch.setenv(LINEAR_DTYPE, "fp8")
    monkeypatch.setenv(FP8_SKIP_BLOCKS, "4")
    check_one(serve(build()))
    assert "no FP8, the layers keep the tower's dtype: VITGRAPH_LINEAR_DTYPE=fp8" in caplog.text
    assert "fp8_skip_blocks 4 must be an integer from 0 to 3" in caplog.text


def test_attention_of_the_flag(flags, caplog) -> None:
    """`triton_attn` is our kernel, here in Triton's interpreter."""
    flags.mm_attention_backend = "triton_attn"
    model = serve(build())
    assert "attention triton (triton)" in caplog.text
    check_one(model, [(1, 4, 4)])


def _registered(target: str) -> tuple:
    """(hook, type) of the only hook on a target."""
    ((kind, hook, _),) = hook_registry.HookRegistry._hooks[target]
    return hook, kind


def test_hooked_by_sglangs_registry(flags, monkeypatch) -> None:
    """The entry point as pip installed it, what SGLang patches, and twice is once."""
    import sglang.srt.plugins as plugins

    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    load_plugins()
    target = names.find_target()
    assert target == (names.AFTER_LOADING if NEW else names.LOAD_MODEL)
    assert target in hook_registry.HookRegistry._patched
    model = build()
    if NEW:
        from sglang.srt.model_executor import model_runner

        for _ in range(2):
            model_runner.maybe_precompile_model_kernels_after_loading(model, "cpu")
    else:
        hooked = hook_registry._wrap_fn(lambda runner: None, *_registered(target))
        hooked(SimpleNamespace(model=model, load_model=hooked))
    assert isinstance(model.visual, ServedTower)
    check_one(model)


@pytest.mark.skipif(not NEW, reason="these releases tell no model that it was loaded")
def test_external_package(flags, monkeypatch) -> None:
    """Encoder-only servers load no plugins, and take their models from it."""
    from sglang.srt.model_executor.model_runner_components import load_model_utils

    classes = import_model_classes("vitgraph.graphs.sglang_plugin")
    assert classes.keys() > {model.__name__ for model, _, _ in list(FAMILIES.values())[:4]}
    ours = classes["Qwen3VLForConditionalGeneration"]
    assert issubclass(ours, dense.Qwen3VLForConditionalGeneration)
    monkeypatch.setitem(FAMILIES, "qwen3_vl", (ours, *FAMILIES["qwen3_vl"][1:]))
    model = build()
    load_model_utils.maybe_precompile_model_kernels_after_loading(model, "cpu")
    assert isinstance(model.visual, ServedTower)
    check_one(model)


def test_doctor(monkeypatch) -> None:
    for variable in ("SGLANG_PLUGINS", LINEAR_DTYPE):
        monkeypatch.delenv(variable, raising=False)
    lines = report.report()
    assert lines["SGLang"] == RELEASE
    assert lines["tower"].startswith("vitgraph, for Qwen3-VL, Qwen3.5")
    assert ("SGLANG_EXTERNAL_MODEL_PACKAGE=" in lines["encoder-only servers"]) == NEW
    assert "sdpa -> sdpa (eager)" in lines["attention"]
    assert lines["graphs"].startswith("on, budgets powers of two")
    assert lines["layers"] == "in the tower's dtype; VITGRAPH_LINEAR_DTYPE=fp8 for FP8"
    monkeypatch.setenv(LINEAR_DTYPE, "fp8")
    assert report.report()["layers"] == "fp8"
