"""Which budgets to capture: powers of two, or a finer ladder."""

from collections.abc import Sequence

from vitgraph.graphs.config import check_name, powers_of_two


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
