"""What the contract tests share, models, managers and fixtures; loaded as a pytest plugin.

vLLM's own tower, run by its own code on the same weights, is the truth that outputs are compared
with. Capture is the one thing that is not real: a replay runs the captured forward again.
"""

import ast
import functools
import importlib
import logging
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_releases

vllm_releases.install()

import vllm.model_executor.models.qwen3_vl as dense  # noqa: E402
import vllm.v1.worker.encoder_cudagraph as graphs  # noqa: E402
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config  # noqa: E402
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig  # noqa: E402
from vllm import ModelRegistry  # noqa: E402
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.config.multimodal import MultiModalConfig  # noqa: E402
from vllm.distributed import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.distributed.device_communicators import shm_broadcast  # noqa: E402
from vllm.model_executor.layers import pooler  # noqa: E402
from vllm.version import __version__ as RELEASE  # noqa: E402

from vitgraph.encoder import GEOMETRIES  # noqa: E402
from vitgraph.graphs.vllm_plugin import ARCHITECTURES  # noqa: E402
from vitgraph.graphs.vllm_plugin import models as ours  # noqa: E402
from vitgraph.graphs.vllm_plugin import tower as tower_module  # noqa: E402
from vitgraph.graphs.vllm_plugin import wrapper as wrapper_module  # noqa: E402

MINOR = int(RELEASE.split(".")[1])
BUDGETS, ITEMS = [64, 128, 512], 8
VISION = GEOMETRIES["tiny"].to_dict()
OF_THIS_RELEASE = [name for name in ARCHITECTURES if name in ModelRegistry.models]
# Of the classes those whose tower has no deepstack, and Qwen3-Omni's.
WITHOUT_DEEPSTACK = {
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration",
    "InternS2MobiusForConditionalGeneration",
    "ColQwen3_5Model",
    "ClefFlashForJointSchema",
    "D3ForSequenceClassification",
}
OMNI = "Qwen3OmniMoeThinkerForConditionalGeneration"
NAMES = list(dict.fromkeys(ARCHITECTURES[a][1] for a in OF_THIS_RELEASE))
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
        self.model = SimpleNamespace(start_layer=0, layers=())
        self.start_layer = 0

    def forward(self, input_ids, positions) -> None:
        """Never called; by these methods vLLM knows a language model."""

    embed_input_ids = forward


class Part(torch.nn.Module):
    """In the place of Qwen3-Omni's audio tower, and of heads that pool."""

    def __init__(self, *_, **__) -> None:
        super().__init__()


STAND_INS = {
    "cached_tokenizer_from_config": lambda *_: None,
    "pooler_for_token_embed": Part,
    **dict.fromkeys(("Qwen3OmniMoeAudioEncoder", "JointSchemaHead", "JointSchemaPooler"), Part),
}


def without_language() -> None:
    """Take out of vLLM's models what needs compiled kernels or files of a checkpoint."""
    for method in ("for_embedding", "for_seq_cls"):
        setattr(pooler.DispatchPooler, method, Part)
    kinds = [
        getattr(importlib.import_module(module), name)
        for module, name in (ARCHITECTURES[a] for a in OF_THIS_RELEASE)
    ]
    for kind in {base for built in kinds for base in built.__mro__}:
        if "set_moe_parameters" in vars(kind):
            kind.set_moe_parameters = lambda *_: None
        module = sys.modules[kind.__module__]
        if not module.__name__.startswith(("vllm.model_executor.models.", "vllm.models.")):
            continue
        for name in list(vars(module)):
            if name in STAND_INS:
                setattr(module, name, STAND_INS[name])
            elif name.endswith("ForCausalLM") and isinstance(vars(module)[name], type):
                setattr(module, name, LanguageModel)


def hf_config_of(name: str) -> Any:
    """What a model reads of its Hugging Face configuration."""
    if name in WITHOUT_DEEPSTACK:
        vision = {k: v for k, v in VISION.items() if k != "deepstack_visual_indexes"}
        config = Qwen3_5Config(vision_config=vision)
        if name.startswith("Qwen4Exp"):
            config.vision_config.deepstack_visual_indexes = []
        config.joint_head_config = {}
        return config
    config = Qwen3VLConfig(vision_config=VISION)
    if name in (OMNI, "ClefOmniForJointSchema"):
        config.vision_config.image_size = 16 * 48
        config.vision_config.apply_vit_abs_pos_embed = True
        config.audio_config = SimpleNamespace()
        heads = {"joint_head_config": {}}
        return SimpleNamespace(thinker_config=config, architectures=[name], **heads)
    config.traj_ids, config.traj_vocab_size = {}, 0  # of Alpamayo
    return config


