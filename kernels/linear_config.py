"""Tile table of the linear kernels: which tile shapes to use on which GPU for which kind of layer.

Found by bench/tune_linear.py and checked in; nothing is searched at run time. A row carries two
tile shapes. The kernel reads the real row count on the device and takes `small` up to `small_rows`,
`large` above, so a graph captured for many rows still fits when it is replayed with few.
"""

import enum
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from vitgraph.kernels.launch import Capability


class Layer(enum.Enum):
    """Shape classes: by width (above 2048 columns) and depth (above 2048)."""

    PROJECTION = enum.auto()  # narrow, shallow, square
    EMBED = enum.auto()  # narrow, shallow: the patch embedding
    QKV = enum.auto()  # wide, shallow, three times its input
    EXPAND = enum.auto()  # wide, shallow: fc1
    REDUCE = enum.auto()  # narrow, deep: fc2
    MERGE = enum.auto()  # wide, deep: both layers of a merger

    @classmethod
    def of(cls, out_features: int, in_features: int) -> "Layer":
        wide, deep = out_features > 2048, in_features > 2048
        if wide and not deep:
            return cls.QKV if out_features == 3 * in_features else cls.EXPAND
        if wide:
            return cls.MERGE
        if deep:
            return cls.REDUCE
        return cls.PROJECTION if out_features == in_features else cls.EMBED


class Tile(NamedTuple):
    """One tile of the output: `rows` x `cols`, summed over steps of `depth`."""

    rows: int
    cols: int
    depth: int
    stages: int
    parts: int = 1  # 2^n: the epilogue works on cols / parts columns at a time, to save memory


@dataclass(frozen=True)
class LinearConfig:
    """Tiles `large`, and `small` (if not None) for up to `small_rows` real rows.

    Attributes:
        programs_per_sm: of the persistent launch. Two on an SM run the epilogue of one under the
            products of the other, but the hardware puts neighbours on one SM: with fewer tiles than
            programs, half the SMs would idle.
        descriptors: load through tensor descriptors.
        hopper_rows: the least capacity from which linear_sm90 is faster, None for never.
        cublas_rows: capacities, from the first to below the second, for which cuBLAS is faster
            although it computes all of them.
    """

    large: Tile
    small: Tile | None = None
    small_rows: int = 0
    num_warps: int = 4
    programs_per_sm: int = 1
    descriptors: bool = False
    hopper_rows: int | None = None
    cublas_rows: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Row:
    """`config` serves `layer` from `capacity` rows up, until the next row of that layer."""

    layer: Layer
    capacity: int
    config: LinearConfig


def _sm90(large: Tile, small: Tile | None = None, small_rows: int = 0, **rest: Any) -> LinearConfig:
    return LinearConfig(large, small, small_rows, descriptors=True, **rest)


# 96 KB of stages and an epilogue in halves leave room for a second program on the SM.
_PAIRED = Tile(128, 128, 64, stages=3, parts=2)
_ALONE = Tile(128, 128, 64, stages=5, parts=2)
# What spills in halves: pixels that are converted, under triton 3.8; GELU, under 3.8 and 3.9.
_EMBED = _ALONE._replace(parts=4)
_MERGE = _PAIRED._replace(parts=4)
_SMALL_MERGE = Tile(64, 128, 64, stages=4, parts=2)

_SMALL_LAYER = Tile(64, 64, 128, stages=4)

# Which kernel serves which capacity.
_PROJECTION = {"hopper_rows": 1793, "cublas_rows": (513, 1793)}
_EMBEDDING = {"hopper_rows": 1793, "cublas_rows": (513, 3073)}
_QKV = {"hopper_rows": 3585}
_EXPAND = {"cublas_rows": (513, 1537)}
_REDUCE = {"hopper_rows": 1793, "cublas_rows": (513, 3073)}
_MERGER = {"programs_per_sm": 2, "cublas_rows": (129, 769)}

# NVIDIA H200, bf16, triton 3.6 and 3.8. Up to 448 rows the small tiles, at N = 1152 up to 1792 the
# large ones, are one round on 132 SMs.
SM90 = (
    Row(Layer.PROJECTION, 0, _sm90(_SMALL_LAYER, **_PROJECTION)),
    Row(Layer.PROJECTION, 449, _sm90(_ALONE, _SMALL_LAYER, 448, **_PROJECTION)),
    Row(Layer.EMBED, 0, _sm90(_SMALL_LAYER, **_EMBEDDING)),
    Row(Layer.EMBED, 449, _sm90(_EMBED, _SMALL_LAYER, 448, **_EMBEDDING)),
    Row(Layer.QKV, 0, _sm90(Tile(64, 256, 64, stages=4), **_QKV)),
    Row(
        Layer.QKV,
        449,
        _sm90(_PAIRED, Tile(64, 128, 64, stages=4), 448, programs_per_sm=2, **_QKV),
    ),
    Row(Layer.EXPAND, 0, _sm90(Tile(64, 256, 64, stages=4), **_EXPAND)),
    Row(
        Layer.EXPAND,
        449,
        _sm90(_PAIRED, Tile(64, 128, 64, stages=4), 448, programs_per_sm=2, **_EXPAND),
    ),
    Row(Layer.REDUCE, 0, _sm90(Tile(64, 64, 64, stages=6), programs_per_sm=2, **_REDUCE)),
    Row(Layer.REDUCE, 449, _sm90(_ALONE, Tile(64, 64, 64, stages=8), 448, **_REDUCE)),
    Row(Layer.MERGE, 0, _sm90(Tile(64, 64, 64, stages=6), **_MERGER)),
    Row(Layer.MERGE, 129, _sm90(_SMALL_MERGE, **_MERGER)),
    Row(Layer.MERGE, 449, _sm90(_MERGE, _SMALL_MERGE, 448, **_MERGER)),
)

# 16-bit inputs on any other GPU: at most 99 KB of shared memory, no descriptors. Not tuned.
PORTABLE = LinearConfig(Tile(128, 128, 32, stages=4), Tile(64, 64, 64, stages=3), 512, num_warps=8)

# Data-centre Blackwell; compiled and checked for spills, not tuned.
SM100 = LinearConfig(
    Tile(128, 128, 64, stages=4, parts=2), Tile(64, 64, 64, stages=4), 512, descriptors=True
)

# float32 is summed in float32 (no TF32): a debugging path, small enough for every GPU.
FLOAT32 = LinearConfig(Tile(64, 64, 32, stages=2), programs_per_sm=2)


@lru_cache(maxsize=4096)  # looked up before every launch
def linear_config(
    capability: Capability, dtype: torch.dtype, capacity: int, out_features: int, in_features: int
) -> LinearConfig:
    """Look up the tiles of a layer that may be given up to `capacity` rows."""
    if dtype == torch.float32:
        return FLOAT32
    if capability == (9, 0):
        layer = Layer.of(out_features, in_features)
        return [row for row in SM90 if row.layer == layer and row.capacity <= capacity][-1].config
    return SM100 if capability[0] == 10 else PORTABLE


@lru_cache(maxsize=256)
def fixed_config(
    capability: Capability, dtype: torch.dtype, capacity: int, out_features: int, in_features: int
) -> LinearConfig:
    """The large tiles of a layer, whatever the capacity."""
    config = linear_config(capability, dtype, 1 << 20, out_features, in_features)
    return replace(config, small=None, small_rows=0)
