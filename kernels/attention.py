"""Packed varlen attention: softmax(q k^T / sqrt(D)) v inside each sequence, non-causal, all
heads."""

import itertools

import torch
from torch import Tensor


def attention_reference(
    qkv: Tensor,  # [P, 3, H, D]
    cu_seqlens: Tensor,  # [S + 1]
) -> Tensor:
    """Attend inside each sequence, in the dtype of `qkv` (give it float64 for the truth). Reads the
    offsets on the host.

    Returns:
        [P, H * D]; rows outside every sequence are zero.
    """
    num_patches, _, num_heads, head_dim = qkv.shape
    out = qkv.new_zeros(num_patches, num_heads, head_dim)
    offsets = cu_seqlens.tolist()
    for start, end in itertools.pairwise(offsets):
        q, k, v = qkv[start:end].permute(1, 2, 0, 3)  # [H, L, D] each
        scores = q @ k.transpose(-1, -2) / head_dim**0.5
        out[start:end] = (torch.softmax(scores, dim=-1) @ v).transpose(0, 1)
    return out.flatten(1)
