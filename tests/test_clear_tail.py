"""Zeros behind the last real row."""

import pytest
import torch

from vitgraph.kernels.clear_tail import clear_tail, clear_tail_reference

CASES = {"below": (40, 16), "to_the_end": (40, 60), "full": (100, 16), "none": (0, 5)}


@pytest.mark.parametrize(("real", "rows"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_only_the_tail_changes(real, rows, dtype, device, rng):
    """Of v alone: q and k lie between its rows."""
    qkv = torch.randn(100, 3, 2, 72, generator=rng, device=device).to(dtype)
    qkv[real:] = float("nan")
    expected = qkv.clone()
    expected[real : real + rows, 2] = 0
    num_rows = torch.tensor([real], dtype=torch.int32, device=device)
    reference = qkv.clone()
    clear_tail_reference(reference[:, 2], num_rows, rows)
    clear_tail(qkv[:, 2], num_rows, rows)
    for result in (qkv, reference):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_refuses_rows_in_pieces(device):
    x = torch.zeros(4, 2, 8, device=device)
    with pytest.raises(ValueError, match="must be packed"):
        clear_tail(x.transpose(1, 2), torch.zeros(1, dtype=torch.int32, device=device), 4)
