"""Values that are not finite are kept from everybody, and their items told by NaN in k."""

import pytest
import torch

from vitgraph.kernels.isolate import isolate, isolate_reference

CASES = {"below": (40, 16), "to_the_end": (40, 60), "full": (100, 16), "none": (0, 5)}
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]


def random_qkv(rows, heads, head_dim, dtype, rng) -> torch.Tensor:
    return torch.randn(rows, 3, heads, head_dim, generator=rng, device=rng.device).to(dtype)


@pytest.mark.parametrize(("real", "tail"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("head_dim", [64, 72])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_the_reference(real, tail, head_dim, dtype, device, rng):
    """To the bit, also where nothing changes: q, k and rows past the tail."""
    qkv = random_qkv(100, 2, head_dim, dtype, rng)
    qkv[real:] = float("nan")
    for row, head, column, value in ((0, 1, 3, "nan"), (7, 0, -1, "inf"), (39, 1, 0, "-inf")):
        if row < real:
            qkv[row, 2, head, column] = float(value)
    expected = isolate_reference(
        qkv.clone(), torch.tensor([real], dtype=torch.int32, device=device), tail
    )
    num_rows = torch.tensor([real], dtype=torch.int32, device=device)
    assert isolate(qkv, num_rows, tail) is qkv
    torch.testing.assert_close(qkv, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("run", [isolate, isolate_reference])
def test_one_value_costs_its_head_of_its_row(run, value, device, rng):
    qkv = random_qkv(50, 3, 72, torch.float16, rng)
    qkv[11, 2, 1, 71] = float(value)
    qkv[12, :2] = float(value)  # q and k are left to the attention
    expected = qkv.clone()
    expected[11, 1, 1] = float("nan")
    expected[11, 2, 1] = 0
    run(qkv, torch.tensor([50], dtype=torch.int32, device=device), 256)
    torch.testing.assert_close(qkv, expected, rtol=0, atol=0, equal_nan=True)


def test_the_largest_numbers_are_finite(device, rng):
    """Also where their sum or square would not be."""
    qkv = torch.full((9, 3, 2, 72), torch.finfo(torch.float32).max, device=device)
    expected = qkv.clone()
    isolate(qkv, torch.tensor([9], dtype=torch.int32, device=device), 4)
    assert torch.equal(qkv, expected)


def test_a_count_above_the_capacity_stays_inside(device, rng):
    qkv = random_qkv(8, 3, 72, torch.float32, rng)
    expected = qkv[:5].clone()
    isolate(qkv[:5], torch.tensor([90], dtype=torch.int32, device=device), 4)
    assert torch.equal(qkv[:5], expected) and qkv.isfinite().all()


def test_refuses_what_is_not_packed(device):
    qkv, num_rows = torch.zeros(4, 3, 2, 8, device=device), torch.zeros(1, dtype=torch.int32)
    for wrong in (qkv.transpose(0, 1), qkv.transpose(2, 3)):
        with pytest.raises(ValueError, match="contiguous"):
            isolate(wrong, num_rows, 4)
