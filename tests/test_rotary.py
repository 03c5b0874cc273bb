"""rotary against its formula; angles are float32, as transformers has them."""

import pytest
import torch

from vitgraph.kernels.layout import layout_reference
from vitgraph.kernels.rotary import (
    rotary,
    rotary_frequencies,
    rotary_reference,
    rotary_table,
    rotary_table_reference,
)

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
GRIDS = [
    pytest.param([(1, 2, 2)], id="one_token"),
    pytest.param([(2, 2, 4), (1, 4, 2)], id="video_and_image"),
    pytest.param([(1, 90, 60), (1, 64, 64)], id="photographs", marks=pytest.mark.gpu),
]


def inputs(rng, grids, heads, head_dim, dtype):
    grid_thw = torch.tensor(grids, dtype=torch.int32, device=rng.device)
    patches = int(grid_thw.prod(1).sum())
    coords = layout_reference(grid_thw, patches, 64).coords
    shape = patches, 3, heads, head_dim
    qkv = torch.randn(shape, generator=rng, device=rng.device).to(dtype)
    return qkv, coords, rotary_frequencies(head_dim, device=rng.device)


def turn(qkv, coords, frequencies, num_rows=None):
    """Table and rotation, both by the kernels."""
    return rotary(qkv, rotary_table(coords, frequencies, num_rows), num_rows)


def turn_reference(qkv, coords, frequencies):
    return rotary_reference(qkv, rotary_table_reference(coords, frequencies))


def float64(qkv, coords, frequencies):
    """Rotate complex numbers, the angles rounded to float32 first."""
    angles = (coords[:, :2].float()[:, :, None] * frequencies).flatten(1).double()
    first, second = qkv[:, :2].double().chunk(2, dim=-1)
    turned = (
        torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None, None]
    )
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("grids", GRIDS)
def test_matches_truth(rng, assert_as_exact_as, grids, head_dim, dtype):
    qkv, coords, frequencies = inputs(rng, grids, 16, head_dim, dtype)
    v = qkv[:, 2].clone()
    truth = float64(qkv, coords, frequencies)
    torch_result = turn_reference(qkv.clone(), coords, frequencies)[:, :2]
    assert turn(qkv, coords, frequencies) is qkv
    assert_as_exact_as(qkv[:, :2], torch_result, truth)
    assert torch.equal(qkv[:, 2], v)


def test_head_count_that_is_no_power_of_two(rng):
    qkv, coords, frequencies = inputs(rng, [(1, 2, 2)], 3, 72, torch.float32)
    expected = turn_reference(qkv.clone(), coords, frequencies)
    torch.testing.assert_close(turn(qkv, coords, frequencies), expected)


def test_large_coordinates(rng, assert_as_exact_as):
    """An angle of 32,767 keeps its whole precision: no approximate sine."""
    qkv, _, frequencies = inputs(rng, [(1, 2, 2)], 2, 72, torch.float32)
    coords = torch.tensor([[1, 32767], [32767, 0], [20011, 1], [0, 9973]], device=rng.device)
    coords = torch.cat([coords, torch.full_like(coords, 32768)], 1).int()
    truth = float64(qkv, coords, frequencies)
    torch_result = turn_reference(qkv.clone(), coords, frequencies)[:, :2]
    turn(qkv, coords, frequencies)
    assert_as_exact_as(qkv[:, :2], torch_result, truth)
    assert (qkv[:, :2] - truth).abs().max() < 1e-5


@pytest.mark.parametrize("real", [pytest.param(0, id="none_real"), 5])
def test_rows_past_the_count_are_untouched(rng, real):
    qkv, coords, frequencies = inputs(rng, [(1, 2, 4)], 4, 72, torch.float32)
    expected = turn_reference(qkv[:real].clone(), coords[:real], frequencies)
    qkv[real:] = float("nan")
    coords[real:] = torch.iinfo(torch.int32).min
    num_rows = torch.tensor([real], dtype=torch.int32, device=qkv.device)
    turn(qkv, coords, frequencies, num_rows)
    torch.testing.assert_close(qkv[:real], expected)
    assert qkv[real:].isnan().all()


