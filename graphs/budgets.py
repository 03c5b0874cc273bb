"""Which budgets to capture, powers of two or a finer ladder, and what is kept of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitgraph.graphs.config import check_name, powers_of_two


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
