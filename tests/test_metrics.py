"""Prometheus sees what the statistics hold, and nothing is counted twice."""

import sys

import pytest

from vitgraph.graphs.metrics import EncoderMetrics
from vitgraph.graphs.packing import Pack
from vitgraph.graphs.statistics import Statistics


class Manager:
    """As much of a manager as metrics read."""

    def __init__(self) -> None:
        self.statistics = Statistics((64, 128))

    def get_cumulative_stats(self) -> dict:
        return self.statistics.as_dict()


@pytest.fixture
def registry():
    reason = "prometheus_client is not installed (extra `metrics`)"
    return pytest.importorskip("prometheus_client", reason=reason).CollectorRegistry()


def value(registry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"vitgraph_encoder_{name}_total", labels)


def test_counters_follow_the_statistics(registry) -> None:
    manager = Manager()
    EncoderMetrics(registry).watch("vision", manager)
    assert value(registry, "batches", encoder="vision") == 0
    manager.statistics.record_replay(Pack((0, 2), 60, 64))
    manager.statistics.record_replay(Pack((1,), 65, 128))
    manager.statistics.record_misses(["too_large", "declined"])
    manager.statistics.finish_batch()
    assert value(registry, "batches", encoder="vision") == 1
    assert value(registry, "items", encoder="vision", served="graph") == 3
    assert value(registry, "items", encoder="vision", served="eager") == 2
    for budget, items, tokens in [("64", 2, 60), ("128", 1, 65)]:
        labels = {"encoder": "vision", "budget": budget}
        assert value(registry, "replays", **labels) == 1
        assert value(registry, "replayed_items", **labels) == items
        assert value(registry, "tokens", **labels) == tokens
        assert value(registry, "capacity_tokens", **labels) == int(budget)


def test_misses_by_reason(registry) -> None:
    manager = Manager()
    EncoderMetrics(registry).watch("vision", manager)
    assert value(registry, "misses", encoder="vision", reason="too_large") is None
    manager.statistics.record_misses(["too_large"] * 2)
    assert value(registry, "misses", encoder="vision", reason="too_large") == 2


def test_two_managers_and_their_names(registry) -> None:
    one, other = Manager(), Manager()
    metrics = EncoderMetrics(registry)
    metrics.watch("one", one)
    metrics.watch("other", other)
    metrics.watch("one", one)
    one.statistics.finish_batch()
    assert value(registry, "batches", encoder="one") == 1
    assert value(registry, "batches", encoder="other") == 0
    with pytest.raises(ValueError, match="'one' is watched already"):
        metrics.watch("one", other)
    metrics.unwatch("one")
    assert value(registry, "batches", encoder="one") is None


def test_one_collector_a_registry(registry) -> None:
    EncoderMetrics(registry)
    with pytest.raises(ValueError, match="has an EncoderMetrics already"):
        EncoderMetrics(registry)


def test_text_format(registry) -> None:
    from prometheus_client import generate_latest

    EncoderMetrics(registry).watch("vision", Manager())
    text = generate_latest(registry).decode()
    assert "# TYPE vitgraph_encoder_replays_total counter" in text
    assert 'vitgraph_encoder_replays_total{budget="64",encoder="vision"} 0.0' in text


def test_without_the_package(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match="pip install prometheus-client"):
        EncoderMetrics()
