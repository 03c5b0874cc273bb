"""merger against torch in float64, norm before and after the shuffle."""

import pytest
import torch

from vitgraph.kernels.merger import merger, merger_reference

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
# hidden size of the tower, output width: small for the interpreter, then 2B and 8B
SIZES = [pytest.param(16, 48, id="tiny")]
SIZES += [pytest.param(*size, marks=pytest.mark.gpu) for size in ((1024, 2048), (1152, 4096))]
TOKENS = [
    pytest.param(5, 5, id="full_capacity"),
    pytest.param(5, 3, id="partly_filled"),
    pytest.param(5, 0, id="zero_tokens"),
    pytest.param(1500, 100, id="small_tiles_of_a_large_capacity", marks=pytest.mark.gpu),
    pytest.param(1500, 1000, id="large_tiles", marks=pytest.mark.gpu),
]


def factor(dtype):
    """float32: cuBLAS sums a few rows in several partial sums, we in one, which is less exact."""
    return 3.0 if dtype == torch.float32 else 1.1


def make_merger(rng, tokens, hidden, out_hidden, norm_width, dtype):
    def randn(*shape, scale=1.0):
        return (torch.randn(*shape, generator=rng, device=rng.device) * scale).to(dtype)

    token_width = 4 * hidden
    norm = randn(norm_width), randn(norm_width)
    fc1 = randn(token_width, token_width, scale=token_width**-0.5), randn(token_width)
    fc2 = randn(out_hidden, token_width, scale=token_width**-0.5), randn(out_hidden)
    return randn(4 * tokens, hidden), *norm, *fc1, *fc2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("norm_after_shuffle", [False, True])
@pytest.mark.parametrize(("hidden", "out_hidden"), SIZES)
@pytest.mark.parametrize(("capacity", "real"), TOKENS)
def test_writes_its_columns_of_the_real_rows(
    rng, assert_as_exact_as, capacity, real, hidden, out_hidden, norm_after_shuffle, dtype
):
    norm_width = 4 * hidden if norm_after_shuffle else hidden
    x, *weights = make_merger(rng, capacity, hidden, out_hidden, norm_width, dtype)
    x[4 * real :] = float("nan")
    # two levels side by side, as in the encoder's output; this one is the second
    wide = torch.full((capacity, 2 * out_hidden), float("nan"), dtype=dtype, device=x.device)
    counts = torch.tensor([4 * real, real], dtype=torch.int32, device=x.device)
    actual = merger(
        x, *weights, num_patches=counts[:1], num_tokens=counts[1:], out=wide[:, out_hidden:]
    )
    assert actual.data_ptr() == wide[:, out_hidden:].data_ptr()
    if real:
        truth = merger_reference(x[: 4 * real].double(), *(w.double() for w in weights))
        torch_result = merger_reference(x[: 4 * real], *weights)
        assert_as_exact_as(wide[:real, out_hidden:], torch_result, truth, factor(dtype))
    assert wide[:, :out_hidden].isnan().all()
    assert wide[real:].isnan().all()


def test_nan_stays_in_its_token(rng):
    x, *weights = make_merger(rng, 5, 16, 48, 16, torch.float16)
    clean = merger(x, *weights)
    x[9, 3] = float("nan")  # a patch of token 2
    dirty = merger(x, *weights)
    assert torch.equal(dirty[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    assert dirty[2].isnan().all()


def test_refuses_a_norm_that_fits_neither(rng):
    x, *weights = make_merger(rng, 5, 16, 48, 32, torch.float32)
    with pytest.raises(ValueError, match="32 values for patches of 16, tokens of 64"):
        merger(x, *weights)
