"""Budgets: the ladder's steps, and what a configuration names."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitgraph.graphs.budgets import ladder, resolve_budgets
from vitgraph.graphs.config import powers_of_two


@given(st.integers(1, 500), st.integers(0, 9000), st.integers(1, 8))
def test_ladder(smallest, extra, steps) -> None:
    largest = smallest + extra
    budgets = ladder(smallest, largest, steps)
    assert budgets[0] == smallest and budgets[-1] == largest
    assert list(budgets) == sorted(set(budgets))
    assert set(powers_of_two(smallest, largest)) <= set(budgets)
    for lower, upper in pairwise(budgets):
        assert upper <= lower * 2 ** (1 / steps) + 2  # both are rounded


def test_ladder_by_hand() -> None:
    assert ladder(64, 256) == (64, 76, 91, 108, 128, 152, 181, 215, 256)
    assert ladder(64, 300, 1) == (64, 128, 256, 300)
    assert ladder(5, 5) == (5,)


@pytest.mark.parametrize("arguments", [(0, 8), (9, 8), (1, 8, 0)])
def test_ladder_refuses(arguments) -> None:
    with pytest.raises(ValueError, match="must be"):
        ladder(*arguments)


def test_what_a_configuration_names() -> None:
    span = (64, 1024)
    assert resolve_budgets([512, 128, 512], span) == (128, 512)
    assert resolve_budgets((), span) == powers_of_two(64, 1024)
    assert resolve_budgets("powers_of_two", span, max_items=100) == powers_of_two(100, 1024)
    assert resolve_budgets("ladder", span) == ladder(64, 1024, 4)
    assert resolve_budgets("ladder:2", span) == ladder(64, 1024, 2)


@pytest.mark.parametrize("name", ["fast", "traffic", "ladder:x", "ladder:0", "powers_of_two:2"])
def test_unknown_names(name) -> None:
    with pytest.raises(ValueError, match="is none of 'powers_of_two', 'ladder'"):
        resolve_budgets(name, (64, 1024))


def test_names_may_be_left_open() -> None:
    assert resolve_budgets("", (64, 256)) == powers_of_two(64, 256)
    assert resolve_budgets("ladder:", (64, 128)) == ladder(64, 128)
