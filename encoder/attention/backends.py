"""Attention backends behind one function, on the packed qkv of all items.

triton       ours; every dtype but float64, no lengths on the host, empty capacity is free
flash_attn   FlashAttention, from the first of vLLM's own build, SGLang's, fa3-fwd, flash-attn-4,
             flash-attn and torch that serves; CUDA, bf16 and fp16
flashinfer   cuDNN through FlashInfer; CUDA, bf16 and fp16
sdpa         torch's scaled_dot_product_attention, frame by frame; lengths on the host, so it
             cannot be captured

vLLM's names for them are accepted too. "auto" is `triton` on a GPU and `sdpa` elsewhere; a capture
measures all that serve (calibration.py).
"""

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from vitgraph.encoder.attention import flash, flashinfer
from vitgraph.encoder.attention.trial import Attend, Build, Capability, Heads
from vitgraph.kernels.attention import DTYPES, attention
from vitgraph.kernels.attention_config import attention_config, fixed_config
from vitgraph.kernels.attention_schedule import attention_schedule
from vitgraph.kernels.launch import is_interpreted
from vitgraph.kernels.layout import Layout


def triton(layout: Layout, heads: Heads) -> Attend:
    """Build the tile table of the batch once; all layers share it."""
    offsets, num_patches = layout.cu_seqlens, layout.coords.shape[0]
    # Slots are free, so a graph has many; how many a batch will use is known in eager runs only.
    expected = len(layout.seqlens) if layout.seqlens is not None else 1
    config = attention_config(
        num_patches, expected, heads.count, heads.dim, heads.dtype, offsets.device
    )
    schedule = attention_schedule(offsets, num_patches, heads.count, config, layout.num_sequences)
    return lambda qkv: attention(qkv, offsets, schedule=schedule)


def fixed(layout: Layout, heads: Heads) -> Attend:
    """`triton` in one tiling whatever the capacity, keys never split: a sequence's bits are the
    same in every pack, for its tiles start at its own first row."""
    offsets, num_patches = layout.cu_seqlens, layout.coords.shape[0]
    config = fixed_config(heads.dtype, offsets.device)
    schedule = attention_schedule(offsets, num_patches, heads.count, config, layout.num_sequences)
    return lambda qkv: attention(qkv, offsets, schedule=schedule)


def sdpa(layout: Layout, heads: Heads) -> Attend:
    """Attend with torch, one call a run of sequences of equal length."""
    seqlens = layout.seqlens
    if seqlens is None:
        raise ValueError(
            "attention backend 'sdpa' reads sequence lengths on the host and cannot be captured"
        )

    def attend(qkv: Tensor) -> Tensor:
        out = qkv.new_empty(qkv.shape[0], *qkv.shape[2:])  # [P, H, D]
        start = 0
        for length, run in groupby(seqlens):
            count = sum(1 for _ in run)
            rows = slice(start, start + count * length)
            q, k, v = qkv[rows].unflatten(0, (count, length)).permute(2, 0, 3, 1, 4)  # [n, H, L, D]
            attended = F.scaled_dot_product_attention(q, k, v)
            out[rows] = attended.transpose(1, 2).flatten(0, 1)
            start = rows.stop
        return out.flatten(1)

    return attend


BACKENDS: dict[str, Build] = {
    "triton": triton,
    "flash_attn": flash.flash_attn,
    "flashinfer": flashinfer.flashinfer,
    "sdpa": sdpa,
}
VLLM_NAMES = {
    "TRITON_ATTN": "triton",
    "FLASH_ATTN": "flash_attn",
    "FLASHINFER": "flashinfer",
    "TORCH_SDPA": "sdpa",
}
# Backends whose cost does not depend on sequence slots that a batch leaves empty.
FREE_OF_EMPTY_SEQUENCES = frozenset({"triton", "sdpa"})


def capability(name: str, heads: Heads, device: torch.device) -> Capability:
    """Whether a backend serves these heads on this device, and why not. A library is imported and
    tried out, once."""
    if name == "flash_attn":
        return flash.capability(heads, device)
    if name == "flashinfer":
        return flashinfer.serving(heads, device)[0]
    if name == "sdpa":
        return Capability("sdpa", "torch", True, "reads lengths on the host", capturable=False)
    reason = ""
    if device.type != "cuda" and not is_interpreted():
        reason = f"needs CUDA, not {device.type}"
    elif heads.dtype not in DTYPES:
        reason = f"needs one of {', '.join(map(str, DTYPES))}, not {heads.dtype}"
    elif heads.dim < 16 or heads.dim % 8:
        reason = f"needs a head_dim that is a multiple of 8 from 16 on, not {heads.dim}"
    return Capability("triton", "vitgraph", not reason, reason)


def capabilities(heads: Heads, device: torch.device) -> list[Capability]:
    """Every package of every backend, for a table."""
    packages = [flash.probe(one, heads, device) for one in flash.PACKAGES]
    names = ("triton", "flashinfer", "sdpa")
    ours, cudnn, torchs = (capability(name, heads, device) for name in names)
    return [ours, *packages, cudnn, torchs]


def resolve_backend(name: str, heads: Heads, device: torch.device) -> str:
    """Choose for "auto", translate vLLM's names, and refuse a backend that cannot serve.

    Raises:
        ValueError: naming the backend and what it cannot do.
    """
    if name == "auto":
        return "triton" if device.type == "cuda" and heads.dtype in DTYPES else "sdpa"
    name = VLLM_NAMES.get(name, name)
    if name not in BACKENDS:
        known = ", ".join((*BACKENDS, *VLLM_NAMES))
        raise ValueError(f"attention backend {name!r} is none of auto, {known}")
    answer = capability(name, heads, device)
    if not answer.ok:
        raise ValueError(f"attention backend {name!r}: {answer.reason}")
    return name
