"""Properties of packing: nothing lost, nothing above a limit, the smallest fitting budget, and for
the cost policy no plan above greedy's or far above the best there is.
"""

import random
import runpy
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitgraph.graphs.config import Limits
from vitgraph.graphs.cost import Cost, CostModel
from vitgraph.graphs.packing import (
    Item,
    Pack,
    greedy,
    minimise_cost,
    predicted_seconds,
    smallest_budget,
    split_eager,
)

limits = st.builds(
    lambda budgets, items, sequences: Limits(tuple(sorted(budgets)), items, sequences),
    st.sets(st.integers(1, 2000), min_size=1, max_size=6),
    st.integers(1, 10),
    st.integers(1, 40),
)
items = st.lists(st.builds(Item, st.integers(1, 2500), st.integers(1, 50)), max_size=60)


@given(items, limits)
def test_every_item_exactly_once(items, limits) -> None:
    packed = [index for pack in greedy(items, limits) for index in pack.indices]
    assert sorted(packed) == list(range(len(items)))


@given(items, limits)
def test_no_pack_above_a_limit(items, limits) -> None:
    for pack in greedy(items, limits):
        members = [items[index] for index in pack.indices]
        assert pack.tokens == sum(item.tokens for item in members)
        assert list(pack.indices) == sorted(pack.indices)
        if pack.budget is None:
            (item,) = members
            assert item.tokens > limits.budgets[-1] or item.sequences > limits.max_sequences
        else:
            assert pack.tokens <= pack.budget
            assert len(members) <= limits.max_items
            assert sum(item.sequences for item in members) <= limits.max_sequences


@given(items, limits)
def test_smallest_fitting_budget(items, limits) -> None:
    for pack in greedy(items, limits):
        if pack.budget is not None:
            assert pack.budget == min(b for b in limits.budgets if b >= pack.tokens)


@given(items, limits)
def test_a_pack_is_closed_only_when_the_next_item_does_not_fit(items, limits) -> None:
    packs = [pack for pack in greedy(items, limits) if pack.budget is not None]
    for pack, following in pairwise(packs):
        smallest = min(following.indices, key=lambda index: (items[index].tokens, index))
        members = [items[index] for index in pack.indices]
        assert (
            pack.tokens + items[smallest].tokens > limits.budgets[-1]
            or len(members) == limits.max_items
            or sum(m.sequences for m in members) + items[smallest].sequences > limits.max_sequences
        )


def test_one_item_may_fill_a_budget() -> None:
    """KNOWN_FAILURES 9: 100 tokens and room for 8 items is still 100 tokens."""
    assert greedy([Item(100)], Limits((100,), 8, 64)) == [Pack((0,), 100, 100)]


def test_too_many_frames_run_eagerly() -> None:
    """KNOWN_FAILURES 2: a video of 70 frames where a replay holds 64."""
    packs = greedy([Item(6720, 70), Item(64)], Limits((64, 8192), 8, 64))
    assert packs == [Pack((1,), 64, 64), Pack((0,), 6720, None)]


def test_smallest_budget_at_the_edges() -> None:
    budgets = (64, 128)
    assert smallest_budget(budgets, 1) == 64
    assert smallest_budget(budgets, 64) == 64
    assert smallest_budget(budgets, 65) == 128
    assert smallest_budget(budgets, 129) is None


def model_for(limits: Limits, seed: int, *, padded: bool, eager: Cost | None) -> CostModel:
    """Random costs: of graphs that compute their capacity, or of graphs that follow their rows."""
    chance = random.Random(seed)
    per_token = 14e-6 * chance.uniform(0.8, 1.2)
    replays = [
        Cost(
            chance.uniform(0.5e-3, 3e-3) + per_token * (budget if padded else 0.01 * budget),
            0.0 if padded else per_token * chance.uniform(0.9, 1.1),
            chance.uniform(0, 5e-10),
        )
        for budget in limits.budgets
    ]
    return CostModel(limits.budgets, tuple(replays), eager)


