"""The plugin inside a real vLLM release, without a GPU: see vllm_releases.py, which runs this file.

vLLM's own tower, run by its own code on the same weights, is the truth that outputs are compared
with. Capture is the one thing that is not real: a replay runs the captured forward again.
"""

import functools
import logging
import subprocess
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm_releases

vllm_releases.install()

import vllm.model_executor.models.qwen3_vl as dense  # noqa: E402
import vllm.model_executor.models.qwen3_vl_moe as moe  # noqa: E402
import vllm.v1.worker.encoder_cudagraph as graphs  # noqa: E402
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig  # noqa: E402
from vllm import ModelRegistry  # noqa: E402
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.config.multimodal import MultiModalConfig  # noqa: E402
from vllm.distributed import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.distributed.device_communicators import shm_broadcast  # noqa: E402
from vllm.model_executor.models.interfaces import supports_encoder_cudagraph  # noqa: E402
from vllm.version import __version__ as RELEASE  # noqa: E402

from vitgraph.graphs.vllm_plugin import ARCHITECTURES, MODELS, register  # noqa: E402
from vitgraph.graphs.vllm_plugin import models as ours  # noqa: E402
from vitgraph.graphs.vllm_plugin import tower as tower_module  # noqa: E402
from vitgraph.graphs.vllm_plugin import wrapper as wrapper_module  # noqa: E402
from vitgraph.graphs.vllm_plugin.protocol import detect_shape  # noqa: E402

MINOR = int(RELEASE.split(".")[1])
BUDGETS, ITEMS = [64, 128, 512], 8
VISION = dict(
    depth=4,
    hidden_size=144,
    intermediate_size=304,
    num_heads=2,
    out_hidden_size=128,
    deepstack_visual_indexes=[0, 1, 2],
    num_position_embeddings=2304,
)
PROCESSOR = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
BATCHES = {
    "below_every_budget": [(1, 4, 4)],
    "at_the_smallest": [(1, 16, 16)],
    "just_above_the_smallest": [(1, 2, 130)],
    "at_the_largest": [(1, 32, 64)],
    "just_above_the_largest": [(1, 2, 1026)],
    "many_small": [(1, 4, 2 * n) for n in range(1, 12)],
    "same_total_other_layout": [(1, 8, 16), (1, 16, 8), (1, 16, 16)],
    "every_kind": [(1, 4, 4), (3, 12, 20), (1, 2, 1026), (1, 16, 16), (1, 2, 2)],
    # KNOWN_FAILURES 3: shapes of images, capacity of videos.
    "images_after_video_capacity": [(1, 20, 20), (1, 28, 28)],
}


class LanguageModel(torch.nn.Module):
    """In the place of vLLM's, which needs compiled kernels."""

    packed_modules_mapping: dict = {}  # noqa: RUF012
    make_empty_intermediate_tensors = None

    def __init__(self, **_) -> None:
        super().__init__()
        self.model = SimpleNamespace(start_layer=0)
        self.start_layer = 0


def join(rank: int, ranks: int, rendezvous: Path) -> None:
    """Make this process one of vLLM's ranks, without what a language model would need."""
    dense.Qwen3LLMForCausalLM = moe.Qwen3MoeLLMForCausalLM = LanguageModel
    dense.cached_tokenizer_from_config = moe.cached_tokenizer_from_config = lambda *_: None
    moe.Qwen3VLMoeForConditionalGeneration.set_moe_parameters = lambda _: None
    VllmConfig.with_hf_config = lambda config, *_, **__: config
    shm_broadcast.MessageQueue.create_from_process_group = lambda *_, **__: None  # needs ZeroMQ
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, f"file://{rendezvous}", rank, "gloo")
        initialize_model_parallel(ranks)


@pytest.fixture(scope="session", autouse=True)
def _process(tmp_path_factory) -> None:
    join(0, 1, tmp_path_factory.mktemp("process") / "rendezvous")


@pytest.fixture(autouse=True)
def _vllm_log_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    wrapper_module._warn_once.cache_clear()
    wrapper_module._name_memory.cache_clear()


