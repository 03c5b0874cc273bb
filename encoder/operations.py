"""The two implementations of the forward's operations, and how one capacity is computed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from vitgraph.kernels.fp8.linear_fp8 import linear_fp8, linear_fp8_reference
from vitgraph.kernels.fp8.quantize import quantize, quantize_reference, why_no_e4m3
from vitgraph.kernels.launch import is_interpreted
from vitgraph.kernels.layer_norm import (
    layer_norm,
    layer_norm_e4m3,
    layer_norm_e4m3_reference,
    layer_norm_reference,
)
from vitgraph.kernels.layout import layout, layout_reference
from vitgraph.kernels.linear import Provider, linear, linear_reference
from vitgraph.kernels.mlp import mlp, mlp_reference
from vitgraph.kernels.position_embedding import position_embedding, position_embedding_reference
from vitgraph.kernels.rotary import (
    rotary,
    rotary_reference,
    rotary_table,
    rotary_table_reference,
)
from vitgraph.kernels.share import (
    collect_rows,
    collect_rows_reference,
    take_rows,
    take_rows_reference,
)

OpsName = Literal["auto", "triton", "torch"]
LAYERS = ("embed", "qkv", "proj", "fc1", "fc2", "merger_fc1", "merger_fc2")
FP8_LAYERS = ("qkv", "fc1", "fc2")  # of the blocks that compute in FP8; these have no provider


@dataclass(frozen=True)
class Plan:
    """How the forward of one capacity is computed.

    Attributes:
        attention: name of the attention backend.
        providers: of each linear layer in `LAYERS`; a layer that is missing takes the default.
        microseconds: what calibration measured, by layer and candidate.
        left_out: attention backends that calibration did not measure, and why.
        batch_invariant: one tiling of the attention for every capacity, as "fixed" providers are
            one of a layer.
        branches: the mergers of the levels run beside the blocks, in a graph.
    """

    attention: str
    providers: dict[str, Provider] = field(default_factory=dict)
    microseconds: dict[str, dict[str, float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    batch_invariant: bool = False
    branches: bool = False


def fixed_plan() -> Plan:
    """One way for all capacities, eager forwards included: a row's sums are always cut alike."""
    return Plan("triton", dict.fromkeys(LAYERS, "fixed"), batch_invariant=True)


@dataclass(frozen=True)
class Operations:
    """The functions of `vitgraph.kernels` that a forward calls."""

    name: str
    layout: Callable
    position_embedding: Callable
    rotary_table: Callable
    rotary: Callable
    layer_norm: Callable
    linear: Callable
    mlp: Callable
    layer_norm_e4m3: Callable
    quantize: Callable
    linear_fp8: Callable
    take_rows: Callable
    collect_rows: Callable


TORCH = Operations(
    "torch",
    layout_reference,
    position_embedding_reference,
    rotary_table_reference,
    rotary_reference,
    layer_norm_reference,
    linear_reference,
    mlp_reference,
    layer_norm_e4m3_reference,
    quantize_reference,
    linear_fp8_reference,
    take_rows_reference,
    collect_rows_reference,
)
TRITON = Operations(
    "triton",
    layout,
    position_embedding,
    rotary_table,
    rotary,
    layer_norm,
    linear,
    mlp,
    layer_norm_e4m3,
    quantize,
    linear_fp8,
    take_rows,
    collect_rows,
)


def resolve_operations(
    name: str, device: torch.device, dtype: torch.dtype, fp8: bool = False
) -> Operations:
    """Choose for "auto": Triton on a GPU, plain torch elsewhere and for float64.

    Raises:
        ValueError: an unknown name, or Triton kernels for float64 or on a CPU without their
            interpreter, or for `fp8` layers on a GPU without e4m3.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" and dtype != torch.float64 else "torch"
    if name == "torch":
        return TORCH
    if name != "triton":
        raise ValueError(f"ops {name!r} is none of auto, triton, torch")
    if dtype == torch.float64:
        raise ValueError("ops 'triton' has no kernels for torch.float64; ops 'torch' has")
    if device.type != "cuda" and not is_interpreted():
        raise ValueError(
            f"ops 'triton' needs a GPU, not {device.type}; set TRITON_INTERPRET=1 to interpret"
        )
    if fp8 and (reason := why_no_e4m3(device)):
        raise ValueError(f"linear_dtype 'fp8': {reason}; ops 'torch' shows what it would give")
    return TRITON
