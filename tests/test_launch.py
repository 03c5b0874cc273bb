"""Dependent launches and branches: who asks for them, and that results are the same without."""

import contextlib
import copy
import importlib.util
import math
import weakref
from pathlib import Path

import pytest
import torch

from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager
from vitgraph.kernels import launch

_SPEC = importlib.util.spec_from_file_location(
    "captured_tower", Path(__file__).with_name("captured_tower.py")
)
captured_tower = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(captured_tower)
captured = captured_tower.captured

OFF, ON = {"DEPENDENT": False}, {"DEPENDENT": True, "launch_pdl": True}


def options(capability: launch.Capability, rows: int, monkeypatch) -> dict[str, bool]:
    monkeypatch.setattr(launch, "capability_of", lambda device: capability)
    with launch.captured_rows(rows):
        return launch.dependence(torch.device("cuda"))


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_few_rows_are_dependent(capability, monkeypatch) -> None:
    assert options(capability, 1, monkeypatch) == ON
    assert options(capability, 2048, monkeypatch) == ON
    assert options(capability, 2049, monkeypatch) == OFF


@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (8, 9)])
def test_what_cannot_is_not(capability, monkeypatch) -> None:
    """Interpreted kernels, and GPUs before Hopper."""
    assert options(capability, 1, monkeypatch) == OFF


def test_amd_is_not(monkeypatch) -> None:
    """Their capabilities are above 9.0, too."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert options((9, 4), 1, monkeypatch) == OFF


def test_none_where_switched_off(monkeypatch) -> None:
    monkeypatch.setattr(launch, "DEPENDENT_ROWS", 0)
    assert options((9, 0), 1, monkeypatch) == OFF


def test_only_inside_the_block(monkeypatch) -> None:
    """Also behind a forward that failed."""
    monkeypatch.setattr(launch, "capability_of", lambda device: (9, 0))
    device = torch.device("cuda")
    assert launch.dependence(device) == OFF
    with pytest.raises(MemoryError), launch.captured_rows(64):
        assert launch.dependence(device) == ON
        with launch.captured_rows(4096):
            assert launch.dependence(device) == OFF
        assert launch.dependence(device) == ON
        raise MemoryError
    assert launch.dependence(device) == OFF


def test_captured_forwards_ask_and_eager_ones_do_not(encoder, batch, monkeypatch) -> None:
    """By their capacity, in patches."""
    monkeypatch.setattr(launch, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(launch, "DEPENDENT_ROWS", 256)
    asked = []
    encode = Qwen3VLVisionEncoder.encode

    def spied(self, pixels, *arguments, **options):
        asked.append((len(pixels), launch.dependence(self.device)["DEPENDENT"]))
        return encode(self, pixels, *arguments, **options)

    monkeypatch.setattr(Qwen3VLVisionEncoder, "encode", spied)
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64, 128), 8))
    manager.capture()
    manager.execute(batch([(1, 16, 16)]))
    manager.execute(batch([(1, 16, 32)]))
    encoder(batch([(1, 4, 4)])["pixel_values"], [(1, 4, 4)])
    assert asked[-3:] == [(256, True), (512, False), (16, False)]


class Stream:
    """Says in `log` what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """What streams that are not there do; the capture is of few patches."""
    log: list[str] = []
    main, branch = (Stream(name, log) for name in ("main", "branch"))
    monkeypatch.setattr(launch, "_branch_of", lambda stream: branch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(launch, "capability_of", lambda device: (9, 0))
    return log


def test_a_branch_leaves_and_joins_once(log) -> None:
    device = torch.device("cuda")
    x = torch.empty(1)
    alive = weakref.ref(x)
    with launch.captured_rows(400), launch.branching(device) as beside:
        with beside(x):
            assert launch.dependence(device) == OFF
            log.append("one")
        assert launch.dependence(device) == ON
        with beside(torch.empty(1)):
            log.append("two")
        del x
        assert alive() is not None
        log.append("main")
    leaves = "branch waits for main"
    assert log == [leaves, "one", leaves, "two", "main", "main waits for branch"]
    assert alive() is None


def test_a_forward_that_fails_joins_too(log) -> None:
    """A capture that ends with a loose branch reports that, and not that memory ran out."""
    branching = launch.branching(torch.device("cuda"))
    with pytest.raises(MemoryError), launch.captured_rows(400), branching as beside:  # noqa: SIM117
        with beside(torch.empty(1)):
            raise MemoryError
    assert log[-1] == "main waits for branch"


def test_what_never_left_is_not_joined(log) -> None:
    """A stream outside the capture must not be waited for in it."""
    with launch.captured_rows(400), launch.branching(torch.device("cuda")):
        pass
    assert log == []


@pytest.mark.parametrize("rows", [2049, math.inf])
def test_large_and_eager_forwards_have_no_branch(rows, log) -> None:
    device = torch.device("cuda")
    with launch.captured_rows(rows), launch.branching(device) as beside, beside(torch.empty(1)):
        pass
    assert log == []


@pytest.mark.gpu
def test_results_are_the_same_to_the_bit(reference, batch, monkeypatch) -> None:
    """Twenty replays in a row of each, the second of other rows than the first."""
    model = copy.deepcopy(reference).to("cuda", torch.bfloat16)
    tower = Qwen3VLVisionEncoder.from_transformers(model)
    batches = [
        batch(grids, device=tower.device, dtype=tower.dtype)
        for grids in ([(1, 4, 4)], [(1, 4, 8), (1, 4, 4)], [(1, 20, 20)], [(2, 8, 8), (1, 12, 16)])
    ]
    outputs = {}
    for rows in ((0, 0), (2048, 0), (0, 2048), (2048, 2048)):
        for name, value in zip(("DEPENDENT_ROWS", "BRANCH_ROWS"), rows, strict=True):
            monkeypatch.setattr(launch, name, value)
        manager = captured(tower)
        replays = [torch.cat(manager.execute(one)) for one in batches * 20]
        assert manager.get_cumulative_stats()["graph_hits"] == len(replays)
        outputs[rows] = torch.cat(replays)
    for rows, output in outputs.items():
        assert torch.equal(output, outputs[0, 0]), rows
