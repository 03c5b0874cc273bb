"""Safety of captured graphs: what does not fit, who else is there."""

import copy
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.encoder.operations import LAYERS
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager
from vitgraph.graphs.qwen3_vl import Qwen3VLGraphModel

_SPEC = importlib.util.spec_from_file_location(
    "captured_tower", Path(__file__).with_name("captured_tower.py")
)
captured_tower = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(captured_tower)
BUDGETS, captured, close = captured_tower.BUDGETS, captured_tower.captured, captured_tower.close
tower, make_batch = captured_tower.tower, captured_tower.make_batch


class OutOfMemory(Qwen3VLGraphModel):
    """The encoder, on a device where budgets above 64 tokens do not fit."""

    def prepare_encoder_cudagraph_capture_inputs(self, token_budget, *arguments):
        if token_budget > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().prepare_encoder_cudagraph_capture_inputs(token_budget, *arguments)


def test_budgets_that_do_not_fit_are_dropped(tower, make_batch, caplog) -> None:
    manager = captured(OutOfMemory(tower))
    assert manager.budgets == (16, 64)
    assert manager.memory_report()["dropped"] == [256]
    assert "encoder budget 256 does not fit the memory" in caplog.text
    mm_kwargs = make_batch([(1, 4, 4), (1, 20, 20)])
    outputs = manager.execute(mm_kwargs)
    assert close(torch.cat(outputs), tower(mm_kwargs["pixel_values"], mm_kwargs["image_grid_thw"]))
    assert manager.get_cumulative_stats()["misses_by_reason"] == {"too_large": 1}


@pytest.mark.parametrize("huge", [2**40, 10**25])
def test_a_budget_beyond_everything_is_dropped(huge, encoder, batch, caplog) -> None:
    """KNOWN_FAILURES 41: the others stay."""
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64, huge), 8))
    manager.capture()
    assert manager.budgets == (64,)
    assert manager.memory_report()["dropped"] == [huge]
    assert f"encoder budget {huge} does not fit the memory" in caplog.text
    assert len(manager.execute(batch([(1, 4, 4)]))[0]) == 4
    assert manager.get_cumulative_stats()["graph_hits"] == 1


def test_host_memory_that_ran_out_drops_a_budget(encoder, monkeypatch) -> None:
    """KNOWN_FAILURES 41: torch's own class is for a GPU's memory."""
    model = Qwen3VLGraphModel(encoder)
    prepare = model.prepare_encoder_cudagraph_capture_inputs

    def fail(budget, *arguments):
        if budget == 256:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")
        return prepare(budget, *arguments)

    monkeypatch.setattr(model, "prepare_encoder_cudagraph_capture_inputs", fail)
    assert captured(model).budgets == (16, 64)


