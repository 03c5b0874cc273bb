"""The MLP of a block: x + fc2(gelu_tanh(fc1(y)))."""

from torch import Tensor

from vitgraph.kernels.linear import Provider, linear, linear_reference


def mlp(
    y: Tensor,  # [P, C]
    fc1_weight: Tensor,  # [M, C]
    fc1_bias: Tensor,  # [M]
    fc2_weight: Tensor,  # [C, M]
    fc2_bias: Tensor,  # [C]
    x: Tensor | None,  # [P, C]
    num_rows: Tensor | None = None,
    *,
    inner: Tensor | None = None,  # [P, M]
    providers: tuple[Provider | None, Provider | None] = (None, None),
) -> Tensor:
    """`mlp_reference` as two launches, the sum written over `x`; rows past `num_rows` are neither
    read nor written. Without `x` what is to be added to it.

    Args:
        inner: memory for the activations between the layers.
        providers: of fc1 and fc2, see `linear`.
    """
    fc1, fc2 = providers
    inner = linear(
        y, fc1_weight, fc1_bias, activation="gelu_tanh", num_rows=num_rows, out=inner, provider=fc1
    )
    return linear(inner, fc2_weight, fc2_bias, residual=x, num_rows=num_rows, out=x, provider=fc2)


def mlp_reference(
    y: Tensor,  # [P, C]
    fc1_weight: Tensor,  # [M, C]
    fc1_bias: Tensor,  # [M]
    fc2_weight: Tensor,  # [C, M]
    fc2_bias: Tensor,  # [C]
    x: Tensor | None,  # [P, C]
    num_rows: Tensor | None = None,
    **memory_and_providers: object,
) -> Tensor:
    """The MLP of each row of `y` added to that row of `x`; rows past `num_rows` (int32 [1], on the
    device) are free."""
    inner = linear_reference(y, fc1_weight, fc1_bias, activation="gelu_tanh")
    return linear_reference(inner, fc2_weight, fc2_bias, residual=x)