def join(rank: int, ranks: int, rendezvous: Path) -> None:
    """Make this process one of vLLM's ranks, without what a language model would need."""
    without_language()
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
    tower_module._name_memory.cache_clear()


def build_model(
    folder,
    name="Qwen3VLForConditionalGeneration",
    *,
    ranks=1,
    lora=False,
    budgets=BUDGETS,
    frames=64,
    classes=ours,
    quant_config=None,
    **multimodal,
):
    """Build a model as vLLM does; keywords are fields of the multimodal configuration."""
    if hasattr(MultiModalConfig, "mm_device_do_normalize"):
        multimodal.setdefault("mm_device_do_normalize", False)
    config = VllmConfig()
    hf_config = hf_config_of(name)
    multimodal_config = MultiModalConfig(**multimodal)
    config.model_config = SimpleNamespace(
        hf_config=hf_config,
        model=str(folder),
        revision=None,
        hf_image_processor_config=PROCESSOR,
        dtype=torch.float32,
        max_model_len=8192,
        enforce_eager=False,
        pooler_config=SimpleNamespace(),
        head_dtype=torch.float32,
        get_hidden_size=lambda: 128,
        multimodal_config=multimodal_config,
        get_multimodal_config=lambda: multimodal_config,
    )
    config.parallel_config.tensor_parallel_size = ranks
    config.quant_config = quant_config
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
        for parameter, weight in model.visual.named_parameters():
            sharp = ".qkv.weight" in parameter  # attention to few patches
            weight.normal_(std=0.25 if sharp else 0.05, generator=generator)
            if ("norm" in parameter or "ln_q" in parameter) and parameter.endswith("weight"):
                weight.add_(1)
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
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nothing())
    monkeypatch.setattr(graphs, "current_stream", lambda: None, raising=False)


def build_manager(model, monkeypatch):
    """vLLM's manager with its graphs captured, in name."""
    stub_capture(monkeypatch)
    config = model.test_config
    with set_current_vllm_config(config):
        manager = graphs.EncoderCudaGraphManager(config, torch.device("cpu"), torch.float32, model)
        manager.capture() if MINOR < 23 else manager.capture(graph_pool=None)
    for captured in captured_graphs(manager):
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
def nothing():
    yield


def captured_graphs(manager) -> list:
    sets = manager.budget_graphs
    sets = sets.values() if MINOR >= 24 else [sets]
    return [captured for by_budget in sets for captured in by_budget.values()]


def replays(manager) -> int:
    return sum(captured.graph.count for captured in captured_graphs(manager))


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
    theirs = next(kind for kind in type(visual).__mro__ if kind.__module__.startswith("vllm."))
    start = 0
    with torch.no_grad(), set_current_vllm_config(model.test_config):
        for t, h, w in grids:
            item = pixels[start : start + t * h * w]
            rows.append(theirs.forward(visual, item, torch.tensor([[t, h, w]])))
            start += t * h * w
    return rows


def check(outputs, expected) -> None:
    assert len(outputs) == len(expected)
    for output, rows in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, rows, rtol=1e-4, atol=1e-4)


@functools.cache
def _classes() -> tuple[dict[str, list[str]], set[str]]:
    """Bases of every class in vLLM's model files by name, and those that build such a tower."""
    root = Path(dense.__file__).parents[2]
    files = [*root.glob("model_executor/models/*.py"), *root.glob("models/*/nvidia/model.py")]
    towers = ("Qwen3_VisionTransformer", "Qwen3Omni_VisionTransformer", "Cohere_VisionTransformer")
    bases: dict[str, list[str]] = {}
    builders = set()
    for file in files:
        text = file.read_text()
        if "ision" not in text and "Qwen3" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base) for base in node.bases]
                called = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
                if any(isinstance(f, ast.Name) and f.id in towers for f in called):
                    builders.add(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):  # an alias
                bases |= {t.id: [node.value.id] for t in node.targets if isinstance(t, ast.Name)}
    return bases, builders


def builds_this_tower(name: str, seen: tuple[str, ...] = ()) -> bool:
    """Whether a class of vLLM's, or one that it is derived from, builds the tower."""
    bases, builders = _classes()
    if name in builders:
        return True
    parents = (base for base in bases.get(name, ()) if base not in seen)
    return any(builds_this_tower(base, (*seen, name)) for base in parents)


@pytest.fixture
def shared(model, make_manager):
    return model, make_manager(model)
