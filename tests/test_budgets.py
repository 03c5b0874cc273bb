"""Budgets: the ladder's steps, the best budgets for a histogram, and what a configuration names."""

import json
import threading
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitgraph.graphs.budgets import (
    TrafficRecorder,
    ladder,
    load_histogram,
    resolve_budgets,
    save_histogram,
    traffic,
)
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


def expected_capacity(histogram, budgets) -> float:
    """What the budgets' capacity costs on average, larger sizes aside."""
    served = {size: weight for size, weight in histogram.items() if size <= budgets[-1]}
    return sum(w * min(b for b in budgets if b >= size) for size, w in served.items())


histograms = st.dictionaries(
    st.integers(1, 24), st.sampled_from([0, 1, 2, 7]) | st.floats(0, 10), max_size=10
)


@given(histograms, st.integers(1, 5), st.integers(8, 20), st.integers(1, 8))
def test_traffic_is_optimal(histogram, count, largest, smallest) -> None:
    budgets = traffic(histogram, count, largest, smallest)
    assert len(budgets) <= count and budgets[-1] == largest and budgets[0] >= smallest
    assert list(budgets) == sorted(set(budgets))
    choices = combinations(range(smallest, largest), min(count - 1, largest - smallest))
    best = min(expected_capacity(histogram, (*choice, largest)) for choice in choices)
    assert expected_capacity(histogram, budgets) <= best + 1e-9


def test_traffic_at_the_edges() -> None:
    assert traffic({}, 4, 100) == (100,)
    assert traffic({7: 0, 9: 0.0}, 4, 100) == (100,)
    assert traffic({7: 1, 9: 1}, 4, 100) == (7, 9, 100)
    assert traffic({7: 1, 9: 1}, 1, 100) == (100,)
    assert traffic({7: 1, 9: 5}, 2, 100) == (9, 100)
    assert traffic({7: 1, 900: 50}, 3, 100) == (7, 100)
    assert traffic({7: 1, 9: 1}, 4, 100, smallest=8) == (8, 9, 100)
    assert traffic({100: 1}, 3, 100) == (100,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, 0, 8), "count 0"),
        (({}, 1, 0), "smallest 1 must be in 1..largest 0"),
        (({0: 1}, 1, 8), "0: 1"),
        (({5: -1}, 1, 8), "5: -1"),
        (({5: float("nan")}, 1, 8), "5: nan"),
    ],
)
def test_traffic_refuses(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        traffic(*arguments)


def test_traffic_of_every_size_is_quick() -> None:
    histogram = {size: 1 / size for size in range(1, 2049)}
    budgets = traffic(histogram, 8, 2048)
    assert len(budgets) == 8
    assert expected_capacity(histogram, budgets) < expected_capacity(
        histogram, powers_of_two(16, 2048)
    )


@given(st.dictionaries(st.integers(1, 10**6), st.floats(0, 1e9) | st.integers(0, 10**9)))
def test_histogram_file(tmp_path_factory, histogram) -> None:
    path = tmp_path_factory.mktemp("histogram") / "sizes.json"
    save_histogram(path, histogram)
    assert load_histogram(path) == histogram


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"a": 1}', "'a': 1"),
        ('{"0": 1}', "'0': 1"),
        ('{"5": -1}', "'5': -1"),
        ('{"5": "1"}', "'5': '1'"),
        ('{"5": NaN}', "'5': nan"),
        ('{"5": true}', "'5': True"),
    ],
)
def test_bad_histograms_are_named(tmp_path, text, message) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        load_histogram(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_a_histogram_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        load_histogram(tmp_path / "none.json")


def test_recording_from_many_threads(tmp_path) -> None:
    recorder = TrafficRecorder()
    threads = [
        threading.Thread(target=lambda: [recorder.record([100, 100, 7]) for _ in range(500)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.histogram() == {100: 8000, 7: 4000}
    recorder.save(tmp_path / "sizes.json")
    assert json.loads((tmp_path / "sizes.json").read_text()) == {"7": 4000, "100": 8000}
    recorder.clear()
    assert recorder.histogram() == {}


def test_what_a_configuration_names(tmp_path) -> None:
    path = tmp_path / "sizes.json"
    save_histogram(path, {100: 5, 300: 1})
    span = (64, 1024)
    assert resolve_budgets([512, 128, 512], span) == (128, 512)
    assert resolve_budgets((), span) == powers_of_two(64, 1024)
    assert resolve_budgets("powers_of_two", span, max_items=100) == powers_of_two(100, 1024)
    assert resolve_budgets("ladder", span) == ladder(64, 1024, 4)
    assert resolve_budgets("ladder:2", span) == ladder(64, 1024, 2)
    assert resolve_budgets(f"traffic:{path}", span) == (100, 300, 1024)
    assert resolve_budgets(f"traffic:{path}", span, max_items=200) == (200, 300, 1024)
    assert resolve_budgets(f"traffic:{path}", span, count=2) == (100, 1024)


@pytest.mark.parametrize("name", ["", "fast", "traffic", "ladder:", "ladder:x", "powers_of_two:2"])
def test_unknown_names(name) -> None:
    if name == "ladder:":
        assert resolve_budgets(name, (64, 128)) == ladder(64, 128)
        return
    with pytest.raises(ValueError, match="is none of 'powers_of_two', 'ladder'"):
        resolve_budgets(name, (64, 1024))
