"""Attention backends behind one function, on the packed qkv of all items.

triton       ours; every dtype, no lengths on the host, empty capacity is free
flash_attn   varlen FlashAttention: torch's own build of FlashAttention 2; CUDA, bf16 and fp16
sdpa         torch's scaled_dot_product_attention, frame by frame; lengths on the host, so it
             cannot be captured
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from vitgraph.kernels.attention import attention, attention_config, attention_tiles
from vitgraph.kernels.launch import is_interpreted
from vitgraph.kernels.layout import Layout

Attend = Callable[[Tensor], Tensor]  # qkv [P, 3, H, D] -> [P, H * D]


@dataclass(frozen=True)
class Heads:
    """What attention needs to know of a tower."""

    count: int
    dim: int
    dtype: torch.dtype


def triton(layout: Layout, heads: Heads) -> Attend:
    """Build the tile table of the batch once; all layers share it."""
    offsets, num_patches = layout.cu_seqlens, layout.coords.shape[0]
    # Slots are free, so a graph has many; how many a batch will use is known in eager runs only.
    expected = len(layout.seqlens) if layout.seqlens is not None else 1
    config = attention_config(num_patches, expected, heads.dim, heads.dtype, offsets.device)
    tiles = attention_tiles(offsets, num_patches, heads.count, config, layout.num_sequences)
    return lambda qkv: attention(qkv, offsets, tiles=tiles)


def flash_attn(layout: Layout, heads: Heads) -> Attend:
    """FlashAttention reads the offsets on the device; its grid is sized by the longest sequence a
    capacity allows, and every sequence slot pays for that."""
    from torch.nn.attention.varlen import varlen_attn

    offsets, longest = layout.cu_seqlens, layout.max_seqlen

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unbind(1)
        return varlen_attn(q, k, v, offsets, offsets, longest, longest).flatten(1)

    return attend


def sdpa(layout: Layout, heads: Heads) -> Attend:
    """Attend with torch, one call a run of sequences of equal length."""
    if layout.seqlens is None:
        raise ValueError(
            "attention backend 'sdpa' reads sequence lengths on the host and cannot be captured"
        )

    def attend(qkv: Tensor) -> Tensor:
        out = qkv.new_empty(qkv.shape[0], *qkv.shape[2:])  # [P, H, D]
        start = 0
        for length, run in groupby(layout.seqlens):
            count = sum(1 for _ in run)
            rows = slice(start, start + count * length)
            q, k, v = qkv[rows].unflatten(0, (count, length)).permute(2, 0, 3, 1, 4)  # [n, H, L, D]
            attended = F.scaled_dot_product_attention(q, k, v)
            out[rows] = attended.transpose(1, 2).flatten(0, 1)
            start = rows.stop
        return out.flatten(1)

    return attend


BACKENDS: dict[str, Callable[[Layout, Heads], Attend]] = {
    "triton": triton,
    "flash_attn": flash_attn,
    "sdpa": sdpa,
}
# Backends whose cost does not depend on sequence slots that a batch leaves empty.
FREE_OF_EMPTY_SEQUENCES = frozenset({"triton", "sdpa"})


def resolve_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Choose for "auto", and refuse a backend that cannot serve this device and dtype.

    Raises:
        ValueError: naming the backend and what it cannot do.
    """
    if name == "auto":
        return "triton" if device.type == "cuda" else "sdpa"
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is none of auto, {', '.join(BACKENDS)}")
    on_gpu = device.type == "cuda"
    if name == "triton" and not (on_gpu or is_interpreted()):
        raise ValueError(f"attention backend 'triton' needs CUDA, not {device.type}")
    if name == "flash_attn" and not (on_gpu and dtype in (torch.float16, torch.bfloat16)):
        raise ValueError(
            f"attention backend 'flash_attn' needs CUDA and bf16 or fp16, not {device.type} {dtype}"
        )
    return name
