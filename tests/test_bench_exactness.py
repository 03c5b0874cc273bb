"""What the benchmarks call exact enough: a few wrong rows among thousands are not."""

import pytest
import torch

from vitgraph.bench.encoder import measure
from vitgraph.bench.exactness import relative_error
from vitgraph.bench.systems import TOLERANCE, System
from vitgraph.bench.workloads import Batch

ROWS, WIDTH, WRONG = 5760, 64, slice(1000, 1005)


def truth_and_rounded(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    truth = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    return truth, truth.to(dtype, copy=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rounding_passes(dtype) -> None:
    truth, rounded = truth_and_rounded(dtype)
    error = relative_error(rounded, truth)
    assert error < TOLERANCE[dtype] and (error > 0) == (dtype != torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("wrong", ["zeroed", "of_a_neighbour", "one_level_zeroed", "nan"])
def test_five_wrong_rows_of_thousands_fail(wrong, dtype) -> None:
    truth, output = truth_and_rounded(dtype)
    if wrong == "zeroed":
        output[WRONG] = 0
        assert (output - truth).norm() < 3e-2 * truth.norm(), "the norm of all rows would pass"
    elif wrong == "of_a_neighbour":
        output[WRONG] = output[WRONG.start + 5 : WRONG.stop + 5].clone()
    elif wrong == "one_level_zeroed":
        output[WRONG, : WIDTH // 4] = 0
    else:
        output[WRONG.start, 0] = float("nan")
    assert relative_error(output, truth) > TOLERANCE[dtype]


def test_shapes_come_first() -> None:
    """[1, 8] is not [4, 8], though it can be subtracted from it."""
    truth = torch.ones(4, 8)
    assert relative_error(truth[:1], truth) == float("inf")
    assert relative_error(truth[:, :1], truth) == float("inf")
    assert relative_error(truth[:0], truth[:0]) == 0
    assert relative_error(truth[:0], truth) == float("inf")


def test_rows_of_zeros() -> None:
    truth = torch.ones(4, 8)
    truth[1] = 0
    assert relative_error(truth.clone(), truth) == 0
    output = truth.clone()
    output[1, 0] = 1e-3
    assert 0 < relative_error(output, truth) < 1


def test_a_system_with_wrong_rows_is_not_timed() -> None:
    """KNOWN_FAILURES 1, as the benchmark would meet it."""
    truth = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    wrong = truth.clone()
    wrong[WRONG] = 0
    systems = [System("right", lambda batch: truth), System("wrong", lambda batch: wrong)]
    batch = Batch(torch.zeros(4 * ROWS, 1), [(1, 4, ROWS)])
    row, _ = measure(systems, batch, "right", turns=2, seconds=5)
    assert not row["systems"]["right"]["wrong"] and "p50_ms" in row["systems"]["right"]
    assert row["systems"]["wrong"]["wrong"] and "p50_ms" not in row["systems"]["wrong"]
