"""Weights in e4m3 with a norm folded in, against torch in float64."""

import pytest
import torch

from vitgraph.kernels.fp8.quantize import (
    E4M3_MAX,
    LEAST_SCALE,
    fold,
    quantize,
    quantize_reference,
    to_e4m3,
)

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
# (out, in) features: of the tiny tower, and layers of the 8B tower
SMALL = [(304, 144), (3, 1152), (5, 4304)]
LARGE = [pytest.param(n, k, marks=pytest.mark.gpu) for n, k in ((3456, 1152), (1152, 4304))]


def make(rng, rows, depth, dtype, norm_dtype=None):
    def randn(*shape):
        return torch.randn(*shape, generator=rng, device=rng.device)

    weight, bias = randn(rows, depth).to(dtype), randn(rows).to(dtype)
    norm = (1 + randn(depth)).to(norm_dtype or dtype), randn(depth).to(norm_dtype or dtype)
    return weight, bias, *norm


def values(layer):
    return layer.weight.double() * layer.scale.double()[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("with_norm", [True, False], ids=["folded", "plain"])
@pytest.mark.parametrize(("rows", "depth"), SMALL + LARGE)
def test_within_half_a_step_of_the_truth(rng, poisoned_empty, rows, depth, with_norm, dtype):
    parameters = make(rng, rows, depth, dtype)[: 4 if with_norm else 2]
    layer = quantize(*parameters)
    doubles = [p.double() for p in parameters] + [None] * (4 - len(parameters))
    weight, bias = fold(*doubles)
    scale = weight.abs().amax(dim=1, keepdim=True) / E4M3_MAX
    torch.testing.assert_close(layer.scale.double(), scale[:, 0], rtol=1e-6, atol=0)
    # e4m3 has 3 bits behind the first, and steps of 2^-9 near zero
    half_step = (weight.abs() / 16).clamp_min(scale * 2**-10)
    assert ((values(layer) - weight).abs() <= half_step * 1.0001).all()
    torch.testing.assert_close(layer.bias.double(), bias, rtol=1e-5, atol=1e-4)
    expected = quantize_reference(*parameters)
    # where a value lies between two, a last bit of the quotient decides
    assert (layer.weight.float() != expected.weight.float()).float().mean() < 1e-3


def test_the_largest_value_of_a_channel_is_448(rng):
    layer = quantize(*make(rng, 7, 144, torch.float32))
    assert (layer.weight.float().abs().amax(dim=1) == E4M3_MAX).all()


def test_norms_of_another_dtype(rng):
    weight, bias, *norm = make(rng, 4, 144, torch.float16, torch.float32)
    layer, expected = quantize(weight, bias, *norm), quantize_reference(weight, bias, *norm)
    torch.testing.assert_close(layer.scale, expected.scale)


def test_channels_of_zeros(rng):
    weight, bias, *norm = make(rng, 4, 144, torch.float32)
    weight[1] = 0
    for one in (quantize, quantize_reference):
        layer = one(weight, bias, *norm)
        assert (layer.weight[1].float() == 0).all()
        assert layer.scale[1] == torch.tensor(LEAST_SCALE) and layer.bias[1] == bias[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_channel(rng, value):
    weight, bias, *norm = make(rng, 4, 144, torch.float32)
    clean = quantize(weight, bias, *norm)
    weight[2, 5] = value
    for one in (quantize, quantize_reference):
        layer = one(weight, bias, *norm)
        assert not values(layer)[2].isfinite().all()
        for before, after in zip(clean, layer, strict=True):
            torch.testing.assert_close(after.float()[[0, 1, 3]], before.float()[[0, 1, 3]])


def test_folded_norms_are_exact_in_float64(rng):
    weight, bias, norm_weight, norm_bias = (p.double() for p in make(rng, 9, 144, torch.float32))
    x = torch.randn(5, 144, generator=rng, device=rng.device, dtype=torch.float64)
    rows = torch.nn.functional.layer_norm(x, (144,))
    folded, folded_bias = fold(weight, bias, norm_weight, norm_bias)
    expected = (rows * norm_weight + norm_bias) @ weight.T + bias
    torch.testing.assert_close(rows @ folded.T + folded_bias, expected, rtol=1e-12, atol=1e-12)


def test_rounding_to_e4m3():
    """To the nearest, ties to even; above the largest value it, NaN stays."""
    x = torch.tensor([1.0, 1.0625, 1.1875, 449, 1e9, -torch.inf, torch.nan, 2**-10, 2**-9])
    expected = torch.tensor([1.0, 1.0, 1.25, 448, 448, -448, torch.nan, 0, 2**-9])
    torch.testing.assert_close(to_e4m3(x).float(), expected, rtol=0, atol=0, equal_nan=True)


def test_refuses_what_does_not_fit(rng):
    weight, bias, *norm = make(rng, 4, 144, torch.float32)
    with pytest.raises(ValueError, match=r"bias has shape \(3,\).*\(4,\)"):
        quantize(weight, bias[:3])
    with pytest.raises(ValueError, match=r"norm_weight has shape \(3,\).*\(144,\)"):
        quantize(weight, bias, norm[0][:3], norm[1])
    with pytest.raises(ValueError, match="come together"):
        quantize(weight, bias, norm[0])
    with pytest.raises(ValueError, match="contiguous"):
        quantize(weight.t(), bias)
    with pytest.raises(ValueError, match="9000 columns"):
        quantize(torch.empty(1, 9000), bias[:1])
