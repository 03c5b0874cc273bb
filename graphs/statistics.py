"""Counts of what the manager did."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vitgraph.graphs.packing import Pack

logger = logging.getLogger(__name__)


@dataclass
class BudgetStatistics:
    """Replays of one budget, and the items and real tokens they held."""

    replays: int = 0
    items: int = 0
    tokens: int = 0


class Statistics:
    """Hits, misses and fill; logs a line every `log_interval` batches (0: never)."""

    def __init__(self, budgets: Sequence[int], log_interval: int = 100) -> None:
        self.budgets = {budget: BudgetStatistics() for budget in budgets}
        self.misses = 0
        self.batches = 0
        self.log_interval = log_interval

    @property
    def hits(self) -> int:
        """Items served by a budget."""
        return sum(budget.items for budget in self.budgets.values())

    def record(self, pack: Pack) -> None:
        """Count one pack: a replay of its budget, or misses where it ran eagerly."""
        if pack.budget is None:
            self.misses += len(pack.indices)
            return
        budget = self.budgets[pack.budget]
        budget.replays += 1
        budget.items += len(pack.indices)
        budget.tokens += pack.tokens

    def finish_batch(self) -> None:
        """Count one batch and log when the interval is full."""
        self.batches += 1
        if self.log_interval and self.batches % self.log_interval == 0:
            total = self.hits + self.misses
            logger.info(
                "encoder graphs: %d of %d items replayed (%.1f %%), %d eagerly, %d batches",
                self.hits,
                total,
                100 * self.hits / max(total, 1),
                self.misses,
                self.batches,
            )

    def as_dict(self) -> dict[str, Any]:
        """Cumulative numbers; fill is real tokens over captured tokens of the replays."""
        total = self.hits + self.misses
        return {
            "graph_hits": self.hits,
            "graph_misses": self.misses,
            "hit_rate": self.hits / total if total else 0.0,
            "batches": self.batches,
            "num_budgets": len(self.budgets),
            "token_budgets": list(self.budgets),
            "budgets": {
                budget: {
                    "replays": numbers.replays,
                    "items": numbers.items,
                    "tokens": numbers.tokens,
                    "fill": numbers.tokens / (numbers.replays * budget) if numbers.replays else 0.0,
                }
                for budget, numbers in self.budgets.items()
            },
        }
