"""Packed varlen attention: softmax(q k^T / sqrt(D)) v inside each sequence, non-causal, all heads.

The kernels are persistent over a table of work (attention_tiles.py) that is built on the device,
once per forward, from the offsets of the sequences: rows and sequence slots that a batch does not
use cost nothing, and no length is ever read on the host. This file is the entrance; the kernels are
attention_triton.py, for every GPU, and attention_sm90.py; attention_config.py chooses.

Legend: P patches, S sequences, H heads, D head_dim.
"""

import itertools
import math

import torch
from torch import Tensor

from vitgraph.kernels.attention_config import AttentionConfig, attention_config
from vitgraph.kernels.attention_tiles import AttentionTiles, attention_tiles
from vitgraph.kernels.attention_triton import launch_attention_triton
from vitgraph.kernels.launch import num_multiprocessors

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


def attention(
    qkv: Tensor,  # [P, 3, H, D]
    cu_seqlens: Tensor,  # [S + 1]
    *,
    tiles: AttentionTiles | None = None,
    out: Tensor | None = None,  # [P, H * D]
) -> Tensor:
    """Attend inside each sequence; rows outside every sequence are neither used nor written.

    Args:
        qkv: contiguous [P, 3, H, D], float16, bfloat16 or float32; D a multiple of 8 from 16.
        cu_seqlens: int32 [S + 1] on the device of `qkv`, never falling.
        tiles: the table of `attention_tiles` for these offsets, built here if None.
        out: where to store, contiguous [P, H * D].

    Raises:
        ValueError: shapes, strides or dtypes do not fit.
    """
    num_patches, parts, num_heads, head_dim = qkv.shape
    if parts != 3 or not qkv.is_contiguous():
        raise ValueError(f"qkv must be contiguous [P, 3, H, D], got {tuple(qkv.shape)}")
    if head_dim < 16 or head_dim % 8:
        raise ValueError(f"head_dim must be a multiple of 8 from 16 on, got {head_dim}")
    if qkv.dtype not in DTYPES:
        raise ValueError(f"qkv is {qkv.dtype}, none of {', '.join(map(str, DTYPES))}")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or not cu_seqlens.is_contiguous():
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)} with strides "
            f"{cu_seqlens.stride()}, not contiguous int32 [S + 1]"
        )
    shape = num_patches, num_heads * head_dim
    if out is None:
        out = qkv.new_empty(shape)
    if tuple(out.shape) != shape or out.dtype != qkv.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {qkv.dtype} {shape}, got {out.dtype} {tuple(out.shape)} with "
            f"strides {out.stride()}"
        )
    if num_patches == 0:
        return out
    if tiles is None:
        num_sequences = cu_seqlens.shape[0] - 1
        config = attention_config(num_patches, num_sequences, head_dim, qkv.dtype, qkv.device)
        tiles = attention_tiles(cu_seqlens, num_patches, num_heads, config)
    scale_log2 = math.log2(math.e) / head_dim**0.5
    launch = launch_attention_triton
    if not isinstance(tiles.config, AttentionConfig):
        from vitgraph.kernels.attention_sm90 import launch_attention_sm90 as launch
    launch(qkv, out, tiles, scale_log2, num_multiprocessors(qkv.device))
    return out
