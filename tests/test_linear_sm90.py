"""The Hopper tier of linear, on the GPUs and Triton releases it is gated to."""

import pytest
import torch

from vitgraph.kernels.launch import hopper_tier_unavailable
from vitgraph.kernels.linear import linear_reference

pytestmark = pytest.mark.gpu

ROWS = [
    pytest.param(300, 0, id="zero_rows"),
    pytest.param(300, 1, id="one_row"),
    pytest.param(300, 64, id="one_consumer"),
    pytest.param(300, 191, id="partial_tile"),
    pytest.param(192, 192, id="full_tile"),
    pytest.param(9000, 1, id="one_row_of_many"),
    pytest.param(9000, 0, id="zero_rows_of_many"),
    pytest.param(9000, 400, id="flat_tiles"),
    pytest.param(9000, 448, id="most_flat_tiles"),
    pytest.param(9000, 2000, id="tall_tiles_of_128"),
    pytest.param(9000, 4096, id="tall_tiles_of_192_one_round"),
    pytest.param(9000, 8999, id="several_tiles_a_program"),
]
# fc2; qkv; fc1, whose 4304 columns end inside a tile; fewer columns than a tile, fewer steps than
# stages
LAYERS = [(1152, 4304), (3456, 1152), (4304, 1152), (72, 88)]


@pytest.fixture
def linear_sm90(device):
    if reason := hopper_tier_unavailable(device):
        pytest.skip(reason)
    from vitgraph.kernels.sm90.linear import linear_sm90

    return linear_sm90


def make_layer(rng, rows, out_features, in_features, dtype):
    def randn(*shape, scale=1.0):
        return (torch.randn(*shape, generator=rng, device=rng.device) * scale).to(dtype)

    x, weight = randn(rows, in_features), randn(out_features, in_features, scale=in_features**-0.5)
    return x, weight, randn(out_features), randn(rows, out_features)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize(("capacity", "real"), ROWS)
@pytest.mark.parametrize("epilogue", ["gelu_tanh", "gelu", "in_place"])
def test_matches_truth(
    linear_sm90, rng, assert_as_exact_as, capacity, real, layer, epilogue, dtype
):
    x, weight, bias, residual = make_layer(rng, capacity, *layer, dtype)
    x[real:] = float("nan")
    wide = torch.full((capacity, layer[0] + 32), float("nan"), dtype=dtype, device=x.device)
    out = wide[:, 16 : 16 + layer[0]]
    added, activation = None, epilogue
    if epilogue == "in_place":
        added, activation = residual[:real].clone(), None
        out[:real] = added
    num_rows = torch.tensor([real], dtype=torch.int32, device=x.device)
    in_place = out if added is not None else None
    linear_sm90(x, weight, bias, activation, in_place, num_rows, out)

    inputs = [x[:real], weight, bias]
    torch_result = linear_reference(*inputs, activation=activation, residual=added)
    doubles = [t.double() for t in inputs]
    added = None if added is None else added.double()
    truth = linear_reference(*doubles, activation=activation, residual=added)
    if real:
        assert_as_exact_as(out[:real], torch_result, truth)
    wide[:real, 16 : 16 + layer[0]] = float("nan")
    assert wide.isnan().all()


def test_nan_stays_in_its_row(linear_sm90, rng):
    x, weight, bias, residual = make_layer(rng, 1000, 1152, 1152, torch.bfloat16)
    clean, dirty = torch.empty_like(residual), torch.empty_like(residual)
    linear_sm90(x, weight, bias, None, residual, None, clean)
    x[500] = float("nan")
    linear_sm90(x, weight, bias, None, residual, None, dirty)
    others = torch.arange(1000, device=x.device) != 500
    assert torch.equal(dirty[others], clean[others])
    assert dirty[500].isnan().all()


@pytest.mark.parametrize("rows", [400, 1000, 8160])
@pytest.mark.parametrize("layer", LAYERS[:2], ids=str)
def test_repeats_bitwise(linear_sm90, rng, rows, layer):
    """A missing barrier would show as an error that moves."""
    x, weight, bias, residual = make_layer(rng, rows, *layer, torch.bfloat16)
    first, again = torch.empty_like(residual), torch.empty_like(residual)
    linear_sm90(x, weight, bias, None, residual, None, first)
    for _ in range(20):
        linear_sm90(x, weight, bias, None, residual, None, again.fill_(float("nan")))
        assert torch.equal(again, first)
