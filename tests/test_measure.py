"""Measuring asks for batches that fit and finds the costs behind the times."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitgraph.graphs.budgets import ladder
from vitgraph.graphs.config import Limits
from vitgraph.graphs.cost import Cost, CostModel
from vitgraph.graphs.measure import MOST_BUDGETS, measure_costs, shapes


@given(st.integers(1, 9000), st.integers(1, 64), st.integers(1, 64), st.sampled_from([1, 2, 4]))
def test_shapes_fit(budget, max_items, max_sequences, merge) -> None:
    for grids in shapes(budget, Limits((budget,), max_items, max_sequences), merge):
        tokens = sum(t * h * w for t, h, w in grids) // merge**2
        assert 1 <= tokens <= budget
        assert len(grids) <= max_items and sum(t for t, _, _ in grids) <= max_sequences
        assert all(h > 0 and h % merge == 0 and w > 0 and w % merge == 0 for _, h, w in grids)


def sizes(grids) -> tuple[int, int]:
    return sum(t * h * w for t, h, w in grids) // 4, sum(t * (h * w) ** 2 for t, h, w in grids)


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "by_rows"])
@pytest.mark.parametrize("budgets", [(64, 256, 1024, 4096), ladder(64, 4096)], ids=["4", "25"])
def test_costs_are_found(padded, budgets) -> None:
    """With 2 % of noise, and the first run of a shape ten times slower."""
    chance, seen, asked = random.Random(0), set(), set()
    capacity, row = (14e-6, 0.0) if padded else (1e-7, 14e-6)
    replays = tuple(Cost(2e-3 + capacity * budget, row, 4e-10) for budget in budgets)
    truth = CostModel(budgets, replays, Cost(0.0, 15e-6, 4e-10, 25e-3))

    def run(grids, budget) -> float:
        asked.add(budget)
        cold = (tuple(grids), budget) not in seen
        seen.add((tuple(grids), budget))
        noise = 1 + 0.02 * chance.random()
        return truth.seconds(budget, *sizes(grids)) * noise * (10 if cold else 1)

    model = measure_costs(run, Limits(budgets, 32, 64))
    assert model.budgets == budgets
    assert len(asked) <= MOST_BUDGETS + 1 and {None, budgets[0], budgets[-1]} <= asked
    for budget in budgets:
        for grids in shapes(budget, Limits(budgets, 32, 64)):
            rows, squares = sizes(grids)
            wanted = truth.seconds(budget, rows, squares)
            assert model.seconds(budget, rows, squares) == pytest.approx(wanted, rel=0.06)
    for rows, squares in [(64, 10**5), (4000, 10**7), (8000, 10**8)]:
        wanted = truth.seconds(None, rows, squares)
        assert model.seconds(None, rows, squares) == pytest.approx(wanted, rel=0.06)


def test_one_budget() -> None:
    model = measure_costs(lambda grids, budget: 1e-3 * len(grids), Limits((4,), 1, 1))
    assert model.budgets == (4,) and model.eager is not None
