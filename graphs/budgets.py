"""Which budgets to capture: powers of two, a finer ladder, or those that fit the traffic."""

import json
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path

import numpy as np

from vitgraph.graphs.config import check_name, powers_of_two

# Tokens of what one replay would hold -> how often; any non-negative weights.
Histogram = Mapping[int, float]


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


def traffic(histogram: Histogram, count: int, largest: int, smallest: int = 1) -> tuple[int, ...]:
    """At most `count` budgets that minimise the expected capacity of a replay.

    Exact: a budget below `largest` is best at a size that occurs, so dynamic programming over the
    distinct sizes finds the optimum. Sizes above `largest` run eagerly and do not count.

    Args:
        histogram: tokens of a replay -> weight. Record what shares a replay, not single items,
            where requests hold many.
        count: how many budgets; the memory is shared, each costs its capture time.
        largest: always included.
        smallest: no budget is below it (the items of a replay must not be more than it).

    Raises:
        ValueError: a count below 1, an empty range, a negative size or weight.
    """
    if count < 1:
        raise ValueError(f"count {count} of traffic budgets must be at least 1")
    if not 0 < smallest <= largest:
        raise ValueError(f"budget range: smallest {smallest} must be in 1..largest {largest}")
    weights: Counter[int] = Counter()
    for tokens, weight in histogram.items():
        _check_entry(tokens, weight)
        if weight > 0 and tokens <= largest:
            weights[max(tokens, smallest)] += weight
    weights[largest] += 0.0
    sizes = sorted(weights)
    if len(sizes) <= count:
        return tuple(sizes)
    # least[j]: expected capacity of the j smallest sizes, the last of them being a budget.
    capacity = np.array(sizes, dtype=np.float64)
    cumulative = np.concatenate([[0.0], np.cumsum([weights[size] for size in sizes])])
    least = np.concatenate([[0.0], capacity * cumulative[1:]])
    choices = []
    for _ in range(count - 1):
        previous, least = least, least.copy()
        choice = np.zeros(len(least), dtype=np.int64)
        for end in range(1, len(least)):
            totals = previous[:end] + capacity[end - 1] * (cumulative[end] - cumulative[:end])
            choice[end] = totals.argmin()
            least[end] = totals[choice[end]]
        choices.append(choice)
    budgets, end = [], len(sizes)
    for choice in [*reversed(choices), None]:
        budgets.append(sizes[end - 1])
        end = 0 if choice is None else int(choice[end])
        if end == 0:
            break
    return tuple(reversed(budgets))


def resolve_budgets(
    budgets: str | Sequence[int],
    budget_range: tuple[int, int],
    *,
    max_items: int = 0,
    count: int = 12,
) -> tuple[int, ...]:
    """The budgets that a configuration names.

    Args:
        budgets: capacities, or one of
            "powers_of_two"  (also what no capacities stand for)
            "ladder"         four steps an octave; "ladder:8" eight
            "traffic:FILE"   for the histogram in a JSON file (`save_histogram`)
        budget_range: smallest and largest worth capturing.
        max_items: of a replay; no budget of a named choice is below it.
        count: how many budgets traffic gets.

    Raises:
        ValueError: an unknown name, or a histogram that cannot be read.
    """
    if not isinstance(budgets, str):
        if budgets:
            return tuple(sorted(set(budgets)))
        budgets = "powers_of_two"
    largest = budget_range[1]
    smallest = max(budget_range[0], min(max_items, largest))
    name, argument = check_name(budgets)
    if name == "powers_of_two":
        return powers_of_two(smallest, largest)
    if name == "ladder":
        return ladder(smallest, largest, int(argument or 4))
    return traffic(load_histogram(argument), count, largest, smallest)


class TrafficRecorder:
    """Counts the tokens of replays, for `traffic`; any number of threads may record."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._lock = threading.Lock()

    def record(self, sizes: Iterable[int]) -> None:
        """Count one batch: the tokens of each of its packs."""
        with self._lock:
            self._counts.update(sizes)

    def histogram(self) -> dict[int, int]:
        """What was counted so far."""
        with self._lock:
            return dict(self._counts)

    def clear(self) -> None:
        """Start afresh."""
        with self._lock:
            self._counts.clear()

    def save(self, path: str | Path) -> None:
        """Write the histogram as `save_histogram` does."""
        save_histogram(path, self.histogram())


def save_histogram(path: str | Path, histogram: Histogram) -> None:
    """Write {"tokens": weight} as JSON, ascending."""
    entries = {str(tokens): histogram[tokens] for tokens in sorted(histogram)}
    Path(path).write_text(json.dumps(entries, indent=0) + "\n")


def load_histogram(path: str | Path) -> dict[int, float]:
    """Read what `save_histogram` wrote.

    Raises:
        ValueError: no such file, no JSON object, or an entry that is no size and weight.
    """
    try:
        entries = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"histogram {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"histogram {path} is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"histogram {path} must be a JSON object of tokens and weights")
    histogram: dict[int, float] = {}
    for key, weight in entries.items():
        try:
            _check_entry(tokens := int(key), weight)
        except (TypeError, ValueError):
            raise ValueError(f"histogram {path}: {key!r}: {weight!r} is no size: weight") from None
        histogram[tokens] = weight
    return histogram


def _check_entry(tokens: int, weight: float) -> None:
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if tokens < 1 or not number or not isfinite(weight) or weight < 0:
        raise ValueError(f"histogram: {tokens!r}: {weight!r} is no positive size: weight")
