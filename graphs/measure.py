"""Measure a captured encoder to fit its cost model."""

from collections.abc import Callable
from math import isqrt

from vitgraph.encoder.inputs import Grid
from vitgraph.graphs.config import Limits
from vitgraph.graphs.cost import CostModel, Sample

# (grids of a batch, budget or None for an eager run) -> seconds to the synchronised result
Run = Callable[[list[Grid], int | None], float]

# Attention within this many tokens tells its slope; longer sequences only take longer to measure.
LONGEST = 2048
MOST_BUDGETS = 8
REPEATS = 3  # of a shape, the shortest counts; one more comes before them


def measure_costs(run: Run, limits: Limits, *, merge_size: int = 2) -> CostModel:
    """Fit a cost model to runs of a few shapes: some budgets full of long sequences, full of
    short ones, and nearly empty; and the same batches eagerly.

    Args:
        run: encodes random pixels of these grids and tells how long it took, copies included.
        limits: those of the captured graphs. Of more than eight budgets eight are measured.
        merge_size: patches a side of a token.
    """
    last = len(limits.budgets) - 1
    steps = min(last, MOST_BUDGETS - 1)
    chosen = [limits.budgets[round(step * last / max(steps, 1))] for step in range(steps + 1)]
    batches = {budget: shapes(budget, limits, merge_size) for budget in chosen}
    samples: list[Sample] = []

    def measure(grids: list[Grid], budget: int | None) -> None:
        seconds = min([run(grids, budget) for _ in range(REPEATS + 1)][1:])
        rows = sum(t * h * w for t, h, w in grids) // merge_size**2
        samples.append((budget, rows, sum(t * (h * w) ** 2 for t, h, w in grids), seconds))

    for budget, shaped in batches.items():
        for grids in shaped:
            measure(grids, budget)
    for budget in {chosen[0], chosen[len(chosen) // 2], chosen[-1]}:
        for grids in batches[budget][:2]:
            measure(grids, None)
    return CostModel.from_measurements(samples, limits.budgets)


def shapes(budget: int, limits: Limits, merge_size: int = 2) -> list[list[Grid]]:
    """Batches of one budget: few long sequences, many short ones, and one that is nearly empty.

    The last anchors the fixed part, which small items are packed by.
    """
    most = min(limits.max_items, limits.max_sequences, budget)
    few = min(-(-budget // LONGEST), most)
    many = max(min(most, budget // 16), few)
    return [
        [_image(budget // few, merge_size)] * few,
        [_image(budget // many, merge_size)] * many,
        [_image(max(budget // 16, 1), merge_size)],
    ]


def _image(tokens: int, merge_size: int) -> Grid:
    """A nearly square image of at most that many tokens."""
    height = isqrt(tokens)
    return (1, merge_size * height, merge_size * (tokens // height))
