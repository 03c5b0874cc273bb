"""The MLP of a block: fc2(gelu_tanh(fc1(x))) + residual."""

from torch import Tensor

from vitgraph.kernels.linear import Provider, linear, linear_reference


def mlp(
    x: Tensor,  # [P, C]
    fc1_weight: Tensor,  # [M, C]
    fc1_bias: Tensor,  # [M]
    fc2_weight: Tensor,  # [C, M]
    fc2_bias: Tensor,  # [C]
    residual: Tensor,  # [P, C]
    num_rows: Tensor | None = None,
    *,
    out: Tensor | None = None,  # [P, C]; may be `residual` itself
    inner: Tensor | None = None,  # [P, M]
    providers: tuple[Provider | None, Provider | None] = (None, None),
) -> Tensor:
    """`mlp_reference` as two launches; rows past `num_rows` are neither read nor written.

    Args:
        inner: memory for the activations between the layers.
        providers: of fc1 and fc2, see `linear`.
    """
    inner = linear(
        x, fc1_weight, fc1_bias, activation="gelu_tanh", num_rows=num_rows, out=inner,
        provider=providers[0],
    )  # fmt: skip
    return linear(
        inner, fc2_weight, fc2_bias, residual=residual, num_rows=num_rows, out=out,
        provider=providers[1],
    )  # fmt: skip


def mlp_reference(
    x: Tensor,  # [P, C]
    fc1_weight: Tensor,  # [M, C]
    fc1_bias: Tensor,  # [M]
    fc2_weight: Tensor,  # [C, M]
    fc2_bias: Tensor,  # [C]
    residual: Tensor,  # [P, C]
    num_rows: Tensor | None = None,
    *,
    out: Tensor | None = None,  # [P, C]; may be `residual` itself
    inner: Tensor | None = None,  # [P, M]
    providers: tuple[Provider | None, Provider | None] = (None, None),
) -> Tensor:
    """Apply the MLP to each row of `x`; rows past `num_rows` (int32 [1], on device) are free."""
    inner = linear_reference(
        x, fc1_weight, fc1_bias, activation="gelu_tanh", num_rows=num_rows, out=inner
    )
    return linear_reference(
        inner, fc2_weight, fc2_bias, residual=residual, num_rows=num_rows, out=out
    )
