"""Counts of what the manager did."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vitgraph.graphs.config import Limits
from vitgraph.graphs.packing import Item, Pack, split_by_items

logger = logging.getLogger(__name__)


@dataclass
class BudgetStatistics:
    """Replays of one budget, the items and real tokens they held."""

    replays: int = 0
    items: int = 0
    tokens: int = 0


class Stopwatch:
    """Times what is launched inside it, without waiting.

    Args:
        device: where it runs.
        on: False measures nothing.
    """

    def __init__(self, device: torch.device, on: bool) -> None:
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._device, self._on = device, on

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *error: object) -> None:
        self._mark()

    def _mark(self) -> None:
        if not self._on:
            return
        if self._device.type == "cuda":
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record(torch.cuda.current_stream(self._device))
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> float:
        """What it took on the device; waits for it."""
        if self._times:
            return self._times[1] - self._times[0]
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3


class Statistics:
    """Hits, misses by reason, and fill; logs a line every `log_interval` batches (0: never).

    Without `graphs`, on a CPU, a hit is an item that was packed into a budget.
    """

    def __init__(
        self, budgets: Sequence[int], log_interval: int = 100, *, graphs: bool = True
    ) -> None:
        self.budgets = {budget: BudgetStatistics() for budget in budgets}
        self.misses_by_reason: Counter[str] = Counter()
        self.batches = 0
        self._split_said = False
        self.log_interval = log_interval
        self.graphs = graphs

    @property
    def hits(self) -> int:
        """Items served by a budget."""
        return sum(budget.items for budget in self.budgets.values())

    @property
    def misses(self) -> int:
        """Items that ran eagerly."""
        return self.misses_by_reason.total()

    def record_replay(self, pack: Pack) -> None:
        """Count a replay."""
        assert pack.budget is not None
        budget = self.budgets[pack.budget]
        budget.replays += 1
        budget.items += len(pack.indices)
        budget.tokens += pack.tokens

    def record_misses(self, reasons: Iterable[str]) -> None:
        """Count items that ran eagerly together, by reason."""
        self.misses_by_reason.update(reasons)

    def say_split(self, items: Sequence[Item], limits: Limits, packs: Sequence[Pack]) -> None:
        """Say, once, what a higher limit of items would save."""
        if self._split_said or (split := split_by_items(items, limits, packs)) is None:
            return
        self._split_said = True
        logger.info(
            "encoder graphs: %d items took %d replays, for one may hold %d "
            "(encoder_cudagraph_max_images_per_batch); with %d they would take %d (said once)",
            len(items),
            split[0],
            limits.max_items,
            split[2],
            split[1],
        )

    def finish_batch(self) -> None:
        """Count one batch and log when the interval is full."""
        self.batches += 1
        if self.log_interval and self.batches % self.log_interval == 0:
            total = self.hits + self.misses
            logger.info(
                "encoder graphs: %d of %d items %s (%.1f %%), %d eagerly, %d batches",
                self.hits,
                total,
                "replayed" if self.graphs else "packed, no graphs on a CPU",
                100 * self.hits / max(total, 1),
                self.misses,
                self.batches,
            )

    def as_dict(self) -> dict[str, Any]:
        """Cumulative numbers; fill is real tokens over captured tokens of the replays, padded the
        captured tokens that held nothing."""
        total = self.hits + self.misses
        return {
            "graphs": "replayed" if self.graphs else "none on a CPU: hits were packed",
            "graph_hits": self.hits,
            "graph_misses": self.misses,
            "misses_by_reason": dict(self.misses_by_reason),
            "hit_rate": self.hits / total if total else 0.0,
            "batches": self.batches,
            "num_budgets": len(self.budgets),
            "token_budgets": list(self.budgets),
            "budgets": {
                budget: {
                    "replays": numbers.replays,
                    "items": numbers.items,
                    "tokens": numbers.tokens,
                    "padded": numbers.replays * budget - numbers.tokens,
                    "fill": numbers.tokens / (numbers.replays * budget) if numbers.replays else 0.0,
                }
                for budget, numbers in self.budgets.items()
            },
        }
