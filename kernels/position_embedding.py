"""Learned position embedding, resampled to each item's grid and added to the patch embeddings.

The table is a square of side N (48 for Qwen3-VL). Patch (row, col) of an h x w grid reads it at

    y = row * (N - 1) / (h - 1),   x = col * (N - 1) / (w - 1)      (0 where h == 1 or w == 1)

with bilinear weights (align-corners, as transformers' Qwen3VLVisionModel). Weights and sums are
float32.
"""

import math

import torch
from torch import Tensor


def position_embedding_reference(
    hidden: Tensor,  # [P, C]
    table: Tensor,  # [N * N, C]
    coords: Tensor,  # [P, 4]
    num_rows: Tensor | None = None,
) -> Tensor:
    """Add the resampled table to `hidden` in place and return it.

    Args:
        hidden: patch embeddings [P, C]; the sum is rounded once to its dtype.
        table: learned embeddings [N * N, C], row-major.
        coords: int32 [P, 4], (row, col, h, w) of each patch.
        num_rows: int32 [1] on the device; rows past it need not be computed.
    """
    side = math.isqrt(table.shape[0])
    row, col, height, width = coords.float().unbind(1)
    y = row * ((side - 1) / (height - 1).clamp(min=1))
    x = col * ((side - 1) / (width - 1).clamp(min=1))
    top, left = y.floor().clamp(max=side - 1), x.floor().clamp(max=side - 1)
    down, right = y - top, x - left
    top, left = top.long(), left.long()
    bottom, far = (top + 1).clamp(max=side - 1), (left + 1).clamp(max=side - 1)

    corners = (
        (top * side + left, (1 - down) * (1 - right)),
        (top * side + far, (1 - down) * right),
        (bottom * side + left, down * (1 - right)),
        (bottom * side + far, down * right),
    )
    embedding = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for index, weight in corners:
        embedding += table[index].float() * weight[:, None]
    return hidden.copy_(hidden.float() + embedding)
