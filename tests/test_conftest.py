"""The error bound that the kernels' tests share: what must not pass it."""

import pytest
import torch

ROWS, WIDTH = 3000, 64


@pytest.fixture
def rounded() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ours, torch's, truth): bfloat16 of a product, ours with other last bits."""
    truth = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    return (truth * (1 - 1e-4)).bfloat16(), truth.bfloat16(), truth


def test_rounding_passes(rounded, assert_as_exact_as) -> None:
    assert_as_exact_as(*rounded)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_one_wrong_row_of_thousands_fails(value, rounded, assert_as_exact_as) -> None:
    ours, theirs, truth = rounded
    truth, theirs = truth.clone(), theirs.clone()
    # A row that is small: its loss shows in neither the maximum nor the norm.
    truth[1000] *= 1e-2
    theirs[1000] = truth[1000].bfloat16()
    ours[1000] = theirs[1000]
    assert_as_exact_as(ours, theirs, truth)
    ours[1000] = value
    with pytest.raises(AssertionError, match="error"):
        assert_as_exact_as(ours, theirs, truth)


def test_shapes_come_first(assert_as_exact_as) -> None:
    """[1, 8] is not [4, 8], though they can be compared."""
    one, four = torch.ones(1, 8), torch.ones(4, 8)
    for shapes in ((one, four, four), (four, one, four), (four, four, one)):
        with pytest.raises(AssertionError):
            assert_as_exact_as(*shapes)
