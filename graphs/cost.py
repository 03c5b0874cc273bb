"""Predicted time of a pack, fitted to measured ones.

A replay of budget b that holds `rows` real output rows takes
    fixed_b + per_row_b * rows + per_square_b * squares        seconds,
squares being the sum of the squared sequence lengths (in patches), which attention grows with. A
graph that computes its whole capacity has a large fixed part and no per_row; one that reads the
row count on the device the reverse. Eager time is max(floor, the same form): below the floor the
host is still launching when the GPU is done.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, product
from math import inf, isfinite
from operator import le

import numpy as np

# budget (None: eager), output rows, sum of squared sequence lengths, seconds
Sample = tuple[int | None, int, int, float]


@dataclass(frozen=True)
class Cost:
    """max(floor, fixed + per_row * rows + per_square * squares), in seconds."""

    fixed: float
    per_row: float = 0.0
    per_square: float = 0.0
    floor: float = 0.0

    def __call__(self, rows: int, squares: int) -> float:
        return max(self.floor, self.fixed + self.per_row * rows + self.per_square * squares)


@dataclass(frozen=True)
class CostModel:
    """Costs of every budget and of running eagerly.

    Attributes:
        budgets: capacities in tokens, ascending.
        replays: the cost of a replay of each.
        eager: the cost of one eager run of any items; None where it is unknown, which leaves to
            it only what no budget can hold.
    """

    budgets: tuple[int, ...]
    replays: tuple[Cost, ...]
    eager: Cost | None = None

    def __post_init__(self) -> None:
        if len(self.budgets) != len(self.replays) or not self.budgets:
            raise ValueError(f"{len(self.budgets)} budgets and {len(self.replays)} replay costs")
        if any(cost.floor for cost in self.replays):
            raise ValueError("a replay's cost has no floor; only eager runs wait for the host")
        if any(a >= b for a, b in pairwise(self.budgets)):
            raise ValueError(f"budgets {list(self.budgets)} must ascend")

    @classmethod
    def from_measurements(
        cls, samples: Iterable[Sample], budgets: Sequence[int] | None = None
    ) -> "CostModel":
        """Least squares of the relative errors, no coefficient below zero.

        Args:
            samples: (budget or None, rows, squares, seconds). Three of a budget that differ in
                rows and in squares fix its coefficients; with fewer it has the slopes that fit all
                replays best, and a fixed part of its own.
            budgets: of the model; one without samples gets a fixed part linear in its capacity.
                Default: the budgets among the samples.

        Raises:
            ValueError: no sample of a replay, or a time that is not positive.
        """
        samples = list(samples)
        for sample in samples:
            if not (isfinite(sample[3]) and sample[3] > 0):
                raise ValueError(f"sample {sample}: {sample[3]} seconds is no positive time")
        replays = [sample for sample in samples if sample[0] is not None]
        if not replays:
            raise ValueError("no sample of a replay among the measurements")
        budgets = sorted(set(budgets or (sample[0] for sample in replays)))
        pooled = _fit([(1, b, r, s) for b, r, s, _ in replays], [sample[3] for sample in replays])
        costs = [_replay_cost(b, [s for s in replays if s[0] == b], pooled) for b in budgets]
        eager = _eager_cost([sample for sample in samples if sample[0] is None])
        return cls(tuple(budgets), tuple(costs), eager)

    def restricted_to(self, budgets: Sequence[int]) -> "CostModel":
        """The model of some of its budgets.

        Raises:
            ValueError: a budget it does not have.
        """
        if missing := sorted(set(budgets) - set(self.budgets)):
            raise ValueError(f"the cost model lacks {missing}, it has {list(self.budgets)}")
        costs = dict(zip(self.budgets, self.replays, strict=True))
        return CostModel(tuple(budgets), tuple(costs[b] for b in budgets), self.eager)

    def seconds(self, budget: int | None, rows: int, squares: int = 0) -> float:
        """Predicted time of one pack."""
        cost = self.eager if budget is None else self.replays[self.budgets.index(budget)]
        return inf if cost is None else cost(rows, squares)

    @cached_property
    def table(self) -> tuple[tuple[int, float, float, float], ...]:
        """(budget, fixed, per_row, per_square) of the budgets that no larger one beats in all."""
        rows: list[tuple[int, float, float, float]] = []
        for budget, cost in zip(reversed(self.budgets), reversed(self.replays), strict=True):
            row = (cost.fixed, cost.per_row, cost.per_square)
            beaten = (all(map(le, other[1:], row)) and other[1:] != row for other in rows)
            if not any(beaten):
                rows.append((budget, *row))
        return tuple(reversed(rows))

    @cached_property
    def planes(self) -> tuple[tuple[float, float, float], ...]:
        """Planes (alpha, beta, gamma) below every cost: a replay or an eager run takes at least
        alpha + beta * rows + gamma * squares.

        So `packs` of them take at least packs * alpha + beta * rows + gamma * squares, rows and
        squares being those of all.
        """
        table, eager = self.table, self.eager
        full = [(0, 0.0), *((b, fixed + row * b) for b, fixed, row, _ in table)]
        betas = {min(row[2] for row in table)}
        betas |= {(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in combinations(full, 2)}
        gamma = min(row[3] for row in table)
        if eager is not None:
            betas = {min(beta, eager.per_row) for beta in betas}
            gamma = min(gamma, eager.per_square)
        planes = [
            (self._alpha(beta, gamma), beta, gamma)
            for beta, gamma in product(betas, {0.0, gamma})
            if beta >= 0
        ]
        planes = [plane for plane in planes if plane[0] >= 0]
        # Of all these, the ones that are highest somewhere: at two packs, as `bound` is mostly
        # asked, without attention and with one sequence.
        points = [(b, squares) for b in self.budgets for squares in (0, 16 * b * b)]
        return tuple(
            {
                max(planes, key=lambda p: 2 * p[0] + p[1] * rows + p[2] * squares)
                for rows, squares in points
            }
        )

    def _alpha(self, beta: float, gamma: float) -> float:
        """The largest alpha that keeps a plane below every cost."""
        # A replay's rows are few, so a line may be steeper; it is below if it is at both ends.
        alpha = min(fixed + min(0.0, (row - beta) * b) for b, fixed, row, _ in self.table)
        if self.eager is None:
            return alpha
        # The eager cost is lowest above the plane where it leaves its floor.
        pairs = ((beta, self.eager.per_row), (gamma, self.eager.per_square))
        share = max(slope / own if own else 0.0 for slope, own in pairs)
        hidden = max(self.eager.floor - self.eager.fixed, 0.0)
        return min(alpha, self.eager.fixed + hidden * (1 - share))

    def bound(self, packs: int, rows: int, squares: int = 0) -> float:
        """No `packs` or more packs serve that many rows and squares in less time."""
        return max(
            packs * alpha + beta * rows + gamma * squares for alpha, beta, gamma in self.planes
        )


def _replay_cost(budget: int, own: list[Sample], pooled: tuple[float, ...]) -> Cost:
    if len(own) >= 3:
        return Cost(*_fit([(1, r, s) for _, r, s, _ in own], [sample[3] for sample in own]))
    fixed, per_capacity, per_row, per_square = pooled
    fixed += per_capacity * budget
    if own:
        fixed = sum(t - per_row * r - per_square * s for _, r, s, t in own) / len(own)
    return Cost(max(fixed, 0.0), per_row, per_square)


def _eager_cost(samples: list[Sample]) -> Cost | None:
    """The shortest samples may be bound by the host: their mean is the floor, the others' fit the
    GPU's time."""
    if not samples:
        return None
    samples = sorted(samples, key=lambda sample: sample[3])
    seconds = [sample[3] for sample in samples]
    candidates = []
    for host_bound in range(1, len(samples) - 1):
        rest = samples[host_bound:]
        slopes = _fit([(r, s) for _, r, s, _ in rest], seconds[host_bound:])
        candidates.append(Cost(0.0, *slopes, floor=sum(seconds[:host_bound]) / host_bound))
    candidates.append(Cost(*_fit([(1, r, s) for _, r, s, _ in samples], seconds)))

    def error(cost: Cost) -> float:
        return round(sum((cost(r, s) / t - 1) ** 2 for _, r, s, t in samples), 9)

    return min(candidates, key=error)


def _fit(rows: list[tuple[float, ...]], seconds: list[float]) -> tuple[float, ...]:
    """Non-negative least squares of the relative errors: the best of the plain solutions over all
    subsets of the columns; of equally good ones the first and smallest subset."""
    matrix = np.array(rows, dtype=np.float64) / np.array(seconds)[:, None]
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    matrix /= scale
    least, best = inf, np.zeros(matrix.shape[1])
    for size in range(1, matrix.shape[1] + 1):
        for subset in map(list, combinations(range(matrix.shape[1]), size)):
            solution = np.linalg.lstsq(matrix[:, subset], np.ones(len(matrix)), rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(((matrix[:, subset] @ solution - 1) ** 2).sum())
            if error < least - 1e-12:
                least, best = error, np.zeros(matrix.shape[1])
                best[subset] = solution
    return tuple(float(value) for value in best / scale)