@pytest.mark.gpu
def test_managers_captured_on_one_stream_are_independent(reference) -> None:
    """KNOWN_FAILURES 41: each has cuBLAS's workspace to itself, whoever's stream captured."""
    model = copy.deepcopy(reference).to("cuda").bfloat16()
    stream, managers, batches = torch.cuda.Stream(), [], []
    for seed in range(2):
        encoder = Qwen3VLVisionEncoder.from_transformers(model)
        manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (1024,), 8))
        plan = replace(encoder.plan, providers=dict.fromkeys(LAYERS, "cublas"))
        manager.model._plan = lambda *_, plan=plan: plan
        with torch.cuda.stream(stream):
            manager.capture()
        torch.manual_seed(seed)
        pixels = torch.randn(4096, 1536, device="cuda", dtype=torch.bfloat16)
        managers.append(manager)
        batches.append({"pixel_values": pixels, "image_grid_thw": [(1, 64, 64)]})
    assert managers[0]._stream != managers[1]._stream
    expected = [m.execute(b)[0] for m, b in zip(managers, batches, strict=True)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(20):
        outputs = []
        for manager, batch, own in zip(managers, batches, streams, strict=True):
            own.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(own):
                outputs.append(manager.execute(batch)[0])
        torch.cuda.synchronize()
        assert all(map(torch.equal, outputs, expected))


def test_all_budgets_together_take_what_the_largest_takes(tower) -> None:
    manager = captured(tower)
    report = manager.memory_report()
    assert list(report["budgets"]) == [256, 64, 16]
    assert report["total"] == sum(report["budgets"].values())
    assert report["total"] <= 1.15 * report["budgets"][256]


@pytest.mark.gpu
def test_estimate_is_near_what_capture_takes() -> None:
    from vitgraph.encoder import GEOMETRIES

    tower = Qwen3VLVisionEncoder.random(GEOMETRIES["8b"], device="cuda", dtype=torch.bfloat16)
    manager = EncoderCudaGraphManager(tower, CompilationConfig(True, (512, 4096), 8))
    estimate = manager.estimate_memory()
    manager.capture()
    manager.clear()
    manager.capture()  # the second time nothing is loaded or compiled
    report = manager.memory_report()
    assert report["total"] <= 1.15 * report["budgets"][4096]
    assert 0.8 * estimate[4096] <= report["budgets"][4096] <= 1.3 * estimate[4096]
    free = torch.cuda.mem_get_info()[0]
    manager.clear()
    assert torch.cuda.mem_get_info()[0] - free >= 0.8 * report["total"]


def test_estimate_grows_with_the_budget(tower) -> None:
    estimate = EncoderCudaGraphManager(tower, BUDGETS).estimate_memory()
    assert estimate[256] - estimate[64] == 4 * (estimate[64] - estimate[16]) > 0


def test_misses_by_reason(tower, make_batch) -> None:
    manager = captured(tower)
    manager.limits = manager.limits.__class__(manager.budgets, 8, 5)
    manager.execute(make_batch([(1, 4, 4), (1, 40, 40), (6, 2, 2)]))
    manager.clear()
    manager.execute(make_batch([(1, 4, 4)]))
    stats = manager.get_cumulative_stats()
    reasons = {"too_large": 1, "too_many_sequences": 1, "not_captured": 1}
    assert stats["misses_by_reason"] == reasons
    assert (stats["graph_hits"], stats["graph_misses"]) == (1, 3)


def test_every_pack_is_shown_with_its_time(tower, make_batch) -> None:
    seen: list[tuple[int | None, int, float]] = []
    manager = captured(
        tower, on_pack=lambda pack, watch: seen.append((pack.budget, pack.tokens, watch.seconds()))
    )
    manager.execute(make_batch([(1, 4, 4), (1, 34, 34), (1, 4, 6)]))
    assert [(budget, tokens) for budget, tokens, _ in seen] == [(16, 10), (None, 289)]
    assert all(0 < seconds < 60 for *_, seconds in seen)
    stats = manager.get_cumulative_stats()
    assert stats["budgets"][16]["padded"] == 16 - 10


def test_images_and_videos_in_one_call(tower, make_batch) -> None:
    images, videos = make_batch([(1, 4, 4), (1, 2, 6)]), make_batch([(3, 4, 4)])
    outputs = captured(tower).execute(
        images
        | {
            "pixel_values_videos": videos["pixel_values"],
            "video_grid_thw": videos["image_grid_thw"],
        }
    )
    assert [len(output) for output in outputs] == [4, 3, 12]
    for mm_kwargs, own in ((images, outputs[:2]), (videos, outputs[2:])):
        expected = tower(mm_kwargs["pixel_values"], mm_kwargs["image_grid_thw"])
        assert close(torch.cat(own), expected)


def test_two_managers_and_many_threads(tower, make_batch) -> None:
    """KNOWN_FAILURES 5 and 22: nobody reads what another left."""
    managers = captured(tower), captured(tower)
    grids = [[(1, 4, 4)], [(1, 2, 6), (2, 4, 4)], [(1, 8, 16), (1, 2, 2)], [(1, 34, 34)]]
    batches = [make_batch(g) for g in grids]
    expected = [tower(b["pixel_values"], b["image_grid_thw"]) for b in batches]
    if tower.device.type == "cuda":
        torch.cuda.synchronize()
    wrong: list[str] = []

    def serve(worker: int) -> None:
        stream = torch.cuda.Stream() if tower.device.type == "cuda" else None
        with torch.cuda.stream(stream):
            for step in range(6):
                index = (worker + step) % len(batches)
                outputs = managers[worker % 2].execute(batches[index])
                if not close(torch.cat(outputs), expected[index]):
                    wrong.append(f"worker {worker}, step {step}")

    workers = [threading.Thread(target=serve, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    assert sum(m.get_cumulative_stats()["batches"] for m in managers) == 48


@pytest.mark.gpu
def test_capture_does_not_disturb_other_threads(tower) -> None:
    """KNOWN_FAILURES 22: allocations and synchronisations elsewhere neither fail nor spoil it.

    (Random numbers of the device's default generator do: torch lets a capture own it.)
    """
    stop, failures = threading.Event(), []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    torch.ones(1000, 1000, device="cuda").sum().item()
        except Exception as error:
            failures.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        manager = captured(tower)
    finally:
        stop.set()
        worker.join()
    assert not failures and manager.is_captured()


@pytest.mark.gpu
def test_capture_on_the_calling_stream(tower, make_batch) -> None:
    """KNOWN_FAILURES 21."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        manager = captured(tower)
        mm_kwargs = make_batch([(1, 4, 4)])
        output = manager.execute(mm_kwargs)[0]
        expected = tower(mm_kwargs["pixel_values"], mm_kwargs["image_grid_thw"])
    stream.synchronize()
    assert close(output, expected)


def test_capture_in_inference_mode_serves_outside(tower, make_batch) -> None:
    manager = EncoderCudaGraphManager(tower, BUDGETS)
    with torch.inference_mode():
        manager.capture()
    mm_kwargs = make_batch([(1, 4, 4)])
    expected = tower(mm_kwargs["pixel_values"], mm_kwargs["image_grid_thw"])
    assert close(manager.execute(mm_kwargs)[0], expected)


def test_bytes_never_land_in_a_float_capture(tower, make_batch) -> None:
    """KNOWN_FAILURES 20: two managers, one encoder, and the encoder changed its mind."""
    manager = captured(tower)
    tower.takes_bytes = True
    pixels = torch.randint(0, 256, (16, 1536), dtype=torch.uint8, device=tower.device)
    with pytest.raises(ValueError, match=r"captured for torch\.\w+ inputs, got torch.uint8"):
        manager.execute({"pixel_values": pixels, "image_grid_thw": [(1, 4, 4)]})


class Failing(Qwen3VLGraphModel):
    """The encoder, whose eager forward runs `action` first."""

    def __init__(self, tower: Qwen3VLVisionEncoder, action: Callable[[], object]) -> None:
        super().__init__(tower)
        self.action = action

    def encoder_eager_forward(self, mm_kwargs):
        self.action()
        return super().encoder_eager_forward(mm_kwargs)


def fail() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_batch_that_fails_half_way_counts_for_nothing(tower, make_batch) -> None:
    manager = captured(Failing(tower, fail))
    good = make_batch([(1, 4, 4)])
    expected = manager.execute(good)[0]
    before = manager.get_cumulative_stats()
    with pytest.raises(torch.OutOfMemoryError):
        manager.execute(make_batch([(1, 4, 4), (1, 40, 40)]))
    assert manager.get_cumulative_stats() == before
    assert torch.equal(manager.execute(good)[0], expected)


def test_execute_within_execute_is_refused(tower, make_batch) -> None:
    model = Failing(tower, lambda: manager.execute(make_batch([(1, 4, 4)])))
    manager = captured(model)
    with pytest.raises(RuntimeError, match="from within the model's forward"):
        manager.execute(make_batch([(1, 40, 40)]))
    manager.execute(make_batch([(1, 4, 4)]))


class NoMemoryToWarmUp(Failing):
    """The encoder, with room for the graphs only."""

    def warm_up_encoder_eager(self) -> None:
        fail()


def test_a_warm_up_that_fails_leaves_what_was_captured(encoder, batch) -> None:
    """The budgets that were dropped are gone from the limits, too."""
    model = OutOfMemory(encoder)

    def warm_up() -> None:
        raise RuntimeError("a kernel does not compile")

    model.warm_up_encoder_eager = warm_up
    manager = EncoderCudaGraphManager(model, BUDGETS)
    with pytest.raises(RuntimeError, match="does not compile"):
        manager.capture()
    assert manager.budgets == (16, 64)
    manager.execute(batch([(1, 20, 20)]))
    assert manager.get_cumulative_stats()["misses_by_reason"] == {"too_large": 1}


def test_graphs_are_kept_where_nothing_else_fits(tower, make_batch, caplog) -> None:
    manager = captured(NoMemoryToWarmUp(tower, lambda: None))
    assert manager.is_captured()
    assert "a miss may compile kernels" in caplog.text
    manager.execute(make_batch([(1, 4, 4)]))
    assert manager.get_cumulative_stats()["graph_hits"] == 1
