"""The plugin inside a real vLLM release: tower and graphs. vllm_releases.py runs it."""

import importlib
import logging
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm import ModelRegistry
from vllm.model_executor.models import adapters, registry
from vllm.model_executor.models.interfaces import supports_encoder_cudagraph
from vllm_harness import (
    BATCHES,
    BUDGETS,
    ITEMS,
    MINOR,
    NAMES,
    OF_THIS_RELEASE,
    OMNI,
    builds_this_tower,
    captured_graphs,
    check,
    make_batch,
    nothing,
    replays,
    truth,
)

from vitgraph.graphs.vllm_plugin import ARCHITECTURES, MODELS, register
from vitgraph.graphs.vllm_plugin import models as ours
from vitgraph.graphs.vllm_plugin import tower as tower_module
from vitgraph.graphs.vllm_plugin.protocol import detect_shape


def test_the_release_is_recognised() -> None:
    first, last = detect_shape().releases.replace("0.", "").partition("-")[::2]
    assert int(first) <= MINOR <= int(last or first)


def test_registration_twice() -> None:
    register()
    register()
    for architecture in OF_THIS_RELEASE:
        entry = ModelRegistry.models[architecture]
        assert (entry.module_name, entry.class_name) == (MODELS, ARCHITECTURES[architecture][1])
    assert ARCHITECTURES.keys() - OF_THIS_RELEASE == ARCHITECTURES.keys() - ModelRegistry.models


def test_the_registry_names_the_same_classes() -> None:
    """As vLLM has it, before anything was registered."""
    prefix = "vllm.model_executor.models."
    for architecture, (module, name) in ARCHITECTURES.items():
        if architecture in registry._VLLM_MODELS:
            theirs, same = registry._VLLM_MODELS[architecture][:2]
            assert (theirs if theirs.startswith("vllm.") else prefix + theirs, same) == (
                module,
                name,
            )
    assert {"Qwen3_5ForConditionalGeneration", "ColQwen3"} <= set(OF_THIS_RELEASE)


def test_no_class_of_vllms_with_this_tower_is_left_out() -> None:
    """Every model that vLLM's registry names whose class builds one of the two towers, or is a
    subclass of one that does; but for one whose merger has no parameters."""
    found = {
        architecture
        for architecture, (_, name, *_) in registry._VLLM_MODELS.items()
        if builds_this_tower(name)
    }
    assert found - {"BailingMoeV3VLForConditionalGeneration"} == set(OF_THIS_RELEASE)


def test_the_documentation_says_which_release_has_what() -> None:
    page = (Path(__file__).parents[1] / "graphs" / "README.md").read_text()
    said = re.findall(r"`(\w+)` 0\.(\d\d)( \(made only\))?", page)
    assert [name for name, first, _ in said if int(first) <= MINOR] == [
        name for name, *_ in said if name in OF_THIS_RELEASE
    ]
    built = {name for name, _, made in said if not made}
    assert {a for a in OF_THIS_RELEASE if ARCHITECTURES[a][1] in NAMES} == built & {
        *OF_THIS_RELEASE
    }


@pytest.mark.parametrize("architecture", OF_THIS_RELEASE)
def test_classes_are_made_when_asked_for(architecture) -> None:
    register()
    module, name = ARCHITECTURES[architecture]
    theirs = getattr(importlib.import_module(module), name)
    found = ModelRegistry.models[architecture].load_model_cls()
    assert issubclass(found, theirs) and found is not theirs
    assert found._processor_factory is theirs._processor_factory
    assert supports_encoder_cudagraph(found)
    assert getattr(ours, name) is found and found.__name__ == name


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
def test_graphs_of_every_model(name, make_model, make_manager) -> None:
    model = make_model(name)
    manager = make_manager(model)
    assert model.test_config.compilation_config.cudagraph_mm_encoder
    images_only = name == "CohereCompassForConditionalGeneration"
    modalities = ["image"] if images_only else ["image", "video"]
    assert manager.config.modalities == modalities
    for modality in modalities:
        grids = [(3, 4, 6) if modality == "video" else (1, 4, 4), (1, 2, 1026), (1, 16, 16)]
        batch = make_batch(grids, modality)
        expected = truth(model, next(iter(batch.values())), grids)
        manager.graph_hits = manager.graph_misses = 0
        check(manager.execute(batch), expected)
        assert (manager.graph_hits, manager.graph_misses) == (2, 1)


@pytest.mark.parametrize("use", ["as_embedding_model", "as_seq_cls_model"])
@pytest.mark.parametrize("name", [n for n in NAMES if re.match("Qwen3(VL|_5)", n)])
def test_models_that_embed_or_rank(name, use, make_model, make_manager) -> None:
    """As vLLM makes them of the registered classes, for Qwen3-VL-Embedding and -Reranker."""
    kind = getattr(adapters, use)(getattr(ours, name))
    assert kind.is_pooling_model and issubclass(kind, getattr(ours, name))
    model = make_model(name, classes=SimpleNamespace(**{name: kind}))
    grids = [(1, 4, 4), (1, 16, 16)]
    batch = make_batch(grids)
    expected = truth(model, batch["pixel_values"], grids)
    manager = make_manager(model)
    check(manager.execute(batch), expected)
    assert (manager.graph_hits, manager.graph_misses) == (2, 0)


def test_omni_without_our_tower_has_no_graphs(make_model, caplog) -> None:
    model = make_model(OMNI, lora=True)
    assert model.vitgraph is None
    assert not model.test_config.compilation_config.cudagraph_mm_encoder
    assert "this model of vLLM's has none" in caplog.text
    batch = make_batch([(1, 4, 4)])
    check(
        [model.visual(batch["pixel_values"], torch.tensor([[1, 4, 4]]))],
        truth(model, batch["pixel_values"], [(1, 4, 4)]),
    )


def test_omni_goes_back_to_vllms_tower(make_model, make_manager) -> None:
    """What is put on it after loading runs there, in packs too, though vLLM has no graphs."""
    model = make_model(OMNI)
    manager = make_manager(model)
    called: list[int] = []
    model.visual.merger.ln_q.register_forward_hook(lambda *_: called.append(1))
    grids = [(1, 4, 4), (1, 8, 8)]
    batch = make_batch(grids)
    expected = truth(model, batch["pixel_values"], grids)
    called.clear()
    if not detect_shape().item_specs:
        with pytest.raises(RuntimeError, match=r"merger\.ln_q has 1 forward hook"):
            manager.execute(batch)
        return
    check(manager.execute(batch), expected)
    assert called


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


def test_what_a_higher_limit_of_items_would_save_is_said_once(shared, caplog) -> None:
    _, manager = shared
    tower_module._say_items.cache_clear()
    with caplog.at_level(logging.INFO, logger="vllm.plugins.vitgraph"):
        for count in (1, ITEMS + 1, ITEMS + 1):
            manager.execute(make_batch([(1, 4, 4)] * count))
    said = [record.message for record in caplog.records if "said once" in record.message]
    assert len(said) == 1 and f"held {ITEMS} items" in said[0]


def test_two_tensors_are_captured(shared) -> None:
    """KNOWN_FAILURES 4: the rows follow from the budget, whatever the frames are."""
    _, manager = shared
    rows = {}
    for captured in captured_graphs(manager):
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
    from vitgraph.graphs.qwen3_vl import Qwen3VLGraphModel

    captures = []  # how many were made when the kernels were warmed up
    monkeypatch.setattr(
        Qwen3VLGraphModel,
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
    monkeypatch.setattr(gpu_model_runner, "graph_capture", lambda **_: nothing())

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
        _freeze_gc=nothing,
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
