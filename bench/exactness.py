"""How far an output is from the truth, as a whole and in its worst row."""

from torch import Tensor

# A row may be this many times less exact than the whole: a few wrong rows among thousands hardly
# show in a norm over all of them.
ROW_ALLOWANCE = 10


def relative_error(output: Tensor, truth: Tensor) -> float:
    """Relative error by Euclidean norms: that of the whole or a tenth of the worst row's, whichever
    is larger; infinite where the shapes differ or a NaN is in either.

    Args:
        output, truth: [rows, ...], of any dtype, on any device.
    """
    if output.shape != truth.shape:
        return float("inf")
    if not truth.numel():
        return 0.0
    truth = truth.double().flatten(1)
    difference = (output.to(truth.device).double().flatten(1) - truth).norm(dim=1)
    sizes = truth.norm(dim=1)
    whole = difference.norm() / sizes.norm()
    # a row of zeros, or nearly, is measured by its neighbours
    worst = (difference / sizes.clamp_min(1e-3 * sizes.square().mean().sqrt())).amax()
    error = max(whole.item(), worst.item() / ROW_ALLOWANCE)
    return error if (difference.sum() + sizes.sum()).isfinite() else float("inf")
