"""Patch merger: LayerNorm, the 2x2 shuffle, fc1 with exact GELU, fc2, into a column slice of the
encoder's output.

The shuffle is a view: patches come in spatial-merge order, so a token's merge**2 patches are
consecutive rows. The trunk's merger normalises patches [P, C] before the view, the deepstack
mergers normalise tokens [T, merge**2 * C] after it.
"""

from torch import Tensor

from vitgraph.kernels.layer_norm import layer_norm, layer_norm_reference
from vitgraph.kernels.linear import Provider, linear, linear_reference


def merger(
    x: Tensor,  # [P, C]
    norm_weight: Tensor,  # [C] or [merge**2 * C]
    norm_bias: Tensor,
    fc1_weight: Tensor,  # [merge**2 * C, merge**2 * C]
    fc1_bias: Tensor,
    fc2_weight: Tensor,  # [O, merge**2 * C]
    fc2_bias: Tensor,
    *,
    eps: float = 1e-6,
    num_patches: Tensor | None = None,
    num_tokens: Tensor | None = None,
    out: Tensor | None = None,  # [T, O], may be a column slice
    providers: tuple[Provider | None, Provider | None] = (None, None),
) -> Tensor:
    """`merger_reference` as three launches; rows past the counts are neither read nor written.

    Args:
        providers: of fc1 and fc2, see `linear`.

    Raises:
        ValueError: the norm is as wide as neither a patch nor a token.
    """
    (num_rows, width), token_width = x.shape, fc1_weight.shape[1]
    tokens = x.view(num_rows * width // token_width, token_width)
    if norm_weight.shape[0] == token_width:
        normed = layer_norm(tokens, norm_weight, norm_bias, eps, num_tokens)
    elif norm_weight.shape[0] == width:
        normed = layer_norm(x, norm_weight, norm_bias, eps, num_patches).view(tokens.shape)
    else:
        raise ValueError(
            f"norm of {norm_weight.shape[0]} values for patches of {width}, tokens of {token_width}"
        )
    inner = linear(
        normed, fc1_weight, fc1_bias, activation="gelu", num_rows=num_tokens, provider=providers[0]
    )
    return linear(
        inner, fc2_weight, fc2_bias, num_rows=num_tokens, out=out, provider=providers[1]
    )  # fmt: skip


def merger_reference(
    x: Tensor,  # [P, C]
    norm_weight: Tensor,  # [C] or [merge**2 * C]
    norm_bias: Tensor,
    fc1_weight: Tensor,  # [merge**2 * C, merge**2 * C]
    fc1_bias: Tensor,
    fc2_weight: Tensor,  # [O, merge**2 * C]
    fc2_bias: Tensor,
    *,
    eps: float = 1e-6,
    num_patches: Tensor | None = None,
    num_tokens: Tensor | None = None,
    out: Tensor | None = None,  # [T, O], may be a column slice
    providers: tuple[Provider | None, Provider | None] = (None, None),
) -> Tensor:
    """Merge the patches of each token.

    Args:
        x: trunk activations [P, C].
        norm_weight: its length decides whether the norm comes before the shuffle (C) or after it
            (merge**2 * C).
        num_patches, num_tokens: int32 [1] on the device; rows past them need not be computed.
        out: where to store, [T, O] with unit stride in the last dimension.

    Returns:
        `out`, or a new tensor [T, O].
    """
    token_width = fc1_weight.shape[1]
    if norm_weight.shape[0] == token_width:
        x = layer_norm_reference(x.view(-1, token_width), norm_weight, norm_bias, eps, num_tokens)
    else:
        x = layer_norm_reference(x, norm_weight, norm_bias, eps, num_patches).view(-1, token_width)
    inner = linear_reference(x, fc1_weight, fc1_bias, activation="gelu", num_rows=num_tokens)
    return linear_reference(inner, fc2_weight, fc2_bias, num_rows=num_tokens, out=out)