def test_zero_rows(rng):
    qkv, coords, frequencies = inputs(rng, [(1, 2, 2)], 2, 64, torch.float32)
    assert turn(qkv[:0], coords[:0], frequencies).shape == (0, 3, 2, 64)


def test_strided_rows(rng):
    packed, coords, frequencies = inputs(rng, [(1, 2, 4)], 2, 64, torch.float32)
    wide = torch.cat([packed.flatten(1), torch.ones(8, 5, device=rng.device)], dim=1)
    qkv = wide[:, : 3 * 2 * 64].unflatten(1, (3, 2, 64))
    expected = turn_reference(packed.clone(), coords, frequencies)
    torch.testing.assert_close(turn(qkv, coords, frequencies), expected)
    assert (wide[:, 3 * 2 * 64 :] == 1).all()


def test_nan_stays_in_its_row(rng):
    qkv, coords, frequencies = inputs(rng, [(1, 2, 4)], 2, 64, torch.float32)
    clean = turn(qkv.clone(), coords, frequencies)
    qkv[3] = float("nan")
    dirty = turn(qkv, coords, frequencies)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(dirty[others], clean[others])


def test_addresses_past_int32(rng):
    storage = torch.empty(2**31 + 384, dtype=torch.float16, device=rng.device)
    qkv = storage.as_strided((3, 3, 2, 64), (2**30, 128, 64, 1))
    values, coords, frequencies = inputs(rng, [(1, 2, 2)], 2, 64, torch.float16)
    qkv.copy_(values[:3])
    turn(qkv, coords[:3].contiguous(), frequencies)
    assert torch.equal(qkv, turn(values, coords, frequencies)[:3])


@pytest.mark.gpu
def test_more_rows_than_int32_addresses(rng):
    rows = 621_378 + 100  # times 3 x 16 x 72 values a row
    coords = torch.randint(0, 256, (rows, 4), generator=rng, device=rng.device).int()
    qkv = torch.ones(rows, 3, 16, 72, dtype=torch.bfloat16, device=rng.device)
    frequencies = rotary_frequencies(72, device=rng.device)
    expected = turn_reference(qkv[-100:].clone(), coords[-100:], frequencies)
    turn(qkv, coords, frequencies)
    torch.testing.assert_close(qkv[-100:], expected)


def test_frequencies_are_those_of_transformers():
    modeling = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")
    config = modeling.Qwen3VLVisionConfig(hidden_size=1152, num_heads=16)
    theirs = modeling.Qwen3VLVisionRotaryEmbedding(config).inv_freq
    assert torch.equal(rotary_frequencies(72), theirs)


def test_refuses_a_table_of_another_head_dim(rng):
    qkv, coords, _ = inputs(rng, [(1, 2, 2)], 2, 64, torch.float32)
    table = rotary_table(coords, rotary_frequencies(72, device=rng.device))
    with pytest.raises(ValueError, match="head_dim 64"):
        rotary(qkv, table)


def test_refuses_coordinates_that_are_no_rows_of_four(rng):
    _, coords, frequencies = inputs(rng, [(1, 2, 2)], 2, 64, torch.float32)
    for wrong in (coords[:, :2].contiguous(), coords.repeat(1, 2)[:, ::2]):
        with pytest.raises(ValueError, match=r"coords must be contiguous \[P, 4\]"):
            rotary_table(wrong, frequencies)


def test_refuses_frequencies_of_another_dtype(rng):
    _, coords, frequencies = inputs(rng, [(1, 2, 2)], 2, 64, torch.float32)
    with pytest.raises(ValueError, match="float16"):
        rotary_table(coords, frequencies.half())


@pytest.mark.parametrize("real", [0, 1, 33])
def test_table_stops_at_the_count(rng, poisoned_empty, real):
    coords = torch.randint(0, 99, (40, 4), generator=rng, device=rng.device).int()
    frequencies = rotary_frequencies(72, device=rng.device)
    num_rows = torch.tensor([real], dtype=torch.int32, device=rng.device)
    table = rotary_table(coords, frequencies, num_rows)
    torch.testing.assert_close(
        table[:real], rotary_table_reference(coords[:real], frequencies), atol=2e-7, rtol=0
    )
    assert table[real:].isnan().all()
