"""Two-dimensional rotary embedding on the q and k parts of a packed qkv, in place.

With D values a head there are D/4 frequencies theta^(-4j/D). The angles of a patch are [row * f,
col * f], D/2 in all, and value i is rotated with value i + D/2 (rotate-half over the whole head).
Angles and products are float32. Source: transformers' Qwen3VLVisionModel (axial rotary, theta
10000).
"""

import torch
from torch import Tensor


def rotary_reference(
    qkv: Tensor,  # [P, 3, H, D]
    coords: Tensor,  # [P, 4]
    num_rows: Tensor | None = None,
    theta: float = 10000.0,
) -> Tensor:
    """Rotate q and k of `qkv` in place and return it.

    Args:
        qkv: packed projections [P, 3, H, D]; D a multiple of 4.
        coords: int32 [P, 4], (row, col, h, w) of each patch.
        num_rows: int32 [1] on the device; rows past it need not be computed.
        theta: base of the geometric series of frequencies.
    """
    head_dim = qkv.shape[-1]
    exponent = torch.arange(0, head_dim, 4, dtype=torch.float32, device=qkv.device) / head_dim
    frequencies = theta**-exponent
    angles = (coords[:, :2].float()[:, :, None] * frequencies).flatten(1)  # [P, D / 2]
    cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
    first, second = qkv[:, :2].float().chunk(2, dim=-1)
    qkv[:, :2] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return qkv
