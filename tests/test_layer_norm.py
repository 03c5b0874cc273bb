"""layer_norm against torch in float64."""

import pytest
import torch

from vitgraph.kernels.layer_norm import (
    layer_norm,
    layer_norm_e4m3,
    layer_norm_e4m3_reference,
    layer_norm_reference,
    normalized_scale,
)

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
# hidden sizes of the towers (2B, 8B) and of their mergers' tokens; a width that is no multiple of 8
WIDTHS = [1024, 1152, 4096, 4608, 42]
ROWS = [pytest.param(1, id="one_row"), pytest.param(5, id="few_rows")]
CAPACITY = [pytest.param(8160, id="full_capacity", marks=pytest.mark.gpu)]


def inputs(rng, rows, width, dtype):
    # a mean well above the spread: one-pass variance would cancel
    x = 3 + torch.randn(rows, width, generator=rng, device=rng.device)
    weight = torch.randn(width, generator=rng, device=rng.device)
    bias = torch.randn(width, generator=rng, device=rng.device)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS + CAPACITY)
def test_matches_truth(rng, assert_as_exact_as, poisoned_empty, rows, width, dtype):
    x, weight, bias = inputs(rng, rows, width, dtype)
    truth = layer_norm_reference(x.double(), weight.double(), bias.double())
    torch_result = layer_norm_reference(x, weight, bias)
    assert_as_exact_as(layer_norm(x, weight, bias), torch_result, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS + CAPACITY)
def test_adds_first_as_torch_does(rng, rows, width, dtype):
    """To the bit: the sum, and what is made of it."""
    x, weight, bias = inputs(rng, rows, width, dtype)
    added = 10 * torch.randn(rows, width, generator=rng, device=rng.device).to(dtype)
    total = x + added
    actual = layer_norm(x, weight, bias, added=added)
    assert torch.equal(x, total)
    assert torch.equal(actual, layer_norm(total, weight, bias))


def test_adds_to_real_strided_rows_alone(rng, poisoned_empty):
    wide, weight, bias = inputs(rng, 6, 300, torch.float32)
    before = wide.clone()
    x, weight, bias = wide[:, 100:228], weight[:128], bias[:128]
    added = torch.randn(6, 128, generator=rng, device=rng.device)
    added[4:] = float("nan")
    num_rows = torch.tensor([4], dtype=torch.int32, device=rng.device)
    actual = layer_norm(x, weight, bias, num_rows=num_rows, added=added)
    before[:4, 100:228] += added[:4]
    assert torch.equal(wide, before)
    torch.testing.assert_close(actual[:4], layer_norm_reference(x[:4], weight, bias))
    assert actual[4:].isnan().all()


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("e4m3", [False, True])
def test_programs_that_take_several_rows(rng, poisoned_empty, e4m3, added):
    """A launch has 32 programs here, and on a GPU fewer than there are of these rows."""
    rows, real = (70, 61) if rng.device.type == "cpu" else (20000, 19003)
    x, weight, bias = inputs(rng, rows, 42, torch.float32)
    more = torch.randn(rows, 42, generator=rng, device=rng.device) if added else None
    kept = x[:real] + more[:real] if added else x[:real].clone()
    x[real:] = float("nan")
    num_rows = torch.tensor([real], dtype=torch.int32, device=rng.device)
    if e4m3:
        actual = layer_norm_e4m3(x, num_rows=num_rows, added=more)[:real].float()
        expected = layer_norm_e4m3_reference(kept.clone()).float()
    else:
        actual = layer_norm(x, weight, bias, num_rows=num_rows, added=more)[:real]
        expected = layer_norm_reference(kept, weight, bias)
    assert torch.equal(x[:real], kept) and x[real:].isnan().all()
    close = {"rtol": 0.13, "atol": 1.0} if e4m3 else {}  # one step of e4m3
    torch.testing.assert_close(actual, expected, **close)


@pytest.mark.parametrize("e4m3", [False, True])
def test_references_add_first(rng, e4m3):
    x, weight, bias = inputs(rng, 3, 64, torch.float32)
    added = torch.ones_like(x)
    total = x + 1
    if e4m3:
        actual = layer_norm_e4m3_reference(x, added=added)
        expected = layer_norm_e4m3_reference(total)
    else:
        actual = layer_norm_reference(x, weight, bias, added=added)
        expected = layer_norm_reference(total, weight, bias)
    assert torch.equal(x, total)
    assert torch.equal(actual.float(), expected.float())


@pytest.mark.parametrize("shape", [(3, 64), (4, 32), (4, 128)])
def test_refuses_to_add_what_does_not_fit(rng, shape):
    x, weight, bias = inputs(rng, 4, 64, torch.float32)
    added = torch.zeros(shape, device=rng.device)
    if shape[1] > 64:
        added = added[:, :64]  # strided
    with pytest.raises(ValueError, match="added has shape"):
        layer_norm(x, weight, bias, added=added)


def test_refuses_to_add_another_dtype(rng):
    x, weight, bias = inputs(rng, 4, 64, torch.float16)
    with pytest.raises(ValueError, match=r"torch\.float32, expected .* torch\.float16"):
        layer_norm(x, weight, bias, added=torch.zeros(4, 64, device=rng.device))


