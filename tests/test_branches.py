"""A branch of a small graph: where it leaves and joins, and that results are the same without."""

import contextlib
import copy
import dataclasses
import weakref

import pytest
import torch

from vitgraph.encoder import Qwen3VLVisionEncoder, branches, forward
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager, qwen3_vl

CUDA = torch.device("cuda")


class Stream:
    """Says in `log` what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """What streams that are not there do."""
    log: list[str] = []
    main, branch = (Stream(name, log) for name in ("main", "branch"))
    monkeypatch.setattr(branches, "_branch_of", lambda stream: branch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)

    @contextlib.contextmanager
    def entered(stream: Stream):
        log.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "stream", entered)
    return log


def test_a_branch_leaves_and_joins_once(log) -> None:
    x = torch.empty(1)
    alive = weakref.ref(x)
    with branches.branching(CUDA, True) as beside:
        with beside(x):
            log.append("one")
        with beside(torch.empty(1)):
            log.append("two")
        del x
        assert alive() is not None
        log.append("main")
    leaves = ["branch waits for main", "on branch"]
    assert log == [*leaves, "one", *leaves, "two", "main", "main waits for branch"]
    assert alive() is None


def test_a_forward_that_fails_joins_too(log) -> None:
    """A capture that ends with a loose branch reports that, and not that memory ran out."""
    branching = branches.branching(CUDA, True)
    with pytest.raises(MemoryError), branching as beside:  # noqa: SIM117
        with beside(torch.empty(1)):
            raise MemoryError
    assert log[-1] == "main waits for branch"


def test_what_never_left_is_not_joined(log) -> None:
    """A stream outside the capture must not be waited for in it."""
    with branches.branching(CUDA, True):
        pass
    assert log == []


@pytest.mark.parametrize(("device", "wanted"), [(CUDA, False), (torch.device("cpu"), True)])
def test_no_branch(device, wanted, log) -> None:
    with branches.branching(device, wanted) as beside, beside(torch.empty(1)):
        pass
    assert log == []


def test_small_captures_want_it_and_eager_forwards_do_not(encoder) -> None:
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64, 512, 1024), 8))
    manager.capture()
    assert not encoder.plan.branches
    wanted = {budget: plan.branches for budget, plan in manager.model.plans.items()}
    assert wanted == {64: True, 512: True, 1024: False}


@pytest.mark.parametrize("wanted", [False, True])
def test_mergers_of_the_levels_are_on_it(encoder, batch, monkeypatch, wanted) -> None:
    """And only these."""
    beside = []

    @contextlib.contextmanager
    def branching(device: torch.device, wanted: bool):
        yield (
            (lambda x: beside.append(x) or contextlib.nullcontext())
            if wanted
            else (contextlib.nullcontext)
        )

    monkeypatch.setattr(forward, "branching", branching)
    inputs = batch([(1, 4, 4)])
    monkeypatch.setattr(encoder, "plan", dataclasses.replace(encoder.plan, branches=wanted))
    encoder(inputs["pixel_values"], [(1, 4, 4)])
    assert len(beside) == wanted * len(encoder.config.deepstack_visual_indexes)


@pytest.mark.gpu
def test_results_are_the_same_to_the_bit(reference, batch, monkeypatch) -> None:
    """Twenty replays in a row of each, the second of other rows than the first."""
    model = copy.deepcopy(reference).to("cuda", torch.bfloat16)
    encoder = Qwen3VLVisionEncoder.from_transformers(model)
    batches = [
        batch(grids, device="cuda", dtype=torch.bfloat16)
        for grids in ([(1, 4, 4)], [(1, 4, 8), (1, 4, 4)], [(1, 20, 20)], [(2, 8, 8), (1, 12, 16)])
    ]
    outputs = []
    for rows in (0, 2048):
        monkeypatch.setattr(qwen3_vl, "BRANCH_ROWS", rows)
        manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64, 128, 512), 8))
        manager.capture()
        replays = [torch.cat(manager.execute(one)) for one in batches * 20]
        assert manager.get_cumulative_stats()["graph_misses"] == 0
        outputs.append(torch.cat(replays))
    assert torch.equal(*outputs)
