"""The plugin inside a real vLLM release: ranks, other weights and inputs, what stays with vLLM's
tower, doctor and benchmark. vllm_releases.py runs it."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm.model_executor.models.qwen3_vl as dense
import vllm.model_executor.models.qwen3_vl_moe as moe
import vllm.v1.worker.encoder_cudagraph as graphs
from vllm.config import set_current_vllm_config
from vllm_harness import (
    BUDGETS,
    ITEMS,
    MINOR,
    OF_THIS_RELEASE,
    RELEASE,
    VISION,
    Replay,
    captured_graphs,
    check,
    make_batch,
    replays,
    stub_capture,
    truth,
)

from vitgraph.graphs.vllm_plugin import MODELS, report
from vitgraph.graphs.vllm_plugin import models as ours
from vitgraph.graphs.vllm_plugin import wrapper as wrapper_module
from vitgraph.graphs.vllm_plugin.protocol import detect_shape


@pytest.mark.parametrize("items", [1, 3, 9], ids=lambda n: f"{n}_items")
def test_data_parallel(items, make_model, make_manager, monkeypatch) -> None:
    """KNOWN_FAILURES 7 and 32: four ranks, of which some have no items; heads do not matter."""
    ranks, calls = 4, {"rank": 0, "local": {}}

    def gather(rows, dim=0):
        calls["local"][calls["rank"]] = rows
        return torch.cat([calls["local"].get(r, torch.zeros_like(rows)) for r in range(ranks)])

    model = make_model(ranks=ranks)
    assert model.test_config.model_config.multimodal_config.mm_encoder_tp_mode == "data"
    assert model.use_data_parallel
    names = {
        "get_tensor_model_parallel_world_size": lambda: ranks,
        "get_tensor_model_parallel_rank": lambda: calls["rank"],
        "tensor_model_parallel_all_gather": gather,
    }
    from vllm.model_executor.models import vision

    for name, function in names.items():
        monkeypatch.setattr(graphs, name, function)
        monkeypatch.setattr(vision, name, function, raising=False)
    manager = make_manager(model)
    assert manager.use_dp
    grids = [(1, 4, 2 * n + 2) for n in range(items)]
    batch = make_batch(grids)
    expected = truth(model, batch["pixel_values"], grids)

    def eager():
        image = {"type": "pixel_values", "pixel_values": batch["pixel_values"]}
        return model._process_image_input(image | {"image_grid_thw": batch["image_grid_thw"]})

    for path in (lambda: manager.execute(dict(batch)), eager):
        calls["local"].clear()
        for _ in range(2):  # the second round sees what every rank has sent
            for calls["rank"] in range(ranks):
                outputs = path()
                if len(calls["local"]) == ranks and _ == 1:
                    check(outputs, expected)


def test_four_ranks(tmp_path) -> None:
    """KNOWN_FAILURES 7: vLLM's own sharding and gathering, and our own, a process a rank."""
    script = str(Path(__file__).with_name("vllm_ranks.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), "4", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, "\n".join(said)[-3000:]


@pytest.mark.parametrize("heads_divide", [True, False])
def test_weights_are_replicated(heads_divide, make_model, monkeypatch, caplog) -> None:
    """KNOWN_FAILURES 32: vLLM's layers believe in more ranks than there are heads, or in two."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import linear

    ranks = 2 if heads_divide else 3
    for module in (linear, parallel_state):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
    model = make_model(ranks=ranks)
    assert model.vitgraph is not None
    assert model.visual.blocks[0].attn.qkv.weight.shape == (3 * 144, 144)
    batch = make_batch([(1, 4, 4)])
    check([model.visual(*batch.values())], truth(model, batch["pixel_values"], [(1, 4, 4)]))
    if heads_divide:
        # Without that, the layers are split, which is seen and left to vLLM.
        monkeypatch.setattr(wrapper_module, "replicate_tower", lambda *_: ranks)
        split = make_model(ranks=ranks)
        assert split.visual.blocks[0].attn.qkv.weight.shape == (3 * 72, 144)
        assert split.vitgraph is None
        assert "has shape (288, 576), the config wants (576, 576)" in caplog.text


def test_weights_that_move(shared, caplog) -> None:
    """KNOWN_FAILURES 26: in place, graphs follow; elsewhere, packs run eagerly, never stale."""
    model, manager = shared
    batch = make_batch([(1, 4, 4)])
    pixels = batch["pixel_values"]
    with torch.no_grad():
        model.visual.merger.linear_fc2.bias.add_(1)
    check(manager.execute(batch), truth(model, pixels, [(1, 4, 4)]))
    assert (hits := replays(manager)) == 1
    for weight in model.visual.parameters():
        weight.data = weight.data * 1.1
    expected = truth(model, pixels, [(1, 4, 4)])
    check([model.visual(pixels, [[1, 4, 4]])], expected)
    if not detect_shape().item_specs:
        with pytest.raises(RuntimeError, match="the weights moved"):
            manager.execute(batch)
        return
    check(manager.execute(batch), expected)
    assert "the weights moved after the graphs were captured" in caplog.text
    assert replays(manager) == hits + 1  # of nothing
    model.vitgraph.capture_buffers(64, ITEMS, 64, torch.device("cpu"))
    assert model.vitgraph.why_not_replayable(pixels, [(1, 4, 4)]) is None
    # gone for a while, and back elsewhere
    weight = model.visual.merger.linear_fc2._parameters
    there, weight["bias"] = weight["bias"], None
    assert model.vitgraph.why_not_replayable(pixels, [(1, 4, 4)]) is not None
    weight["bias"] = there
    assert model.vitgraph.why_not_replayable(pixels, [(1, 4, 4)]) is None
    weight["bias"] = None
    model.vitgraph.refresh()
    weight["bias"] = torch.nn.Parameter(there.clone(), requires_grad=False)
    moved = "the weights moved after the graphs were captured"
    assert model.vitgraph.why_not_replayable(pixels, [(1, 4, 4)]) == moved


@pytest.mark.skipif(
    not getattr(ours.Qwen3VLForConditionalGeneration, "supports_mm_device_do_normalize", False),
    reason="vLLM 0.32 has it first",
)
def test_bytes_are_normalised_on_the_device(make_model, make_manager) -> None:
    """KNOWN_FAILURES 20: bytes are what is captured; other pixels are encoded, not truncated."""
    model = make_model(mm_device_do_normalize=True)
    assert model.vitgraph.pixel_normalization is not None
    manager = make_manager(model)
    for captured in captured_graphs(manager):
        assert captured.input_buffers["pixel_values"].dtype == torch.uint8
    grids = [(1, 4, 4), (1, 8, 8)]
    pixels = torch.randint(0, 256, (80, 1536), dtype=torch.uint8)
    expected = truth(model, pixels, grids)
    for form in (pixels, pixels.float()):
        batch = {"pixel_values": form, "image_grid_thw": torch.tensor(grids)}
        check(manager.execute(batch), expected)
        check([model.visual(form, grids)], [torch.cat(expected)])


def test_bytes_that_are_normal_already(model, make_manager) -> None:
    """Without vLLM's normalisation a byte is a number like another."""
    manager = make_manager(model)
    pixels = torch.randint(0, 3, (16, 1536), dtype=torch.uint8)
    batch = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    expected = truth(model, pixels.float(), [(1, 4, 4)])
    check([model.visual(pixels, [[1, 4, 4]])], expected)
    if detect_shape().item_specs:
        check(manager.execute(batch), expected)


def test_video_pruning_has_no_graphs(make_model, caplog) -> None:
    """KNOWN_FAILURES 25."""
    model = make_model(video_pruning_rate=0.5)
    assert model.vitgraph is not None
    assert not model.test_config.compilation_config.cudagraph_mm_encoder
    assert "no encoder graphs: video pruning" in caplog.text
    batch = make_batch([(3, 4, 4), (1, 8, 8)], "video")
    expected = truth(model, batch["pixel_values_videos"], [(3, 4, 4), (1, 8, 8)])
    check(model._process_video_input({"type": "pixel_values_videos", **batch}), expected)


@pytest.mark.skipif(MINOR < 26, reason="an earlier V2 runner is experimental")
def test_model_runners_with_graphs_are_recognised() -> None:
    """Field notes: the V2 runner has encoder graphs since 0.28."""
    assert wrapper_module.new_runner_has_graphs() == (MINOR >= 28)


def test_tower_lora_is_left_to_vllm(make_model, monkeypatch, caplog) -> None:
    """KNOWN_FAILURES 24."""
    model = make_model(lora=True, ranks=2)
    assert model.vitgraph is None
    assert type(model.visual) is dense.Qwen3_VisionTransformer
    assert model.test_config.model_config.multimodal_config.mm_encoder_tp_mode == "weights"
    assert not model.test_config.compilation_config.cudagraph_mm_encoder
    assert "vLLM's own vision tower serves" in caplog.text
    assert "no encoder graphs: packing reorders items" in caplog.text
    assert "TRITON_ATTN is vLLM's own" not in caplog.text
    enum = type(model.visual.attn_backend)
    vision = "vllm.model_executor.models.qwen3_vl.get_vit_attn_backend"
    monkeypatch.setattr(vision, lambda *_, **__: enum.TRITON_ATTN)
    make_model(lora=True)
    assert "TRITON_ATTN is vLLM's own then, and slow" in caplog.text


def test_quantised_tower_is_left_to_vllm(make_model, monkeypatch, caplog) -> None:
    class Fp8LinearMethod:
        """Known by its name."""

    made = dense.Qwen3_VisionTransformer.__init__

    def quantised(tower, *args, **kwargs) -> None:
        made(tower, *args, **kwargs)
        tower.blocks[0].mlp.linear_fc1.quant_method = Fp8LinearMethod()

    monkeypatch.setattr(dense.Qwen3_VisionTransformer, "__init__", quantised)
    model = make_model()
    assert model.vitgraph is None
    assert "the tower is quantised (blocks.0.mlp.linear_fc1: Fp8LinearMethod)" in caplog.text
    # vLLM's own protocol goes through the wrapper untouched.
    assert "cu_seqlens" in model.get_encoder_cudagraph_config().buffer_keys


@pytest.mark.parametrize("video", [False, True], ids=["image", "video"])
def test_vllms_own_tower_through_the_wrapper(video, model) -> None:
    """Every method of the wrapper hands over to vLLM's where ours does not serve."""
    model.visual.__class__ = dense.Qwen3_VisionTransformer
    model.vitgraph = None
    with set_current_vllm_config(model.test_config):
        manager = graphs.EncoderCudaGraphManager(
            model.test_config, torch.device("cpu"), torch.float32, model
        )
        batch = make_batch([(1, 4, 4)], "video" if video else "image")
        assert model.get_encoder_cudagraph_config().buffer_keys != ["pixel_values", "grid_thw"]
        shape = wrapper_module.detect_shape()
        extra = (["default"] if shape.paths else []) + ([()] if shape.axis_keys else [])
        inputs = model.prepare_encoder_cudagraph_capture_inputs(
            64, ITEMS, 64, torch.device("cpu"), torch.float32, *extra
        )
        assert hasattr(inputs, "values") == shape.merged_values
        selected = model.select_encoder_cudagraph_items(batch, [0])
        replay = model.prepare_encoder_cudagraph_replay_buffers(selected, ITEMS, 64)
        values = replay.values if shape.merged_values else replay.buffers
        assert "cu_seqlens" in values
    assert manager.token_budgets == BUDGETS


def test_an_import_that_fails_leaves_vllms_model(monkeypatch, caplog) -> None:
    """KNOWN_FAILURES 27."""
    import sys

    plugin = sys.modules["vitgraph.graphs.vllm_plugin"]
    monkeypatch.setattr(plugin, "models", ours)  # what the import below replaces, and is undone
    monkeypatch.setitem(sys.modules, "vitgraph.graphs.vllm_plugin.wrapper", None)
    monkeypatch.delitem(sys.modules, MODELS)
    broken = importlib.import_module(MODELS)
    for _ in range(2):
        assert broken.Qwen3VLForConditionalGeneration is dense.Qwen3VLForConditionalGeneration
    lines = [r for r in caplog.records if "vLLM's own vision tower serves" in r.getMessage()]
    assert len(lines) == 1
    assert broken.Qwen3VLMoeForConditionalGeneration is moe.Qwen3VLMoeForConditionalGeneration
    with pytest.raises(AttributeError, match="has no attribute 'Qwen2VL"):
        broken.Qwen2VLForConditionalGeneration  # noqa: B018 - it raises


def test_doctor(monkeypatch) -> None:
    """KNOWN_FAILURES 27: what would serve can be asked for."""
    plugin = SimpleNamespace(name="vitgraph", value="vitgraph.graphs.vllm_plugin:register")
    monkeypatch.setattr(report, "entry_points", lambda group: [plugin])
    monkeypatch.setenv("VLLM_PLUGINS", "other,vitgraph")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    lines = report.report()
    assert lines["vLLM"] == RELEASE
    assert lines["tower"] == f"vitgraph, for {', '.join(OF_THIS_RELEASE)}"
    assert lines["protocol"] == f"encoder graphs of vLLM {detect_shape().releases}"
    assert "TORCH_SDPA -> sdpa (eager)" in lines["attention"]
    assert lines["kernels"] == "torch on cpu"
    assert lines["metrics"] == "vitgraph_encoder_* on vLLM's /metrics"
    none = "; V2 of this release has no encoder graphs: set VLLM_USE_V2_MODEL_RUNNER=0"
    mixed = "V2 for dense models, V1 for MoE and Qwen3.5"
    by_default = (
        "V1" if MINOR < 25 else mixed + (none if MINOR < 28 else "") if MINOR < 29 else "V2"
    )
    assert lines["model runner"] == by_default
    on_v1 = " or, on V1, with cudagraph_mode NONE"
    assert lines["graphs"].endswith("none with --enforce-eager" + (on_v1 if MINOR < 29 else ""))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert report.report()["model runner"] == "V1"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert report.report()["model runner"] == "V2" + (none if MINOR < 28 else "")
    name = "Qwen3VLForConditionalGeneration"
    getattr(ours, name)  # made, so that it is there to be put back
    monkeypatch.setattr(ours, name, dense.Qwen3VLForConditionalGeneration)
    assert "cannot be imported" in report.report()["tower"]
    monkeypatch.setenv("VITGRAPH_DISABLE", "1")
    assert report.report() == {
        "vLLM": RELEASE,
        "tower": "vLLM's own: VITGRAPH_DISABLE is set",
    }


@pytest.mark.parametrize("plugins", [None, "", "vitgraph", "a,vitgraph", "a, vitgraph", "a"])
def test_doctor_knows_what_vllm_loads(plugins, monkeypatch) -> None:
    """vLLM's own loader, told by the environment which plugins to load."""
    import importlib.metadata

    from vllm.plugins import load_plugins_by_group

    entry = importlib.metadata.EntryPoint("vitgraph", report.PLUGIN, "vllm.general_plugins")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    monkeypatch.setattr(report, "entry_points", lambda group: [entry])
    if plugins is None:
        monkeypatch.delenv("VLLM_PLUGINS")
    else:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    reason = report.why_not_loaded()
    assert ("vitgraph" in load_plugins_by_group("vllm.general_plugins")) == (reason is None)
    assert reason in (None, f"VLLM_PLUGINS={plugins!r} does not name vitgraph")


@pytest.mark.skipif(MINOR < 22, reason="vLLM 0.22 is the first to choose a model runner by itself")
@pytest.mark.parametrize("asked", [None, "0", "1"])
@pytest.mark.parametrize("architecture", report.V2_SINCE)
def test_doctor_knows_which_model_runner_vllm_takes(architecture, asked, monkeypatch) -> None:
    import vllm.config.vllm as configuration

    class Model(SimpleNamespace):
        """A model that generates text and asks for nothing else."""

        def __getattr__(self, name: str) -> None:
            return None

    monkeypatch.setattr(configuration, "HAS_TRITON", True)
    if asked is None:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    else:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    config = configuration.VllmConfig()
    config.model_config = Model(
        architectures=[architecture],
        runner_type="generate",
        is_moe="Moe" in architecture,
        is_hybrid="Qwen3_5" in architecture,
    )
    assert (report.runner(architecture) == "V2") == config.use_v2_model_runner


@pytest.mark.skipif(MINOR < 23, reason="the benchmark is for vLLM's manager as of 0.23")
def test_the_benchmark_runs_vllms_tower(monkeypatch) -> None:
    """`vitgraph bench`: the same weights under vLLM's own tower and manager, without an engine."""
    stub_capture(monkeypatch)
    from vitgraph.bench import families, systems
    from vitgraph.bench.workloads import make_batch
    from vitgraph.encoder import Qwen3VLVisionEncoder, VisionConfig

    class RealRows(Replay):
        """Without a GPU vLLM's attention takes no rows behind the last sequence."""

        @torch.inference_mode()
        def replay(self) -> None:
            inputs = self.arguments[0]
            count = inputs["cu_seqlens"][-1]
            cut = {k: v[:count] if v is not None and v.ndim == 2 else v for k, v in inputs.items()}
            rows = self.model.encoder_cudagraph_forward(cut)
            self.output.fill_(float("nan"))
            self.output[: len(rows)].copy_(rows)

    capture = graphs.EncoderCudaGraphManager.capture

    def capture_and_stand_in(manager, pool) -> None:
        capture(manager, pool)
        for captured in captured_graphs(manager):
            arguments = (captured.input_buffers,)
            captured.graph = RealRows(manager.model, arguments, captured.output_buffer)

    monkeypatch.setattr(graphs.EncoderCudaGraphManager, "capture", capture_and_stand_in)
    encoder = Qwen3VLVisionEncoder.random(VisionConfig.from_dict(VISION))
    setup = systems.Setup(encoder, tuple(BUDGETS), ITEMS, backends=("TORCH_SDPA", "NOSUCH"))
    found, missing = families.build(setup, ["vllm"])
    assert list(missing) == ["vllm NOSUCH"], missing
    assert [system.name for system in found] == ["vllm TORCH_SDPA eager", "vllm TORCH_SDPA graph"]
    for grids, budgets in (
        ([(1, 8, 12), (1, 4, 6)], [64]),
        ([(3, 4, 6)], [64]),
        ([(1, 16, 16)] * 10, [512, 128]),
        ([(1, 2, 1026), (1, 4, 4)], [64, None]),
    ):
        batch = make_batch(encoder, grids)
        expected = encoder(batch.pixels, batch.grids)
        for system in found:
            torch.testing.assert_close(
                systems.rows(system.encode(batch)), expected, rtol=1e-4, atol=1e-4
            )
        assert [budget for budget, _ in found[1].replays(batch)] == budgets


def test_what_is_put_on_modules_after_loading_runs(shared, caplog) -> None:
    """KNOWN_FAILURES 33: vLLM's own tower serves then, in packs too; eps is followed."""
    model, manager = shared
    batch, grids = make_batch([(1, 4, 4)]), [(1, 4, 4)]
    pixels, called = batch["pixel_values"], []
    check(manager.execute(dict(batch)), truth(model, pixels, grids))
    model.visual.blocks[0].norm1.eps = 0.5
    expected = truth(model, pixels, grids)
    check([model.visual(pixels, [[1, 4, 4]])], expected)
    hook = model.visual.blocks[0].norm1.register_forward_hook(lambda *_: called.append(1))
    with set_current_vllm_config(model.test_config):
        check([model.visual(pixels, [[1, 4, 4]])], expected)
        assert called == [1]
        if detect_shape().item_specs:
            check(manager.execute(dict(batch)), expected)
            assert called == [1, 1]
    assert "the tower's blocks.0.norm1 has 1 forward hook" in caplog.text
    hook.remove()
    check([model.visual(pixels, [[1, 4, 4]])], expected)
    block = model.visual.blocks[0]
    block.mlp.linear_fc1 = torch.nn.Sequential(block.mlp.linear_fc1)
    assert not model.vitgraph.refresh()
    assert "parameters differ in blocks.0.mlp.linear_fc1.0" in caplog.text


def test_fewer_pixel_rows_than_the_grids_say(shared) -> None:
    """KNOWN_FAILURES 30: in a graph the rows of the batch before would be read."""
    _, manager = shared
    batch = make_batch([(1, 8, 8)])
    manager.execute(dict(batch))
    batch["pixel_values"] = batch["pixel_values"][:-4]
    with pytest.raises(ValueError, match=r"item 0 with grid \(1, 8, 8\) needs rows 0\.\.63"):
        manager.execute(batch)


@pytest.mark.skipif(not detect_shape().item_specs, reason="nothing is called after a replay")
@pytest.mark.parametrize("handed_back", ["a_copy", "nothing"])
def test_a_declined_pack_that_comes_back_as_a_copy(handed_back, shared) -> None:
    """KNOWN_FAILURES 41: its rows, not those of the empty replay."""
    model, manager = shared
    batch = make_batch([(1, 4, 4)])
    for weight in model.visual.parameters():
        weight.data = weight.data * 1.1
    own = model.postprocess_encoder_output

    def hand_back(*arguments, batch_mm_kwargs=None, **keywords):
        copied = {k: v.clone() for k, v in batch_mm_kwargs.items() if isinstance(v, torch.Tensor)}
        copied = {**batch_mm_kwargs, **copied} if handed_back == "a_copy" else None
        return own(*arguments, batch_mm_kwargs=copied, **keywords)

    model.postprocess_encoder_output = hand_back
    if handed_back == "nothing":
        with pytest.raises(RuntimeError, match="did not hand back the pack that was declined"):
            manager.execute(dict(batch))
    else:
        expected = truth(model, batch["pixel_values"], [(1, 4, 4)])
        check(manager.execute(dict(batch)), expected)


@pytest.mark.parametrize("where", ["replicate_tower", "why_no_graphs", "why_not_served"])
def test_a_vllm_without_a_field_that_is_read(where, make_model, monkeypatch, caplog) -> None:
    """KNOWN_FAILURES 27: its own tower, or no graphs, with the reason; the engine lives."""

    def fail(*_):
        raise AttributeError("'VllmConfig' object has no attribute 'moved_elsewhere'")

    monkeypatch.setattr(wrapper_module, where, fail)
    model = make_model()
    assert (model.vitgraph is None) == (where != "why_no_graphs")
    assert "AttributeError: 'VllmConfig' object has no attribute 'moved_elsewhere'" in caplog.text


def test_a_promise_of_bits_is_kept_or_not_made(make_model, monkeypatch, caplog) -> None:
    """KNOWN_FAILURES 42: on the CPU by vLLM's own tower."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert make_model().vitgraph is None
    assert "VLLM_BATCH_INVARIANT needs kernels of a GPU" in caplog.text


@pytest.mark.skipif(MINOR < 33, reason="a field of later releases")
def test_compilation_of_the_tower_is_said_to_be_without_effect(make_model, caplog) -> None:
    """KNOWN_FAILURES 42."""
    from vllm.config import CompilationConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompilationConfig, "compile_mm_encoder", True, raising=False)
        made = CompilationConfig.__init__

        def compiled(self, *arguments, **keywords) -> None:
            made(self, *arguments, **keywords | {"compile_mm_encoder": True})

        patch.setattr(CompilationConfig, "__init__", compiled)
        assert make_model().vitgraph is not None
    assert "compile_mm_encoder has no effect" in caplog.text
