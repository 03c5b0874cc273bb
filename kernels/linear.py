"""A linear layer with its epilogue: act(x @ weight.T + bias) + residual.

`gelu_tanh` is the blocks' activation (hidden_act "gelu_pytorch_tanh"), `gelu` the mergers' (erf).
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["gelu", "gelu_tanh"]


def linear_reference(
    x: Tensor,  # [P, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,  # [P, N]
    num_rows: Tensor | None = None,
    out: Tensor | None = None,  # [P, N], may be a column slice
) -> Tensor:
    """Apply the layer to each row of `x`.

    Args:
        x: input [P, K].
        weight: [N, K], torch.nn.Linear's layout.
        bias: [N] or None.
        activation: applied before the residual.
        residual: added last, [P, N].
        num_rows: int32 [1] on the device; rows past it need not be computed.
        out: where to store, [P, N] with unit stride in the last dimension; may be `residual`
            itself.

    Returns:
        `out`, or a new tensor [P, N].
    """
    y = F.linear(x, weight, bias)
    if activation is not None:
        y = F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    if residual is not None:
        y = y + residual
    return y if out is None else out.copy_(y)
