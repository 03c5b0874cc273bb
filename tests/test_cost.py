"""The cost model: coefficients recovered from measurements, and a bound that holds."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitgraph.graphs.cost import Cost, CostModel

small = st.floats(0, 1e-2)
costs = st.builds(Cost, small, st.floats(0, 1e-4), st.floats(0, 1e-8))


@given(st.lists(costs, min_size=1, max_size=4), costs, st.floats(1e-3, 1e-1))
def test_coefficients_are_recovered(replays, eager, floor) -> None:
    """From exact times of every budget, full and half full, of long and of short sequences."""
    budgets = tuple(64 * 2**i for i in range(len(replays)))
    truth = CostModel(
        budgets,
        tuple(Cost(cost.fixed + 1e-4, cost.per_row, cost.per_square) for cost in replays),
        Cost(0.0, eager.per_row, eager.per_square, floor),
    )
    shapes = [(b, b, 16 * b * b) for b in budgets] + [(b, b, b * 400) for b in budgets]
    shapes += [(b, b // 2, b * 200) for b in budgets] + [
        (None, rows, rows * length)
        for rows, length in [(16, 64), (64, 256), (9000, 400), (20_000, 6000), (7000, 28_000)]
    ]
    samples = [(b, rows, squares, truth.seconds(b, rows, squares)) for b, rows, squares in shapes]
    model = CostModel.from_measurements(samples)
    assert model.budgets == budgets
    for budget, rows, squares, seconds in samples:
        assert model.seconds(budget, rows, squares) == pytest.approx(seconds, rel=1e-3)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([64, 128, 512, None]),
            st.integers(1, 512),
            st.integers(0, 10**6),
            st.floats(1e-4, 1.0),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_no_coefficient_is_negative(samples) -> None:
    if all(sample[0] is None for sample in samples):
        with pytest.raises(ValueError, match="no sample of a replay"):
            CostModel.from_measurements(samples)
        return
    model = CostModel.from_measurements(samples, (64, 128, 256, 512))
    eager = [] if model.eager is None else [model.eager]
    assert (model.eager is None) == all(sample[0] is not None for sample in samples)
    for cost in [*model.replays, *eager]:
        assert min(cost.fixed, cost.per_row, cost.per_square, cost.floor) >= 0


def test_budgets_without_measurements() -> None:
    """Padded graphs: two budgets that grow with their capacity tell what lies between."""
    samples = [(128, 100, 0, 2e-3), (1024, 900, 0, 9e-3), (1024, 500, 0, 9e-3), (128, 10, 0, 2e-3)]
    model = CostModel.from_measurements(samples, (128, 576, 1024))
    assert model.seconds(576, 300) == pytest.approx(5.5e-3, rel=1e-3)
    assert model.eager is None and model.seconds(None, 1) == float("inf")


def test_one_sample_of_a_budget_is_its_fixed_part() -> None:
    model = CostModel.from_measurements([(64, 60, 1000, 2e-3)])
    assert model.replays == (Cost(pytest.approx(2e-3), 0.0, 0.0),)


def test_launch_bound_eager_runs_are_a_floor() -> None:
    samples = [(64, 64, 0, 1e-3)]
    samples += [(None, n, 0, 25e-3 + noise) for n, noise in [(10, 0), (100, 1e-3), (500, -1e-3)]]
    samples += [(None, n, 0, n * 15e-6) for n in (3000, 6000, 9000)]
    eager = CostModel.from_measurements(samples).eager
    assert eager.floor == pytest.approx(25e-3, rel=1e-3)
    assert eager(12_000, 0) == pytest.approx(180e-3, rel=1e-3)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_must_be_positive(seconds) -> None:
    with pytest.raises(ValueError, match="no positive time"):
        CostModel.from_measurements([(64, 1, 1, seconds)])


@pytest.mark.parametrize("budgets", [(), (64,), (64, 64), (128, 64)])
def test_budgets_and_costs_go_together(budgets) -> None:
    with pytest.raises(ValueError, match="budgets"):
        CostModel(budgets, (Cost(1.0), Cost(2.0)))


def test_budgets_that_a_larger_one_beats_are_left_out() -> None:
    model = CostModel((64, 128, 256), (Cost(1e-3, 2e-6), Cost(1e-3, 1e-6), Cost(2e-3, 1e-7)))
    assert [row[0] for row in model.table] == [128, 256]


eager_costs = st.none() | st.builds(
    Cost, small, st.floats(0, 1e-4), st.floats(0, 1e-8), st.floats(0, 0.1)
)


@given(st.lists(costs, min_size=1, max_size=4), eager_costs, st.data())
def test_the_bound_is_below_every_split(replays, eager, data) -> None:
    budgets = tuple(64 * 2**i for i in range(len(replays)))
    model = CostModel(budgets, tuple(replays), eager)
    parts = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([*budgets, None] if eager else budgets),
                st.floats(0, 1),
                st.integers(0, 10**6),
            ),
            min_size=1,
            max_size=5,
        )
    )
    parts = [(b, int((b or 5000) * fill), squares) for b, fill, squares in parts]
    seconds = sum(model.seconds(*part) for part in parts)
    rows, squares = sum(part[1] for part in parts), sum(part[2] for part in parts)
    for packs, surplus in product(range(1, len(parts) + 1), (0, 1)):
        assert model.bound(packs, rows - min(surplus, rows), squares) <= seconds * (1 + 1e-9)


def test_only_eager_runs_have_a_floor() -> None:
    with pytest.raises(ValueError, match="has no floor"):
        CostModel((64,), (Cost(1e-3, floor=2e-3),))


def test_a_model_of_some_budgets() -> None:
    model = CostModel((64, 128), (Cost(1e-3), Cost(2e-3)), Cost(3e-3))
    part = model.restricted_to((128,))
    assert part.seconds(128, 1) == 2e-3 and part.eager == model.eager
    with pytest.raises(ValueError, match=r"lacks \[256\]"):
        model.restricted_to((128, 256))
