"""FP8 by environment variable, as both plugins read it."""

import logging

import pytest
import torch

from vitgraph.encoder import GEOMETRIES
from vitgraph.graphs import linears
from vitgraph.graphs.linears import Linears, choose_linears, read_linears, report_linears

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = GEOMETRIES["8b"]


@pytest.fixture
def ask(monkeypatch):
    """Sets the two variables; None leaves one out."""
    monkeypatch.setattr(linears, "why_no_e4m3", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def ask(dtype: str | None, skipped: str | None = None) -> None:
        for name, value in (
            (linears.LINEAR_DTYPE, dtype),
            (linears.FP8_SKIP_BLOCKS, skipped),
        ):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)

    return ask


@pytest.mark.parametrize(
    ("dtype", "skipped", "found", "said"),
    [
        (None, None, Linears(), ""),
        ("", "", Linears(), ""),
        ("same", "0", Linears(), ""),
        (" FP8 ", None, Linears("fp8"), ", fp8"),
        ("fp8", "1", Linears("fp8", 1), ", fp8 (first block in bfloat16)"),
        ("fp8", " 26 ", Linears("fp8", 26), ", fp8 (first 26 blocks in bfloat16)"),
    ],
)
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_what_is_asked_for(dtype, skipped, found, said, device, ask, caplog) -> None:
    ask(dtype, skipped)
    assert choose_linears(CONFIG, device, False, logging.getLogger()) == found
    assert found.said(torch.bfloat16) == said
    own = "in the tower's dtype; VITGRAPH_LINEAR_DTYPE=fp8 for FP8"
    assert report_linears() == (said.removeprefix(", ") or own)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("dtype", "skipped", "invariant", "reason"),
    [
        ("fp9", None, False, "VITGRAPH_LINEAR_DTYPE=fp9: linear_dtype 'fp9' is none of same, fp8"),
        (
            "fp8",
            "27",
            False,
            "VITGRAPH_LINEAR_DTYPE=fp8 VITGRAPH_FP8_SKIP_BLOCKS=27: fp8_skip_blocks 27 must be an "
            "integer from 0 to 26: the tower has 27 blocks",
        ),
        ("fp8", "-1", False, "VITGRAPH_FP8_SKIP_BLOCKS=-1: '-1' is no number of blocks"),
        (None, "few", False, "VITGRAPH_FP8_SKIP_BLOCKS=few: 'few' is no number of blocks"),
        (None, "3", False, "fp8_skip_blocks 3 goes with linear_dtype 'fp8', not 'same'"),
        ("fp8", None, True, "VITGRAPH_LINEAR_DTYPE=fp8: batch_invariant has linear_dtype 'same'"),
    ],
)
def test_what_cannot_be_had(dtype, skipped, invariant, reason, ask, caplog) -> None:
    """Our tower serves all the same, and one line says why without FP8."""
    ask(dtype, skipped)
    with pytest.raises(ValueError) as error:
        read_linears(CONFIG, CUDA, invariant)
    assert reason in str(error.value)
    assert choose_linears(CONFIG, CUDA, invariant, logging.getLogger()) == Linears()
    (line,) = caplog.messages
    assert line == f"vitgraph: no FP8, the layers keep the tower's dtype: {error.value}"
    assert report_linears(invariant) == f"in the tower's dtype: {error.value}"


def test_a_gpu_without_e4m3(ask, monkeypatch) -> None:
    reason = "e4m3 needs compute capability 8.9, this GPU has 8.0"
    monkeypatch.setattr(linears, "why_no_e4m3", lambda device: reason)
    ask("fp8")
    with pytest.raises(ValueError, match=f"VITGRAPH_LINEAR_DTYPE=fp8: {reason}"):
        read_linears(CONFIG, CUDA, False)
    assert report_linears() == f"in the tower's dtype: VITGRAPH_LINEAR_DTYPE=fp8: {reason}"
    assert read_linears(CONFIG, CPU, False) == Linears("fp8")
    ask("same")
    assert read_linears(CONFIG, CUDA, False) == Linears()