def test_zero_rows(rng):
    x, weight, bias = inputs(rng, 0, 1152, torch.float32)
    assert layer_norm(x, weight, bias).shape == (0, 1152)


@pytest.mark.parametrize("real", [pytest.param(0, id="none_real"), 1, 3])
def test_rows_past_the_count_are_neither_read_nor_written(rng, poisoned_empty, real):
    x, weight, bias = inputs(rng, 6, 1152, torch.float32)
    expected = layer_norm_reference(x[:real], weight, bias)
    x[real:] = float("nan")
    num_rows = torch.tensor([real], dtype=torch.int32, device=x.device)
    actual = layer_norm(x, weight, bias, num_rows=num_rows)
    torch.testing.assert_close(actual[:real], expected)
    assert actual[real:].isnan().all()


def test_count_above_capacity_stays_inside(rng):
    x, weight, bias = inputs(rng, 3, 64, torch.float32)
    num_rows = torch.tensor([1000], dtype=torch.int32, device=x.device)
    actual = layer_norm(x, weight, bias, num_rows=num_rows)
    torch.testing.assert_close(actual, layer_norm_reference(x, weight, bias))


def test_strided_rows(rng):
    wide, weight, bias = inputs(rng, 4, 1152, torch.float32)
    x = wide[:, 100:228]  # neither the start nor the stride of a row is aligned to 16 bytes
    weight, bias = weight[:128], bias[:128]
    torch.testing.assert_close(layer_norm(x, weight, bias), layer_norm_reference(x, weight, bias))


def test_nan_stays_in_its_row(rng):
    x, weight, bias = inputs(rng, 4, 1152, torch.float32)
    clean = layer_norm(x, weight, bias)
    x[1, 7] = float("nan")
    dirty = layer_norm(x, weight, bias)
    assert dirty[1].isnan().all()
    assert torch.equal(dirty[[0, 2, 3]], clean[[0, 2, 3]])


def test_addresses_past_int32(rng):
    # three rows 2^30 values apart: the last starts at 2^31; untouched memory is never committed
    storage = torch.empty(2**31 + 1024, dtype=torch.float16, device=rng.device)
    x = storage.as_strided((3, 1024), (2**30, 1))
    values, weight, bias = inputs(rng, 3, 1024, torch.float16)
    x.copy_(values)
    torch.testing.assert_close(layer_norm(x, weight, bias), layer_norm(values, weight, bias))


@pytest.mark.gpu
def test_output_addresses_past_int32(rng):
    row, weight, bias = inputs(rng, 1, 1152, torch.bfloat16)
    rows = 2**31 // 1152 + 2
    out = layer_norm(row.expand(rows, 1152), weight, bias)
    assert (out == layer_norm(row, weight, bias)).all()


def test_refuses_a_row_too_wide(rng):
    x, weight, bias = inputs(rng, 1, 8193, torch.float32)
    with pytest.raises(ValueError, match="8193"):
        layer_norm(x, weight, bias)


def test_refuses_weights_that_do_not_fit(rng):
    x, weight, bias = inputs(rng, 2, 128, torch.float32)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\) .*\(128,\)"):
        layer_norm(x, weight[:4], bias)
    with pytest.raises(ValueError, match=r"bias has shape \(128,\) and strides \(2,\)"):
        layer_norm(x, weight, bias.repeat_interleave(2)[::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS + CAPACITY)
def test_e4m3_is_within_half_a_step(rng, rows, width, dtype):
    x, *_ = inputs(rng, rows, width, dtype)
    truth = torch.nn.functional.layer_norm(x.double(), (width,), eps=1e-6)
    scale = normalized_scale(width)
    actual = layer_norm_e4m3(x)
    assert actual.dtype == torch.float8_e4m3fn
    half_step = (truth.abs() / 16).clamp_min(scale * 2**-10) * 1.0001 + 1e-5
    assert ((actual.double() * scale - truth).abs() <= half_step).all()
    expected = layer_norm_e4m3_reference(x)
    assert (actual.float() != expected.float()).float().mean() < 2e-3


def test_e4m3_of_one_value_that_holds_a_whole_row(rng):
    """The largest that a normalised value can be: not saturated, though next to 448."""
    x = torch.zeros(2, 1152, device=rng.device)
    x[0, 5], x[1, 1100] = 1e4, -3.0
    actual = layer_norm_e4m3(x, eps=0.0).double() * normalized_scale(1152)
    truth = torch.nn.functional.layer_norm(x.double(), (1152,), eps=0.0)
    assert abs(truth).amax() > 33.9
    torch.testing.assert_close(actual, truth, rtol=1 / 16, atol=1e-3)


def test_e4m3_rows_past_the_count_and_nan(rng, poisoned_empty):
    x, *_ = inputs(rng, 6, 1152, torch.float32)
    clean = layer_norm_e4m3(x)
    x[1, 7], x[2, 8], x[4:] = float("nan"), float("inf"), float("nan")
    num_rows = torch.tensor([4], dtype=torch.int32, device=x.device)
    dirty = layer_norm_e4m3(x, num_rows=num_rows)
    clean, dirty = clean.float(), dirty.float()
    assert dirty[1].isnan().all() and dirty[2].isnan().all()
    assert torch.equal(dirty[[0, 3]], clean[[0, 3]])
    assert dirty[4:].isnan().all()  # as it was
