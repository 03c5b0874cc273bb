"""Tile table of `linear_fp8`, in the form of kernels/linear_config.py. On Hopper the fastest of
`CANDIDATES` on an H200 (triton 3.6, 1,024 and 8,160 rows); elsewhere not tuned: what compiles
without spills and fits its memory.

Here `parts` of a tile are halves of its columns with a sum of their own: the products of one step
and one half are promoted to float32 together, so their registers are needed twice. Steps are
`SCALE_TILE` deep, parts as wide where the layer writes e4m3.

From `HOPPER_ROWS` on the Gluon kernel of sm90/ serves on Hopper, with tiles of `HOPPER`.
"""

from dataclasses import dataclass
from functools import lru_cache

from vitgraph.kernels.launch import Capability
from vitgraph.kernels.linear_config import LinearConfig, Tile

SCALE_TILE = 128  # columns of an activation that share one scale of a row

# 8 warps: sums and products take 128 of a thread's registers, one program fills an SM.
_SQUARE = Tile(128, 128, SCALE_TILE, stages=5)
# As much per byte from L2 as tiles of 256 columns do, which is what FP8 wants most.
WIDE = Tile(128, 256, SCALE_TILE, stages=4, parts=2)
# 4 warps, two programs on an SM: the promotion of one runs under the products of the other.
NARROW = Tile(64, 128, SCALE_TILE, stages=4)

SM90_DEEP = LinearConfig(_SQUARE, num_warps=8, descriptors=True)
SM90 = LinearConfig(NARROW, num_warps=4, programs_per_sm=2, descriptors=True)
SM100 = LinearConfig(Tile(128, 128, SCALE_TILE, stages=4), num_warps=8, descriptors=True)
# At most 99 KB of shared memory.
PORTABLE = LinearConfig(Tile(64, 128, SCALE_TILE, stages=3), num_warps=8)

# What bench/tune_linear_fp8.py times; 128x256 spills a little and is not for the table as it is.
CANDIDATES = {
    "128x128": SM90_DEEP,
    "128x128, 6 stages": LinearConfig(_SQUARE._replace(stages=6), num_warps=8, descriptors=True),
    "128x256": LinearConfig(WIDE, num_warps=8, descriptors=True),
    "64x128, two programs": SM90,
}


@dataclass(frozen=True)
class HopperConfig:
    """Tiles of 128 columns of sm90/linear_fp8.py, which takes as many stages as fit.

    Attributes:
        consumers: warpgroups, two or three, with 64 rows of a tile each.
        stagger: steps that each consumer starts after the one before it.
    """

    consumers: int
    stagger: int = 0


# What bench/tune_linear_fp8.py times besides.
HOPPER_CANDIDATES = {
    "Gluon 192x128": HopperConfig(3),
    "Gluon 192x128, stagger 1": HopperConfig(3, stagger=1),
    "Gluon 192x128, stagger 2": HopperConfig(3, stagger=2),
    "Gluon 128x128": HopperConfig(2),
    "Gluon 128x128, stagger 2": HopperConfig(2, stagger=2),
}
# Chosen by reasoning; seen in a whole encoder, not yet timed beside the other candidates.
HOPPER = HOPPER_CANDIDATES["Gluon 192x128, stagger 1"]
# The least capacity for which it serves, by reasoning, too: at N = 1152 tiles of 192x128 fill 132
# SMs from 2,700 rows on, the portable ones of 64x128, two an SM, from 1,800.
HOPPER_ROWS = 2048


def hopper_fp8_config(capacity: int) -> HopperConfig | None:
    """Tiles for the Gluon kernel, None where the portable one is the faster."""
    return HOPPER if capacity >= HOPPER_ROWS else None


@lru_cache(maxsize=4096)  # looked up before every launch
def linear_fp8_config(
    capability: Capability, capacity: int, out_features: int, in_features: int
) -> LinearConfig:
    """Look up the tiles of a layer that may be given up to `capacity` rows."""
    if capability == (9, 0):
        return SM90_DEEP if in_features > 2048 and capacity > 1024 else SM90
    return SM100 if capability[0] == 10 else PORTABLE
