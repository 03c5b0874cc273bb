"""The columns of an embedding, taken apart."""

from torch import Tensor


def split_embeddings(embeddings: Tensor, levels: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The merger's embeddings and those of each deepstack level, as views.

    Args:
        embeddings: [tokens, (1 + levels) * out_hidden], as encoder and manager give them.
        levels: deepstack levels, `len(config.deepstack_visual_indexes)`.

    Returns:
        [tokens, out_hidden], and a tuple of as many for the levels, in ascending depth.

    Raises:
        ValueError: a width that is no multiple of 1 + levels.
    """
    width = embeddings.shape[-1]
    if levels < 0 or width % (1 + levels):
        raise ValueError(f"width {width} is no multiple of {1 + levels} (1 + {levels} levels)")
    merged, *deepstack = embeddings.split(width // (1 + levels), dim=-1)
    return merged, tuple(deepstack)
