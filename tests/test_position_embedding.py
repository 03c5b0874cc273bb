"""position_embedding against its formula in float64."""

import pytest
import torch

from vitgraph.kernels.layout import layout_reference
from vitgraph.kernels.position_embedding import position_embedding, position_embedding_reference

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
SIDE = 48
GRIDS = {
    "one_token": [(1, 2, 2)],
    "one_token_high": [(1, 2, 14)],
    "as_large_as_the_table": [(1, 4, 48)],
    "video_and_image": [(2, 2, 4), (1, 4, 6)],
}
LARGE = [  # very wide; and a usual photograph
    pytest.param([(1, 2, 400), (1, 2, 196)], id="very_wide", marks=pytest.mark.gpu),
    pytest.param([(1, 90, 60), (1, 64, 64)], id="photographs", marks=pytest.mark.gpu),
]


def inputs(rng, grids, width, dtype):
    grid_thw = torch.tensor(grids, dtype=torch.int32, device=rng.device)
    patches = int(grid_thw.prod(1).sum())
    coords = layout_reference(grid_thw, patches, 64).coords
    table = torch.randn(SIDE * SIDE, width, generator=rng, device=rng.device)
    hidden = torch.randn(patches, width, generator=rng, device=rng.device)
    return hidden.to(dtype), table.to(dtype), coords


def float64(hidden, table, coords):
    """The formula with everything in float64, per patch (row, col) of h x w."""
    row, col, height, width = coords.double().unbind(1)
    y = row * (SIDE - 1) / (height - 1).clamp(min=1)
    x = col * (SIDE - 1) / (width - 1).clamp(min=1)
    grid = table.double().view(SIDE, SIDE, -1)
    # hat functions: each table row weighs what its distance to y leaves
    lines = torch.arange(SIDE, device=table.device)
    vertical = (1 - (y[:, None] - lines).abs()).clamp(min=0)
    horizontal = (1 - (x[:, None] - lines).abs()).clamp(min=0)
    return hidden.double() + torch.einsum("pi,pj,ijc->pc", vertical, horizontal, grid)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("width", [1024, 1152])
@pytest.mark.parametrize(
    "grids", [pytest.param(grids, id=name) for name, grids in GRIDS.items()] + LARGE
)
def test_matches_truth(rng, assert_as_exact_as, grids, width, dtype):
    """KNOWN_FAILURES 15 and 16."""
    hidden, table, coords = inputs(rng, grids, width, dtype)
    truth = float64(hidden, table, coords)
    torch_result = position_embedding_reference(hidden.clone(), table, coords)
    # the reference rounds once, as the kernel must: low-precision weights would be far outside
    actual = position_embedding(hidden, table, coords)
    assert actual is hidden
    assert_as_exact_as(actual, torch_result, truth)


def test_one_patch_high(rng):
    """h == 1 never reaches the encoder, but must divide nothing by zero."""
    hidden, table, _ = inputs(rng, [(1, 2, 2)], 64, torch.float32)
    coords = torch.tensor([[0, c, 1, 4] for c in range(4)], dtype=torch.int32, device=rng.device)
    truth = float64(hidden, table, coords)
    actual = position_embedding(hidden, table, coords)
    torch.testing.assert_close(actual, truth.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("real", [pytest.param(0, id="none_real"), 5])
def test_rows_past_the_count_are_untouched(rng, real):
    hidden, table, coords = inputs(rng, [(1, 2, 4)], 1152, torch.float32)
    expected = position_embedding_reference(hidden[:real].clone(), table, coords[:real])
    hidden[real:] = float("nan")
    coords[real:] = torch.iinfo(torch.int32).min
    num_rows = torch.tensor([real], dtype=torch.int32, device=hidden.device)
    position_embedding(hidden, table, coords, num_rows)
    torch.testing.assert_close(hidden[:real], expected)
    assert hidden[real:].isnan().all()


def test_zero_rows(rng):
    hidden, table, coords = inputs(rng, [(1, 2, 2)], 64, torch.float32)
    assert position_embedding(hidden[:0], table, coords[:0]).shape == (0, 64)


def test_strided_rows(rng):
    wide, table, coords = inputs(rng, [(1, 2, 4)], 96, torch.float32)
    hidden, table = wide[:, 3:67], table[:, :64].contiguous()
    expected = position_embedding_reference(hidden.clone(), table, coords)
    beside = wide[:, 67:].clone()
    torch.testing.assert_close(position_embedding(hidden, table, coords), expected)
    assert torch.equal(wide[:, 67:], beside)


def test_nan_stays_in_its_row(rng):
    hidden, table, coords = inputs(rng, [(1, 2, 4)], 64, torch.float32)
    clean = position_embedding(hidden.clone(), table, coords)
    hidden[3] = float("nan")
    dirty = position_embedding(hidden, table, coords)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(dirty[others], clean[others])


def test_addresses_past_int32(rng):
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=rng.device)
    hidden = storage.as_strided((3, 64), (2**30, 1))
    values, table, coords = inputs(rng, [(1, 2, 2)], 64, torch.float16)
    hidden.copy_(values[:3])
    actual = position_embedding(hidden, table, coords[:3].contiguous())
    assert torch.equal(actual, position_embedding(values, table, coords)[:3])


def test_refuses_a_table_that_is_no_square(rng):
    hidden, table, coords = inputs(rng, [(1, 2, 2)], 64, torch.float32)
    with pytest.raises(ValueError, match="square"):
        position_embedding(hidden, table[:-1], coords)