def build_model(
    folder,
    name="Qwen3VLForConditionalGeneration",
    *,
    ranks=1,
    lora=False,
    budgets=BUDGETS,
    frames=64,
    classes=ours,
    **multimodal,
):
    """Build a model as vLLM does; keywords are fields of the multimodal configuration."""
    if hasattr(MultiModalConfig, "mm_device_do_normalize"):
        multimodal.setdefault("mm_device_do_normalize", False)
    config = VllmConfig()
    hf_config = Qwen3VLConfig(vision_config=VISION)
    multimodal_config = MultiModalConfig(**multimodal)
    config.model_config = SimpleNamespace(
        hf_config=hf_config,
        model=str(folder),
        revision=None,
        hf_image_processor_config=PROCESSOR,
        dtype=torch.float32,
        max_model_len=8192,
        enforce_eager=False,
        multimodal_config=multimodal_config,
        get_multimodal_config=lambda: multimodal_config,
    )
    config.parallel_config.tensor_parallel_size = ranks
    if lora:
        config.lora_config = SimpleNamespace(enable_tower_connector_lora=True)
    compilation = config.compilation_config
    compilation.cudagraph_mm_encoder = True
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY  # NONE on a CPU otherwise
    compilation.encoder_cudagraph_token_budgets = list(budgets)
    compilation.encoder_cudagraph_max_vision_items_per_batch = ITEMS
    compilation.encoder_cudagraph_max_frames_per_batch = frames
    with set_current_vllm_config(config):
        model = getattr(classes, name)(vllm_config=config, prefix="")
    model.test_config = config
    model.get_max_frames_per_video = lambda: 8  # asks the Hugging Face processor otherwise
    for module in model.visual.modules():
        module.cpu_linear = torch.nn.functional.linear  # set after loading, by a CPU build
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.visual.parameters():
            weight.normal_(std=0.05, generator=generator)
            if weight.ndim == 1:
                weight.add_(0.5)
    return model


@pytest.fixture
def make_model(tmp_path):
    return functools.partial(build_model, tmp_path)


@pytest.fixture
def model(make_model):
    return make_model()


class Replay:
    """In the place of a captured graph: runs the forward on the captured tensors again."""

    def __init__(self, model, arguments, output) -> None:
        self.model, self.arguments, self.output = model, arguments, output
        self.count = 0

    @torch.inference_mode()
    def replay(self) -> None:
        self.count += 1
        inputs, *buffers = self.arguments
        rows = self.model.encoder_cudagraph_forward(dict(inputs), *buffers)
        self.output.fill_(float("nan"))
        self.output[: len(rows)].copy_(rows)


def stub_capture(monkeypatch) -> None:
    """`torch.cuda` is told nothing."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: _nothing())
    monkeypatch.setattr(graphs, "current_stream", lambda: None, raising=False)


def build_manager(model, monkeypatch):
    """vLLM's manager with its graphs captured, in name."""
    stub_capture(monkeypatch)
    config = model.test_config
    with set_current_vllm_config(config):
        manager = graphs.EncoderCudaGraphManager(config, torch.device("cpu"), torch.float32, model)
        manager.capture() if MINOR < 23 else manager.capture(graph_pool=None)
    for captured in _captured(manager):
        if MINOR < 23:
            arguments = ({"pixel_values": captured.input_buffer}, captured.metadata_buffers)
        else:
            arguments = (captured.input_buffers,)
        captured.graph = Replay(model, arguments, captured.output_buffer)
    return manager


@pytest.fixture
def make_manager(monkeypatch):
    return functools.partial(build_manager, monkeypatch=monkeypatch)


@contextmanager
def _nothing():
    yield


def _captured(manager) -> list:
    sets = manager.budget_graphs
    sets = sets.values() if MINOR >= 24 else [sets]
    return [captured for by_budget in sets for captured in by_budget.values()]


def replays(manager) -> int:
    return sum(captured.graph.count for captured in _captured(manager))


def make_batch(grids, modality="image", seed=1) -> dict:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), 1536, generator=generator)
    keys = {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    }[modality]
    return dict(zip(keys, (pixels, torch.tensor(grids)), strict=True))


def truth(model, pixels, grids) -> list[torch.Tensor]:
    """vLLM's own tower on the same weights, one item at a time."""
    visual, rows = model.visual, []
    start = 0
    with torch.no_grad(), set_current_vllm_config(model.test_config):
        for t, h, w in grids:
            metadata = visual.prepare_encoder_metadata([[t, h, w]])
            item = pixels[start : start + t * h * w]
            rows.append(visual(item, None, encoder_metadata=metadata))
            start += t * h * w
    return rows


def check(outputs, expected) -> None:
    assert len(outputs) == len(expected)
    for output, rows in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, rows, rtol=1e-4, atol=1e-4)


def test_the_release_is_recognised() -> None:
    first, last = detect_shape().releases.replace("0.", "").partition("-")[::2]
    assert int(first) <= MINOR <= int(last or first)


