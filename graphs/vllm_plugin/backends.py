"""Our attention backend for each of vLLM's.

FLASH_ATTN   FlashAttention, vLLM's own build before any other
FLASHINFER   FlashInfer; our kernel where it does not serve, which like it reads the lengths on the
             device
TRITON_ATTN  our kernel
TORCH_SDPA   torch's, which reads lengths on the host and so runs eagerly
"""

import torch

from vitgraph.encoder.attention.backends import VLLM_NAMES, resolve_backend
from vitgraph.encoder.attention.trial import Heads

COUNTERPARTS: dict[str, tuple[str, ...]] = {
    theirs: (ours, "triton") if ours == "flashinfer" else (ours,)
    for theirs, ours in VLLM_NAMES.items()
}


def counterpart(
    backend: str, device: torch.device, dtype: torch.dtype, heads: int = 16, head_dim: int = 72
) -> str:
    """Our name for vLLM's attention backend.

    Raises:
        ValueError: a backend without counterpart, or none that serves these heads on this device.
    """
    if backend not in COUNTERPARTS:
        raise ValueError(f"attention backend {backend} has no counterpart in vitgraph")
    problem = None
    for name in COUNTERPARTS[backend]:
        try:
            return resolve_backend(name, Heads(heads, head_dim, dtype), device)
        except ValueError as error:
            problem = problem or error
    raise ValueError(str(problem))
