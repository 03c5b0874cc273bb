"""Which budgets to capture, powers of two or a finer ladder; what is kept of each, its memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.encoder.attention.flashinfer import WORKSPACE_BYTES
from vitgraph.encoder.branches import BRANCH_ROWS
from vitgraph.graphs.config import check_name, powers_of_two

# cuBLAS keeps so much for a stream; parts of split attention items take 20 MB.
CUBLAS_BYTES = 32 << 20
OUR_WORKSPACES = CUBLAS_BYTES + (20 << 20)


@dataclass
class BudgetGraphMetadata:
    """One captured budget.

    Attributes:
        token_budget: capacity in tokens.
        max_batch_size: capacity in items.
        graph: the CUDA graph; None on the CPU, where a replay runs the captured forward instead.
        input_buffer: static rows of the items' patches.
        metadata_buffers: other static tensors of the forward, by name.
        output_buffer: where a replay leaves its rows; None on the CPU.
        mm_kwargs: the keyword inputs that were captured.
        memory_bytes: what capturing this budget added to the device's memory.
    """

    token_budget: int
    max_batch_size: int
    graph: torch.cuda.CUDAGraph | None
    input_buffer: Tensor
    metadata_buffers: dict[str, Tensor]
    output_buffer: Tensor | None
    mm_kwargs: dict[str, Any]
    memory_bytes: int = 0


def ladder(smallest: int, largest: int, steps_per_octave: int = 4) -> tuple[int, ...]:
    """Geometric steps, `steps_per_octave` for each doubling; both ends included.

    Raises:
        ValueError: an empty range, or less than one step.
    """
    if not 0 < smallest <= largest:
        raise ValueError(f"budget range: smallest {smallest} must be in 1..largest {largest}")
    if steps_per_octave < 1:
        raise ValueError(f"steps_per_octave {steps_per_octave} must be at least 1")
    budgets, step = set(), 0
    while (budget := round(smallest * 2 ** (step / steps_per_octave))) < largest:
        budgets.add(budget)
        step += 1
    return (*sorted(budgets), largest)


def resolve_budgets(
    budgets: str | Sequence[int], budget_range: tuple[int, int], *, max_items: int = 0
) -> tuple[int, ...]:
    """The budgets that a configuration names.

    Args:
        budgets: capacities, "powers_of_two" (also the default), "ladder" (four
            steps an octave) or, say, "ladder:8".
        budget_range: smallest and largest worth capturing.
        max_items: of a replay; no budget of a named choice is below it.

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(budgets, str):
        if budgets:
            return tuple(sorted(set(budgets)))
        budgets = ""
    largest = budget_range[1]
    smallest = max(budget_range[0], min(max_items, largest))
    name, argument = check_name(budgets or "powers_of_two")
    if name == "powers_of_two":
        return powers_of_two(smallest, largest)
    return ladder(smallest, largest, int(argument or 4))


def estimate_memory(
    encoder: Qwen3VLVisionEncoder, token_budget: int, *, gathered: bool = False
) -> int:
    """Bytes of a captured budget: static pixels and output, and the activations at their peak
    (four rows of the trunk and the wider of qkv and the MLP), and the workspaces.

    Args:
        gathered: other ranks compute rows of it, too: their q, k and v twice, and output rows.
    """
    config, itemsize = encoder.config, encoder.dtype.itemsize
    patches = token_budget * config.spatial_merge_size**2
    widest = max(3 * config.hidden_size, config.intermediate_size)
    pixels = patches * config.patch_width * encoder.pixel_dtype.itemsize
    output = token_budget * config.output_width * itemsize
    activations = patches * (4 * config.hidden_size + widest) * itemsize
    workspaces = OUR_WORKSPACES if encoder.device.type == "cuda" else 0
    if workspaces and 512 < patches <= BRANCH_ROWS:  # the mergers of a smaller one are not cuBLAS's
        workspaces += CUBLAS_BYTES
    workspaces += WORKSPACE_BYTES if encoder.plan.attention == "flashinfer" else 0
    if encoder.fp8_blocks:  # fc2's scales, a float for 128 columns, and one layer's weight
        activations += config.intermediate_size * (patches // 32 + config.hidden_size)
    if gathered:
        activations += patches * 8 * config.hidden_size * itemsize + output
    return pixels + output + activations + workspaces
