"""Attention backends behind one function, on the packed qkv of all items.

flash_attn   varlen FlashAttention: torch's own build of FlashAttention 2; CUDA, bf16 and fp16
sdpa         torch's scaled_dot_product_attention, frame by frame; needs the lengths on the
host, so it cannot be captured
"""

from collections.abc import Callable
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from vitgraph.kernels.layout import Layout

AttentionFn = Callable[[Tensor, Layout], Tensor]


def sdpa(qkv: Tensor, layout: Layout) -> Tensor:
    """Attend with torch, one call a run of sequences of equal length."""
    if layout.seqlens is None:
        raise ValueError(
            "attention backend 'sdpa' reads sequence lengths on the host and cannot be captured; "
            "use bf16 or fp16 with 'flash_attn', or run eagerly"
        )
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


def flash_attn(qkv: Tensor, layout: Layout) -> Tensor:
    """Attend with FlashAttention; offsets are read on the device, so it can be captured."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = qkv.unbind(1)
    offsets, longest = layout.cu_seqlens, layout.max_seqlen
    return varlen_attn(q, k, v, offsets, offsets, longest, longest).flatten(1)


BACKENDS: dict[str, AttentionFn] = {"flash_attn": flash_attn, "sdpa": sdpa}


def resolve_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Choose for "auto", and refuse a backend that cannot serve this device and dtype.

    Raises:
        ValueError: naming the backend and what it cannot do.
    """
    flash_serves = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    if name == "auto":
        return "flash_attn" if flash_serves else "sdpa"
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is none of auto, {', '.join(BACKENDS)}")
    if name == "flash_attn" and not flash_serves:
        raise ValueError(
            f"attention backend 'flash_attn' needs CUDA and bf16 or fp16, not {device.type} {dtype}"
        )
    return name
