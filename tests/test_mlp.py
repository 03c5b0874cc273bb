"""mlp against torch in float64."""

import pytest
import torch

from vitgraph.kernels.mlp import mlp, mlp_reference

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
# hidden and intermediate size: small for the interpreter, the towers of 2B and 8B
SIZES = [pytest.param(32, 80, id="tiny")]
SIZES += [pytest.param(*size, marks=pytest.mark.gpu) for size in ((1024, 4096), (1152, 4304))]
ROWS = [
    pytest.param(9, 9, id="full_capacity"),
    pytest.param(9, 5, id="partly_filled"),
    pytest.param(9, 0, id="zero_rows"),
    pytest.param(6000, 400, id="small_tiles_of_a_large_capacity", marks=pytest.mark.gpu),
    pytest.param(6000, 4000, id="large_tiles", marks=pytest.mark.gpu),
]


def factor(dtype):
    """float32: cuBLAS sums a few rows in several partial sums, we in one, which is less exact."""
    return 3.0 if dtype == torch.float32 else 1.1


def make_mlp(rng, rows, hidden, intermediate, dtype):
    def randn(*shape, scale=1.0):
        return (torch.randn(*shape, generator=rng, device=rng.device) * scale).to(dtype)

    layers = randn(intermediate, hidden, scale=hidden**-0.5), randn(intermediate)
    layers += randn(hidden, intermediate, scale=intermediate**-0.5), randn(hidden)
    return randn(rows, hidden), *layers, randn(rows, hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize(("capacity", "real"), ROWS)
def test_matches_truth(
    rng, assert_as_exact_as, poisoned_empty, capacity, real, hidden, intermediate, dtype
):
    x, *layers, residual = make_mlp(rng, capacity, hidden, intermediate, dtype)
    x[real:] = residual[real:] = float("nan")
    doubles = [layer.double() for layer in layers]
    truth = mlp_reference(x[:real].double(), *doubles, residual[:real].double())
    torch_result = mlp_reference(x[:real], *layers, residual[:real])
    num_rows = torch.tensor([real], dtype=torch.int32, device=x.device)
    actual = mlp(x, *layers, residual, num_rows)
    assert actual.data_ptr() == residual.data_ptr()
    if real:
        assert_as_exact_as(actual[:real], torch_result, truth, factor(dtype))
    assert actual[real:].isnan().all()


def test_nan_stays_in_its_row(rng):
    x, *layers, residual = make_mlp(rng, 9, 32, 80, torch.float16)
    clean = mlp(x, *layers, residual.clone())
    x[4, 7] = float("nan")
    dirty = mlp(x, *layers, residual.clone())
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(dirty[others], clean[others])
    assert dirty[4].isnan().all()


def test_cublas(rng, assert_as_exact_as):
    x, *layers, residual = make_mlp(rng, 9, 32, 80, torch.float16)
    doubles = [t.double() for t in (x, *layers, residual)]
    expected = mlp_reference(x, *layers, residual)
    actual = mlp(x, *layers, residual, providers=("cublas", "triton"))
    assert_as_exact_as(actual, expected, mlp_reference(*doubles))
