"""Which attention of ours stands for the one vLLM chose, by flag or by itself.

FLASH_ATTN   vLLM's own FlashAttention build; torch's where that cannot be imported
FLASHINFER   FlashInfer, once the encoder has it; until then our kernel, which like it reads the
             lengths on the device
TRITON_ATTN  our kernel
TORCH_SDPA   torch's, which reads lengths on the host and so runs eagerly

The first name that exists in `BACKENDS` and serves the device and dtype is taken.
"""

import torch
from torch import Tensor

from vitgraph.encoder.attention import BACKENDS, Attend, Heads, resolve_backend
from vitgraph.kernels.layout import Layout

COUNTERPARTS: dict[str, tuple[str, ...]] = {
    "FLASH_ATTN": ("vllm_flash_attn", "flash_attn"),
    "FLASHINFER": ("flashinfer", "triton"),
    "TRITON_ATTN": ("triton",),
    "TORCH_SDPA": ("sdpa",),
}


def vllm_flash_attn(layout: Layout, heads: Heads) -> Attend:
    """FlashAttention as vLLM ships it (2, 3 or 4, by GPU); every sequence slot costs a little."""
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
    )

    offsets, longest = layout.cu_seqlens, layout.max_seqlen
    version = get_flash_attn_version(head_size=heads.dim)

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unbind(1)
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=heads.dim**-0.5,
            causal=False,
            fa_version=version,
        )
        return out.flatten(1)

    return attend


def counterpart(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Our name for vLLM's attention backend.

    Raises:
        ValueError: a backend without counterpart, or none that serves this device and dtype.
    """
    if backend not in COUNTERPARTS:
        raise ValueError(f"attention backend {backend} has no counterpart in vitgraph")
    if _has_flash_attn():
        BACKENDS.setdefault("vllm_flash_attn", vllm_flash_attn)
    problem = None
    for name in COUNTERPARTS[backend]:
        if name in BACKENDS:
            # vLLM's build has the limits of FlashAttention everywhere.
            checked = "flash_attn" if name == "vllm_flash_attn" else name
            try:
                resolve_backend(checked, device, dtype)
                return name
            except ValueError as error:
                problem = error
    raise ValueError(str(problem))


def _has_flash_attn() -> bool:
    try:
        from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available

        return is_flash_attn_varlen_func_available()
    except Exception:
        return False
