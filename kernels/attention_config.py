"""Table of tilings of the packed varlen attention: which one on which GPU for which capacity.

Found by bench/tune_attention.py and checked in; nothing is searched at run time.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vitgraph.kernels.launch import Capability, capability_of, hopper_tier_unavailable

if TYPE_CHECKING:
    from vitgraph.kernels.attention_sm90 import AttentionSm90Config


@dataclass(frozen=True)
class AttentionConfig:
    """How one launch of the portable kernel is tiled.

    Attributes:
        block_m, block_n: query rows of a tile, keys of a step.
        programs_per_sm: how many programs fit an SM beside each other; the launch fills the GPU.
        descriptors: load keys and values through tensor descriptors (TMA).
        max_registers: of a thread, where the compiler is to be held to fewer so that one more
            program fits.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    descriptors: bool = False
    max_registers: int | None = None
    q_registers: bool = False
    mask: str = "branch"
    sums: int = 1
    can_split: ClassVar[bool] = False


INTERPRETED = AttentionConfig(32, 32)
FLOAT32 = AttentionConfig(32, 32, num_warps=8, num_stages=2)
PORTABLE = AttentionConfig(64, 64)
SM90 = AttentionConfig(128, 64, descriptors=True)


def attention_config(
    num_patches: int,
    num_sequences: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> "AttentionConfig | AttentionSm90Config":
    """Choose the tiling for a capacity of `num_patches` rows and `num_sequences` sequences."""
    capability = capability_of(device)
    if not hopper_tier_unavailable(device) and dtype != torch.float32:
        from vitgraph.kernels.attention_sm90 import attention_sm90_config

        config = attention_sm90_config(num_patches, num_sequences, head_dim, device)
        if config is not None:
            return config
    return portable_config(capability, num_patches, dtype)


def portable_config(
    capability: Capability, num_patches: int, dtype: torch.dtype
) -> AttentionConfig:
    """The portable kernel's tiling."""
    if capability == (0, 0):
        return INTERPRETED
    if dtype == torch.float32:
        return FLOAT32
    if capability == (9, 0) and num_patches > 640:
        return SM90
    return PORTABLE
