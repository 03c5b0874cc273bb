"""The configuration's names, defaults and JSON form, and the budgets it stands for."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitgraph.graphs.budgets import resolve_budgets
from vitgraph.graphs.config import CompilationConfig, Limits, infer_limits, powers_of_two


def limits_of(config: CompilationConfig, smallest: int, largest: int) -> Limits:
    """As the manager infers them for a model of this range."""
    budgets = resolve_budgets(
        config.encoder_cudagraph_token_budgets,
        (smallest, largest),
        max_items=config.encoder_cudagraph_max_images_per_batch,
    )
    given = replace(config, encoder_cudagraph_token_budgets=budgets)
    return infer_limits(given, (smallest, largest))


def test_defaults_are_vllms() -> None:
    config = CompilationConfig()
    assert config.cudagraph_mm_encoder is False
    assert config.encoder_cudagraph_token_budgets == ()
    assert config.encoder_cudagraph_max_images_per_batch == 0
    assert config.encoder_cudagraph_max_frames_per_batch is None


def test_json_form() -> None:
    text = """{"cudagraph_mm_encoder": true, "encoder_cudagraph_token_budgets": [512, 128, 512],
               "encoder_cudagraph_max_images_per_batch": 8}"""
    config = CompilationConfig.from_json(text)
    assert config == CompilationConfig(True, (128, 512), 8)
    assert CompilationConfig.from_json(config.to_json()) == config


def test_newer_names() -> None:
    config = CompilationConfig.from_json(
        {
            "encoder_cudagraph_max_vision_items_per_batch": 5,
            "encoder_cudagraph_max_frames_per_batch": 70,
        }
    )
    assert config.encoder_cudagraph_max_images_per_batch == 5
    assert limits_of(config, 64, 1024).max_sequences == 70


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "must be a JSON object"),
        ({"cudagraph_mode": "FULL"}, "no field 'cudagraph_mode'"),
        ({"encoder_cudagraph_token_budgets": [64, 0]}, "0 in [64, 0] is no positive integer"),
        ({"encoder_cudagraph_token_budgets": [64.5]}, "64.5 in [64.5]"),
        ({"encoder_cudagraph_max_images_per_batch": -1}, "-1 is no integer of at least 0"),
        ({"encoder_cudagraph_max_frames_per_batch": 0}, "0 is neither None nor an integer"),
        (
            {
                "encoder_cudagraph_max_vision_items_per_batch": 1,
                "encoder_cudagraph_max_images_per_batch": 1,
            },
            "are the same field",
        ),
    ],
)
def test_bad_values_are_named(value, message) -> None:
    with pytest.raises(ValueError) as error:
        CompilationConfig.from_json(value)
    assert message in str(error.value)


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_inferred_budgets(smallest, extra) -> None:
    largest = smallest + extra
    budgets = powers_of_two(smallest, largest)
    assert budgets[0] == smallest and budgets[-1] == largest
    assert list(budgets) == sorted(set(budgets))
    assert all(b == 2 * a for a, b in pairwise(budgets[:-1]))


@given(
    st.lists(st.integers(1, 9000), max_size=8),
    st.integers(0, 200),
    st.integers(1, 256),
    st.integers(0, 9000),
)
def test_items_never_exceed_the_smallest_budget(budgets, max_items, smallest, extra) -> None:
    config = CompilationConfig(True, tuple(budgets), max_items)
    if budgets and max_items > min(budgets):
        with pytest.raises(ValueError, match=f"{max_items} is above the smallest budget"):
            limits_of(config, smallest, smallest + extra)
        return
    try:
        limits = limits_of(config, smallest, smallest + extra)
    except ValueError:
        assert max_items > smallest + extra
        return
    assert 1 <= limits.max_items <= limits.budgets[0]
    assert limits.max_sequences >= limits.max_items
    if max_items:
        assert limits.max_items == max_items
    if not budgets:
        assert limits.budgets[-1] == smallest + extra


def test_more_items_than_the_smallest_budget() -> None:
    """KNOWN_FAILURES 8: both numbers are named."""
    with pytest.raises(ValueError, match="128 is above the smallest budget 64"):
        limits_of(CompilationConfig(True, (64, 512), 128), 64, 512)


def test_items_inferred_from_the_range() -> None:
    assert limits_of(CompilationConfig(True), 64, 1024).max_items == 16
    assert limits_of(CompilationConfig(True, (8, 1024)), 64, 1024).max_items == 8