EAGER = [None, Cost(0.0, 14e-6, 3e-10, 5e-3), Cost(1e-3, 10e-6, 0.0, 25e-3), Cost(0.0)]
squared_items = st.lists(
    st.builds(
        lambda tokens, frames: Item(tokens, frames, 16 * tokens * tokens // frames),
        st.integers(1, 2500) | st.sampled_from([100, 256]),
        st.integers(1, 50),
    ),
    max_size=40,
)
models = st.tuples(st.integers(0, 10**6), st.booleans(), st.sampled_from(EAGER))


@given(squared_items, limits, models)
def test_cost_keeps_the_limits(items, limits, choice) -> None:
    seed, padded, eager = choice
    plan = minimise_cost(items, limits, model_for(limits, seed, padded=padded, eager=eager))
    assert sorted(i for pack in plan for i in pack.indices) == list(range(len(items)))
    for pack in plan:
        members = [items[index] for index in pack.indices]
        assert list(pack.indices) == sorted(pack.indices) and members
        assert pack.tokens == sum(item.tokens for item in members)
        if pack.budget is not None:
            assert pack.tokens <= pack.budget
            assert len(members) <= limits.max_items
            assert sum(item.sequences for item in members) <= limits.max_sequences
    assert all(pack.budget is not None for pack in plan[:-1])


@given(squared_items, limits, models)
def test_cost_is_never_above_greedy(items, limits, choice) -> None:
    seed, padded, eager = choice
    model = model_for(limits, seed, padded=padded, eager=eager)
    plan, other = minimise_cost(items, limits, model), greedy(items, limits)
    if eager is None:
        # What must run eagerly does so in both plans, for a time nobody knows.
        plan, other = ([pack for pack in p if pack.budget is not None] for p in (plan, other))
    seconds = predicted_seconds(plan, items, model)
    assert seconds <= predicted_seconds(other, items, model) * (1 + 1e-9)


def optimum(items: list[Item], limits: Limits, model: CostModel) -> float:
    """The best over all partitions, and over all that may run eagerly."""

    def members(mask: int) -> list[Item]:
        return [item for index, item in enumerate(items) if mask >> index & 1]

    @cache
    def replay(mask: int) -> float:
        pack = members(mask)
        tokens, squares = sum(i.tokens for i in pack), sum(i.squares for i in pack)
        sequences = sum(i.sequences for i in pack)
        if len(pack) > limits.max_items or sequences > limits.max_sequences:
            return float("inf")
        fitting = [budget for budget in limits.budgets if budget >= tokens]
        return min((model.seconds(b, tokens, squares) for b in fitting), default=float("inf"))

    @cache
    def replays(mask: int) -> float:
        if not mask:
            return 0.0
        lowest, best, part = mask & -mask, float("inf"), mask
        while part:
            if part & lowest and (seconds := replay(part)) < best:
                best = min(best, seconds + replays(mask ^ part))
            part = (part - 1) & mask
        return best

    everything = (1 << len(items)) - 1
    best = replays(everything)
    for mask in range(1, everything + 1) if model.eager else ():
        pack = members(mask)
        eager = model.seconds(None, sum(i.tokens for i in pack), sum(i.squares for i in pack))
        best = min(best, eager + replays(everything ^ mask))
    return best


def test_cost_is_close_to_the_optimum() -> None:
    """Over 150 seeded batches of up to six items: 1 % above the optimum on average."""
    chance = random.Random(0)
    excess = []
    for seed in range(150):
        budgets = sorted(64 * b for b in chance.sample(range(1, 33), chance.randint(1, 6)))
        limits = Limits(tuple(budgets), chance.randint(2, 6), 64)
        padded, eager = chance.random() < 0.6, chance.choice(EAGER[1:3])
        model = model_for(limits, seed, padded=padded, eager=eager)
        sizes = [chance.choice([100, 256, chance.randint(1, budgets[-1])]) for _ in range(6)]
        items = [Item(n, 1, 16 * n * n) for n in sizes[: chance.randint(1, 6)]]
        best = optimum(items, limits, model)
        seconds = predicted_seconds(minimise_cost(items, limits, model), items, model)
        assert best <= seconds * (1 + 1e-9)
        excess.append(seconds / best - 1)
    assert sum(excess) / len(excess) < 0.01
    assert max(excess) < 0.25


PADDED = CostModel(
    (512, 1024, 2048, 4096),
    tuple(Cost(2e-3 + 15e-6 * budget) for budget in (512, 1024, 2048, 4096)),
    Cost(0.0, 17e-6, 0.0, 25e-3),
)
BY_ROWS = CostModel((512, 1024, 2048, 4096), (Cost(2e-3, 15e-6),) * 4, PADDED.eager)
BY_ROWS_NO_EAGER = CostModel(PADDED.budgets, BY_ROWS.replays)
LIMITS = Limits((512, 1024, 2048, 4096), 8, 64)


def test_two_small_replays_beat_a_large_one() -> None:
    """KNOWN_FAILURES 11: 1,000 + 1,100 tokens in 1,024 + 2,048 instead of 4,096."""
    items = [Item(1000), Item(1100)]
    assert greedy(items, LIMITS) == [Pack((0, 1), 2100, 4096)]
    no_eager = CostModel(PADDED.budgets, PADDED.replays)
    plan = minimise_cost(items, LIMITS, no_eager)
    assert plan == [Pack((0,), 1000, 1024), Pack((1,), 1100, 2048)]


def test_one_replay_where_the_cost_follows_the_rows() -> None:
    plan = minimise_cost([Item(1000), Item(1100)], LIMITS, BY_ROWS)
    assert [pack.indices for pack in plan] == [(0, 1)]


def test_a_graph_that_loses_is_declined() -> None:
    """KNOWN_FAILURES 10: padding to 4,096 costs more than running 2,100 tokens eagerly."""
    assert minimise_cost([Item(2100)], LIMITS, PADDED) == [Pack((0,), 2100, None)]
    assert minimise_cost([Item(100)], LIMITS, PADDED) == [Pack((0,), 100, 512)]


def test_eager_must_win_by_more_than_the_fit_errs() -> None:
    for eager, budget in [(9.6e-3, 512), (9e-3, None)]:
        model = CostModel(PADDED.budgets, PADDED.replays, Cost(0.0, floor=eager))
        assert minimise_cost([Item(100)], LIMITS, model) == [Pack((0,), 100, budget)]


def test_small_items_join_what_must_run_eagerly() -> None:
    """The launches are paid already; 100 more tokens cost less than a replay of 512."""
    plan = minimise_cost([Item(100), Item(5000)], LIMITS, PADDED)
    assert plan == [Pack((0, 1), 5100, None)]
    plan = minimise_cost([Item(512), Item(5000)], LIMITS, BY_ROWS_NO_EAGER)
    assert plan == [Pack((0,), 512, 512), Pack((1,), 5000, None)]


def test_the_cheapest_budget_need_not_be_the_smallest() -> None:
    model = CostModel((64, 128), (Cost(5e-3), Cost(3e-3)))
    assert minimise_cost([Item(10)], Limits((64, 128), 8, 64), model) == [Pack((0,), 10, 128)]


@pytest.mark.parametrize("model", [PADDED, BY_ROWS], ids=["padded", "by_rows"])
def test_edges(model) -> None:
    assert minimise_cost([], LIMITS, model) == []
    assert minimise_cost([Item(9000)], LIMITS, model) == [Pack((0,), 9000, None)]
    above = minimise_cost([Item(9000), Item(5000)], LIMITS, model)
    assert above == [Pack((0, 1), 14_000, None)]
    assert minimise_cost([Item(6720, 70)], LIMITS, model) == [Pack((0,), 6720, None)]
    equal = minimise_cost([Item(512)] * 8, LIMITS, model)
    assert [(pack.tokens, pack.budget) for pack in equal] == [(4096, 4096)]
    many = minimise_cost([Item(64)] * 17, LIMITS, model)
    assert all(len(pack.indices) <= 8 for pack in many if pack.budget)
    frames = minimise_cost([Item(64, 40)] * 3, LIMITS, model)
    assert all(sum(40 for _ in pack.indices) <= 64 for pack in frames if pack.budget)


def test_one_budget() -> None:
    limits, model = Limits((512,), 8, 64), CostModel((512,), (Cost(1e-3, 1e-5),))
    plan = minimise_cost([Item(300), Item(300), Item(200)], limits, model)
    assert sorted(pack.tokens for pack in plan) == [300, 500]


def test_a_model_for_other_budgets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"budgets \[512, 1024, 2048, 4096\], the limits \[64\]"):
        minimise_cost([Item(1)], Limits((64,), 8, 64), PADDED)


def test_the_simulation_holds_its_bounds() -> None:
    """bench/simulate_packing.py asserts for every request that no plan is below its bound, and none
    of cost above greedy's."""
    script = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "simulate_packing.py"))
    samples = script["samples_of"](script["json"].loads(script["MEASUREMENTS"].read_text()))
    row = script["simulate"]("1-8 photographs", samples, 40)
    assert row["policies"]["cost"]["above_bound"] < 0.05


@given(items, limits)
def test_eager_runs_are_cut_to_size(items, limits) -> None:
    everything = Pack(tuple(range(len(items))), sum(item.tokens for item in items), None)
    runs = split_eager([everything], items, limits.budgets[-1])
    assert [index for run in runs for index in run.indices] == list(range(len(items)))
    for run in runs:
        assert run.tokens == sum(items[index].tokens for index in run.indices)
        assert run.tokens <= limits.budgets[-1] or len(run.indices) == 1
