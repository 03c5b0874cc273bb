"""The trial of the Hopper kernels under a release of Triton that they were not tested with."""

import logging
import subprocess
import sys

import pytest
import torch

from vitgraph.kernels import launch
from vitgraph.kernels.sm90 import trial, trial_cases

GPU = torch.device("cuda", 0)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture
def untested(monkeypatch):
    """A Hopper GPU under a release that is not in the list; `answers` is what its trial does."""
    monkeypatch.setattr(launch, "GLUON_RELEASES", ())
    monkeypatch.setattr(launch, "capability_of", lambda device: (9, 0))
    monkeypatch.delenv("VITGRAPH_HOPPER_TIER", raising=False)
    trial.failure.cache_clear()
    commands = []

    def answers(code: str = "", **raises: Exception) -> list[list[str]]:
        real = subprocess.run

        def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
            commands.append(command)
            if raises:
                raise raises["error"]
            return real([sys.executable, "-c", code], **options)

        monkeypatch.setattr(trial.subprocess, "run", run)
        return commands

    yield answers
    trial.failure.cache_clear()


def test_an_untested_release_serves_once_it_passed(untested, caplog):
    commands = untested(f"print({trial.PASSED!r})")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert launch.hopper_tier_unavailable(GPU) is None
    assert len(commands) == 1
    assert "untested" in caplog.text


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('row 3 is off by 0.5'); raise SystemExit(1)", "row 3 is off by 0.5"),
        ("import os; os.abort()", "exit status -6"),
        ("raise ImportError('no gluon')", "no gluon"),
        ("import os; os.write(1, bytes([255])); os._exit(3)", "exit status 3"),
        ("", "exit status 0: no output"),
    ],
    ids=["wrong", "crashed", "gone", "no_text", "another_program"],
)
def test_one_that_fails_is_left_out_and_says_why(untested, caplog, code, said):
    untested(code)
    with caplog.at_level(logging.WARNING):
        assert said in launch.hopper_tier_unavailable(GPU)
    assert "the portable kernels serve" in caplog.text


@pytest.mark.parametrize(
    "error", [subprocess.TimeoutExpired("trial", 300), OSError("no such file")], ids=str
)
def test_one_that_hangs_or_does_not_start_is_left_out(untested, error):
    untested(error=error)
    assert "tried with triton" in launch.hopper_tier_unavailable(GPU)


def test_can_be_left_out_by_the_environment(untested, monkeypatch):
    commands = untested("")
    monkeypatch.setenv("VITGRAPH_HOPPER_TIER", "off")
    assert "VITGRAPH_HOPPER_TIER" in launch.hopper_tier_unavailable(GPU)
    assert commands == []


def test_another_word_in_the_environment_is_a_mistake(monkeypatch):
    monkeypatch.setenv("VITGRAPH_HOPPER_TIER", "false")
    with pytest.raises(ValueError, match="VITGRAPH_HOPPER_TIER 'false' is neither 'on' nor 'off'"):
        launch.hopper_tier_unavailable(GPU)


TRUTH = torch.ones(4, 8, dtype=torch.float64)
PAST = torch.full((2, 8), float("nan"))


@pytest.mark.parametrize(
    ("results", "past", "problem"),
    [
        ([TRUTH, TRUTH], PAST, None),
        ([TRUTH.clone().index_fill_(0, torch.tensor(2), 1.5)], PAST, "row 2 is off"),
        ([TRUTH.clone().index_fill_(0, torch.tensor(1), float("nan"))], PAST, "row 1 is off"),
        ([TRUTH, TRUTH + 1e-6], PAST, "launches differ"),
        ([TRUTH], torch.zeros(2, 8), "rows past the last are written"),
    ],
    ids=["right", "one_row", "nan", "moving", "past"],
)
def test_what_counts_as_wrong(results, past, problem):
    found = trial_cases._compare(results, TRUTH, past)
    assert found is None if problem is None else problem in found


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_passes_under_this_release():
    assert trial._run(0) is None
