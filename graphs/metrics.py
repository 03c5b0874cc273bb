"""Prometheus metrics of graph managers, read from their statistics when they are scraped.

    metrics = EncoderMetrics()          # of the default registry
    metrics.watch("vision", manager)

The counters that `Statistics` keeps anyway are the only state: serving pays nothing for them. Fill
of a budget is the ratio of two counters, over any time range:
    rate(vitgraph_encoder_tokens_total[5m]) / rate(vitgraph_encoder_capacity_tokens_total[5m])
The vLLM plugin counts under the same names (vllm_plugin/metrics.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily


PREFIX = "vitgraph_encoder_"
FAMILIES = {  # counters: their help and labels
    "batches": ("Batches served.", ["encoder"]),
    "items": ("Images and videos, by how they were served.", ["encoder", "served"]),
    "misses": ("Items that ran eagerly, by reason.", ["encoder", "reason"]),
    "replays": ("Graph replays.", ["encoder", "budget"]),
    "replayed_items": ("Items in the replays.", ["encoder", "budget"]),
    "tokens": ("Real tokens in the replays.", ["encoder", "budget"]),
    "capacity_tokens": ("Captured tokens of the replays.", ["encoder", "budget"]),
    "seconds": ("Time in the encoder, where it is measured.", ["encoder", "served"]),
}


class HasStatistics(Protocol):
    """A graph manager, as far as metrics go."""

    def get_cumulative_stats(self) -> dict[str, Any]:
        """See `Statistics.as_dict`."""


class EncoderMetrics:
    """A collector of any number of managers, told apart by the label `encoder`.

    Args:
        registry: where to register; prometheus_client's default one if None.

    Raises:
        ValueError: prometheus_client is not installed, or the registry has an `EncoderMetrics`
            already.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            from prometheus_client import REGISTRY
        except ImportError:
            raise ValueError(
                "metrics need prometheus_client: pip install prometheus-client"
            ) from None
        self._managers: dict[str, HasStatistics] = {}
        try:
            (registry or REGISTRY).register(self)
        except ValueError:
            raise ValueError(
                "metrics: this registry has an EncoderMetrics already; let it watch the manager"
            ) from None

    def watch(self, name: str, manager: HasStatistics) -> None:
        """Report a manager under `encoder="name"`.

        Raises:
            ValueError: another manager has the name.
        """
        if self._managers.setdefault(name, manager) is not manager:
            raise ValueError(f"metrics: encoder {name!r} is watched already")

    def unwatch(self, name: str) -> None:
        """Report a manager no longer."""
        self._managers.pop(name, None)

    def describe(self) -> Iterator[CounterMetricFamily]:
        """The families without samples: registering reads no manager."""
        return iter(_families().values())

    def collect(self) -> Iterator[CounterMetricFamily]:
        """One sample a manager, and one a budget where the family has that label."""
        families = _families()
        for name, manager in list(self._managers.items()):
            stats = manager.get_cumulative_stats()
            families["batches"].add_metric([name], stats["batches"])
            families["items"].add_metric([name, "graph"], stats["graph_hits"])
            families["items"].add_metric([name, "eager"], stats["graph_misses"])
            for budget, numbers in stats["budgets"].items():
                labels = [name, str(budget)]
                families["replays"].add_metric(labels, numbers["replays"])
                families["replayed_items"].add_metric(labels, numbers["items"])
                families["tokens"].add_metric(labels, numbers["tokens"])
                families["capacity_tokens"].add_metric(labels, numbers["replays"] * int(budget))
            seconds = {
                "graph": sum(numbers["seconds"] for numbers in stats["budgets"].values()),
                "eager": stats["eager_seconds"],
            }
            for served, took in seconds.items():
                if took:  # a manager that does not profile has none
                    families["seconds"].add_metric([name, served], took)
            for reason, misses in stats.get("misses_by_reason", {}).items():
                families["misses"].add_metric([name, str(reason)], misses)
        yield from families.values()


def _families() -> dict[str, CounterMetricFamily]:
    from prometheus_client.core import CounterMetricFamily

    return {
        name: CounterMetricFamily(PREFIX + name, text, labels=labels)
        for name, (text, labels) in FAMILIES.items()
    }