def test_registration_twice() -> None:
    register()
    register()
    for architecture in ARCHITECTURES:
        entry = ModelRegistry.models[architecture]
        assert (entry.module_name, entry.class_name) == (MODELS, architecture)
        found = entry.load_model_cls()
        assert issubclass(found, getattr(dense, architecture, getattr(moe, architecture, None)))
        assert found is not getattr(dense, architecture, None)
        assert hasattr(found, "_processor_factory")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_our_tower_equals_vllms(name, make_model, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.plugins.vitgraph"):
        model = make_model(name)
    assert f"vitgraph serves the vision tower of {name}: attention sdpa" in caplog.text
    assert supports_encoder_cudagraph(model)
    grids = [(1, 8, 12), (3, 4, 6)]
    pixels = make_batch(grids)["pixel_values"]
    expected = truth(model, pixels, grids)
    for form in (grids, torch.tensor(grids), torch.tensor(grids, dtype=torch.int32)):
        check([model.visual(pixels, grid_thw=form)], [torch.cat(expected)])
    parts = model._process_image_input(
        {"type": "pixel_values", "pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
    )
    check(parts, expected)


def test_weights_come_through_vllms_loader(make_model) -> None:
    model, other = make_model(), make_model()
    with torch.no_grad():
        for weight in other.visual.parameters():
            weight.mul_(0.5)
    checkpoint = {f"model.visual.{n}": p.clone() for n, p in other.visual.named_parameters()}
    assert checkpoint["model.visual.patch_embed.proj.weight"].shape == (144, 3, 2, 16, 16)
    loaded = model.load_weights(iter(checkpoint.items()))
    assert loaded == {name for name, _ in model.named_parameters()}
    batch = make_batch([(1, 4, 4)])
    expected = truth(other, batch["pixel_values"], [(1, 4, 4)])
    check([model.visual(batch["pixel_values"], [[1, 4, 4]])], expected)


@pytest.mark.parametrize("modality", ["image", "video"])
@pytest.mark.parametrize("grids", BATCHES.values(), ids=BATCHES)
def test_graphs_of_vllms_manager(grids, modality, shared) -> None:
    model, manager = shared
    batch = make_batch(grids, modality)
    before = manager.graph_hits, manager.graph_misses
    outputs = manager.execute(batch)
    misses = sum(t * h * w > 4 * BUDGETS[-1] for t, h, w in grids)
    after = manager.graph_hits, manager.graph_misses
    assert (after[0] - before[0], after[1] - before[1]) == (len(grids) - misses, misses)
    check(outputs, truth(model, next(iter(batch.values())), grids))


@pytest.fixture
def shared(model, make_manager):
    return model, make_manager(model)


def test_two_tensors_are_captured(shared) -> None:
    """KNOWN_FAILURES 4: the rows follow from the budget, whatever the frames are."""
    _, manager = shared
    rows = {}
    for captured in _captured(manager):
        if MINOR < 23:
            assert captured.metadata_buffers.keys() == {"grid_thw"}
            pixels = captured.input_buffer
        else:
            assert captured.input_buffers.keys() == {"pixel_values", "grid_thw"}
            pixels = captured.input_buffers["pixel_values"]
        rows[captured.token_budget] = len(pixels)
        assert len(captured.output_buffer) == captured.token_budget
    assert rows == {budget: 4 * budget for budget in BUDGETS}


def test_capture_in_inference_mode(model, make_manager) -> None:
    """Newer model runners capture in it, and encode in it."""
    grids = [(1, 4, 4), (1, 8, 8)]
    batch = make_batch(grids)
    with torch.inference_mode():
        manager = make_manager(model)
        outputs = manager.execute(batch)
    check(outputs, truth(model, batch["pixel_values"], grids))
    check([model.visual(batch["pixel_values"], grids)], [torch.cat(outputs)])


def test_no_tower_where_no_images_are_allowed(make_model, caplog) -> None:
    model = make_model(limit_per_prompt={"image": 0, "video": 0})
    assert model.vitgraph is None
    assert "this process has no vision tower" in caplog.text


def test_more_frames_than_any_limit(make_model, make_manager) -> None:
    """KNOWN_FAILURES 2: where empty sequences are free, nothing limits them but the tokens."""
    model = make_model(frames=16)
    manager = make_manager(model)
    grids = [(70, 2, 4), (1, 4, 4)]
    batch = make_batch(grids, "video")
    check(manager.execute(batch), truth(model, batch["pixel_values_videos"], grids))
    assert (manager.graph_hits, replays(manager)) == (2, 1)


def test_more_frames_than_a_replay_has(make_model, make_manager, monkeypatch, caplog) -> None:
    """KNOWN_FAILURES 2: where empty sequences cost, a pack with too many frames runs eagerly."""
    monkeypatch.setattr(tower_module, "FREE_OF_EMPTY_SEQUENCES", frozenset())
    model = make_model(frames=16)
    manager = make_manager(model)
    grids = [(70, 2, 4), (1, 4, 4)]
    batch = make_batch(grids, "video")
    if not detect_shape().item_specs:
        with pytest.raises(RuntimeError, match="71 frames are more than the 16 of a replay"):
            manager.execute(batch)
    else:
        check(manager.execute(batch), truth(model, batch["pixel_values_videos"], grids))
        assert "71 frames are more than the 16 of a replay" in caplog.text
    grids = [(3, 4, 4)]
    batch = make_batch(grids, "video")
    check(manager.execute(batch), truth(model, batch["pixel_values_videos"], grids))


def test_nan_stays_in_its_item(shared) -> None:
    """KNOWN_FAILURES 1 and 29: neither stale rows nor a neighbour's reach another item."""
    model, manager = shared
    poison = make_batch([(1, 32, 64)])
    poison["pixel_values"].fill_(float("nan"))
    manager.execute(poison)
    grids = [(1, 8, 8), (1, 8, 10)]
    batch = make_batch(grids)
    batch["pixel_values"][:64] = float("nan")
    first, second = manager.execute(batch)
    assert first.isnan().all()
    check([second], truth(model, batch["pixel_values"], grids)[1:])


def test_what_misses_need_is_compiled_once_before_the_first_capture(
    model, make_manager, monkeypatch
) -> None:
    """KNOWN_FAILURES 12."""
    from vitgraph.encoder import Qwen3VLVisionEncoder

    captures = []  # how many were made when the kernels were warmed up
    monkeypatch.setattr(
        Qwen3VLVisionEncoder,
        "warm_up_encoder_eager",
        lambda encoder: captures.append(len(model.vitgraph._captures)),
    )
    make_manager(model)
    make_manager(model)
    assert captures == [0]


@pytest.mark.skipif(MINOR < 23, reason="vLLM 0.23 is the first that captures on trial")
def test_memory_is_profiled_and_given_back(model, make_manager, monkeypatch) -> None:
    """KNOWN_FAILURES 23: vLLM's profile sees what our captures take, and nothing of it stays."""
    from vllm.v1.worker import gpu_model_runner

    capture_buffers, buffers = model.vitgraph.capture_buffers, []

    def remember(*arguments):
        captured = capture_buffers(*arguments)
        buffers.extend(weakref.ref(tensor) for tensor in captured)
        return captured

    def memory(*_) -> tuple[int, int]:
        alive = [tensor for ref in buffers if (tensor := ref()) is not None]
        return 2**40 - sum(tensor.nbytes for tensor in alive), 2**40

    monkeypatch.setattr(model.vitgraph, "capture_buffers", remember)
    make_manager(model)  # patches torch.cuda; its own capture is not what is looked at
    buffers.clear()
    for cuda in (torch.cuda, torch.accelerator):
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(cuda, name, lambda *_: None, raising=False)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    platform = type(gpu_model_runner.current_platform)
    monkeypatch.setattr(platform, "graph_pool_handle", lambda _: None, raising=False)
    monkeypatch.setattr(gpu_model_runner, "graph_capture", lambda **_: _nothing())

    runner = object.__new__(gpu_model_runner.GPUModelRunner)
    config = model.test_config
    vars(runner).update(
        vllm_config=config,
        compilation_config=config.compilation_config,
        supports_mm_inputs=True,
        model=model,
        device=torch.device("cpu"),
        dtype=torch.float32,
        lora_config=None,
        cudagraph_dispatcher=SimpleNamespace(
            get_capture_descs=lambda: [], cudagraph_keys={}, keys_initialized=True
        ),
        _init_minimal_kv_cache_for_profiling=lambda: None,
        _cleanup_profiling_kv_cache=lambda: None,
        _freeze_gc=_nothing,
        maybe_remove_all_loras=lambda _: None,
        get_model=lambda: model,
    )
    estimate = runner.profile_cudagraph_memory()
    pixels, grids = 4 * 1536 * 4, ITEMS * 3 * 4  # bytes of a token, of all grids
    assert estimate == sum(budget * pixels + grids for budget in BUDGETS)
    assert [ref() for ref in buffers] == [None] * 2 * len(BUDGETS)
    batch = make_batch([(1, 4, 4)])
    expected = truth(model, batch["pixel_values"], [(1, 4, 4)])
    check(make_manager(model).execute(batch), expected)


@pytest.mark.skipif(MINOR >= 23, reason="vLLM 0.23 captures on trial")
def test_memory_is_named_where_vllm_does_not_profile(model, make_manager, caplog) -> None:
    """KNOWN_FAILURES 23."""
    make_manager(model)
    assert "captured after the KV cache was sized" in caplog.text


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
    """KNOWN_FAILURES 7: vLLM's own sharding and gathering, a process a rank."""
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
        monkeypatch.setattr(wrapper_module, "replicate_tower", lambda _: ranks)
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


@pytest.mark.skipif(
    not getattr(ours.Qwen3VLForConditionalGeneration, "supports_mm_device_do_normalize", False),
    reason="vLLM 0.32 has it first",
)
def test_bytes_are_normalised_on_the_device(make_model, make_manager) -> None:
    """KNOWN_FAILURES 20: bytes are what is captured; other pixels are encoded, not truncated."""
    model = make_model(mm_device_do_normalize=True)
    assert model.vitgraph.pixel_normalization is not None
    manager = make_manager(model)
    for captured in _captured(manager):
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
    assert wrapper_module._new_runner_has_graphs() == (MINOR >= 28)


def test_tower_lora_is_left_to_vllm(make_model, caplog) -> None:
    """KNOWN_FAILURES 24."""
    model = make_model(lora=True, ranks=2)
    assert model.vitgraph is None
    assert type(model.visual) is dense.Qwen3_VisionTransformer
    assert model.test_config.model_config.multimodal_config.mm_encoder_tp_mode == "weights"
    assert not model.test_config.compilation_config.cudagraph_mm_encoder
    assert "vLLM's own vision tower serves" in caplog.text
    assert "no encoder graphs: packing reorders items" in caplog.text


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
    import importlib
    import sys

    plugin = sys.modules["vitgraph.graphs.vllm_plugin"]
    monkeypatch.setattr(plugin, "models", ours)  # what the import below replaces, and is undone
    monkeypatch.setitem(sys.modules, "vitgraph.graphs.vllm_plugin.wrapper", None)
    monkeypatch.delitem(sys.modules, MODELS)
    broken = importlib.import_module(MODELS)
    assert broken.Qwen3VLForConditionalGeneration is dense.Qwen3VLForConditionalGeneration
    assert broken.Qwen3VLMoeForConditionalGeneration is moe.Qwen3VLMoeForConditionalGeneration
    lines = [r for r in caplog.records if "vLLM's own vision tower serves" in r.getMessage()]
    assert len(lines) == 1


def test_doctor(monkeypatch) -> None:
    """KNOWN_FAILURES 27: what would serve can be asked for."""
    from vitgraph.graphs.vllm_plugin import report

    plugin = SimpleNamespace(value="vitgraph.graphs.vllm_plugin:register")
    monkeypatch.setattr(report, "entry_points", lambda group: [plugin])
    lines = report.report()
    assert lines["vLLM"] == RELEASE
    assert lines["tower"].startswith("vitgraph, for Qwen3VLForConditionalGeneration and")
    assert lines["protocol"] == f"encoder graphs of vLLM {detect_shape().releases}"
    assert "TORCH_SDPA -> sdpa (eager)" in lines["attention"]
    assert lines["kernels"] == "torch on cpu"
    monkeypatch.setattr(ours, ARCHITECTURES[0], dense.Qwen3VLForConditionalGeneration)
    assert "cannot be imported" in report.report()["tower"]
    monkeypatch.setenv("VITGRAPH_DISABLE", "1")
    assert report.report()["tower"] == "vLLM's own: VITGRAPH_DISABLE is set"


@pytest.mark.skipif(MINOR < 23, reason="the benchmark is for vLLM's manager as of 0.23")
def test_the_benchmark_runs_vllms_tower(monkeypatch) -> None:
    """`vitgraph bench`: the same weights under vLLM's own tower and manager, without an engine."""
    stub_capture(monkeypatch)
    from vitgraph.encoder import Qwen3VLVisionEncoder, VisionConfig
    from vitgraph.graphs.benchmark import systems
    from vitgraph.graphs.benchmark.workloads import make_batch

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
        for captured in _captured(manager):
            arguments = (captured.input_buffers,)
            captured.graph = RealRows(manager.model, arguments, captured.output_buffer)

    monkeypatch.setattr(graphs.EncoderCudaGraphManager, "capture", capture_and_stand_in)
    encoder = Qwen3VLVisionEncoder.random(VisionConfig.from_dict(VISION))
    setup = systems.Setup(encoder, tuple(BUDGETS), ITEMS, backends=("TORCH_SDPA", "NOSUCH"))
    found, missing = systems.build(setup, ["vllm"])
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
        assert [budget for budget, _ in found[1].replays()] == budgets
