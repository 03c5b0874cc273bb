"""Properties of packing: nothing lost, nothing above a limit, the smallest fitting budget."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vitgraph.graphs.config import Limits
from vitgraph.graphs.packing import Item, Pack, greedy, smallest_budget, split_by_items

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
def test_what_the_limit_of_items_costs(items, limits) -> None:
    packs = greedy(items, limits)
    took = sum(pack.budget is not None for pack in packs)
    roomy = {
        most: sum(p.budget is not None for p in greedy(items, replace(limits, max_items=most)))
        for most in range(limits.max_items, min(limits.budgets[0], len(items)) + 1)
    }
    split = split_by_items(items, limits, packs)
    if split is None:
        assert min(roomy.values(), default=took) == took
    else:
        assert split[:2] == (took, min(roomy.values()))
        assert roomy[split[2]] == split[1] < took


def test_the_published_batch_is_split_by_its_limit() -> None:
    """20 images of 336x336, eight a replay: three replays where one would do."""
    limits, images = Limits((64, 4096), 8, 4096), [Item(100)] * 20
    assert split_by_items(images, limits, greedy(images, limits)) == (3, 1, 20)
    large = [Item(2000)] * 8  # by tokens, not by items
    assert split_by_items(large, limits, greedy(large, limits)) is None


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
