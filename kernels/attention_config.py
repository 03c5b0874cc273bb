"""Table of tiles of the packed varlen attention, and the choice for a capacity.

Found by bench/tune_attention.py and checked in; nothing is searched at run time.

Loads through tensor descriptors (ragged ones, which clip at a sequence's end) gained 0-3 % on an
H200 and lost 5 % on a mixed pack. To go beyond, keys would be split over the programs that the last
round leaves idle, as in sm90/attention.py; warp specialisation of this kernel's loop fails in the
compiler for sm_90 in triton 3.6 to 3.9.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vitgraph.kernels.launch import capability_of, hopper_tier_unavailable, num_multiprocessors

if TYPE_CHECKING:
    from vitgraph.kernels.sm90.attention import AttentionSm90Config


@dataclass(frozen=True)
class AttentionConfig:
    """How one launch of the portable kernel is tiled.

    Attributes:
        block_m, block_n: query rows of a tile, keys of a step.
        programs_per_sm: how many programs fit an SM beside each other; the launch fills the GPU.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    can_split: ClassVar[bool] = False

    def rounds(
        self, num_patches: int, num_sequences: int, num_heads: int, device: torch.device
    ) -> int:
        """How often the programs of a launch change their item, where sequences are as long as one
        another."""
        num_sequences = max(num_sequences, 1)
        tiles = num_sequences * -(-num_patches // (num_sequences * self.block_m))
        return -(-tiles * num_heads // (self.programs_per_sm * num_multiprocessors(device)))


@dataclass(frozen=True)
class Row:
    """A tiling, and how long a round of its programs takes in proportion to the other rows."""

    config: AttentionConfig
    round_time: int = 1


INTERPRETED = AttentionConfig(32, 32)
FLOAT32 = AttentionConfig(32, 32, num_stages=2)

# On an H200 (bf16, 16 heads of 72, triton 3.6), us of 64x64 with 2 and 3 programs an SM and of
# 128x64: 1x400 9.4, 9.4, 12.4; 20x400 93, 79, 83; 8x1024 165, 148, 129; 1x2048 79, 101, 61;
# 1x3072 169, 151, 170; 1x8160 1135, 1012, 856; 1x23040 8813, 8058, 6931; a mixed pack 1445, 1259,
# 1077 (timed before the kernel's offsets were short). A round of the second takes 5/6 of a round of
# the third, and rounds are whole.
SM90 = (
    Row(AttentionConfig(64, 64, programs_per_sm=3), round_time=5),
    Row(AttentionConfig(128, 64), round_time=6),
)
# Of the others none is measured: they do not spill under triton 3.6 to 3.9, and fit an SM once or,
# where it has more than 100 KB of shared memory, twice. Times are in the proportions seen above.
LARGE = (Row(AttentionConfig(64, 64), round_time=4), Row(AttentionConfig(128, 64), round_time=6))
SMALL = (
    Row(AttentionConfig(64, 64, programs_per_sm=1), round_time=5),
    Row(AttentionConfig(128, 64, num_warps=8, programs_per_sm=1), round_time=6),
)
ROWS = {(8, 0): LARGE, (9, 0): SM90, (10, 0): LARGE, (10, 3): LARGE}


def attention_config(
    num_patches: int,
    num_sequences: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> "AttentionConfig | AttentionSm90Config":
    """Choose the tiling for a capacity of `num_patches` rows and `num_sequences` sequences."""
    if dtype != torch.float32 and not hopper_tier_unavailable(device):
        from vitgraph.kernels.sm90.attention import attention_sm90_config

        config = attention_sm90_config(num_patches, num_sequences, head_dim, device)
        if config is not None:
            return config
    return portable_config(num_patches, num_sequences, num_heads, dtype, device)


def fixed_config(dtype: torch.dtype, device: torch.device) -> AttentionConfig:
    """The portable kernel's tiling for large launches, whatever the launch."""
    capability = capability_of(device)
    if capability == (0, 0):
        return INTERPRETED
    return FLOAT32 if dtype == torch.float32 else ROWS.get(capability, SMALL)[-1].config


def portable_config(
    num_patches: int,
    num_sequences: int,
    num_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionConfig:
    """The portable kernel's tiling."""
    capability = capability_of(device)
    if capability == (0, 0):
        return INTERPRETED
    if dtype == torch.float32:
        return FLOAT32
    rows = ROWS.get(capability, SMALL)
    about = num_patches, num_sequences, num_heads, device
    return min(rows, key=lambda row: row.round_time * row.config.rounds(*about)).config
