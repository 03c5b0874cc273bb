"""A recorded run of a manager, as a table and a picture (`vitgraph stats`)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING

from rich.table import Table

from vitgraph.graphs.packing import Pack
from vitgraph.graphs.statistics import Stopwatch

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PackRecord:
    """One pack that ran: its budget (None: eagerly), real tokens, items, and milliseconds.

    Raises:
        ValueError: what no pack can have.
    """

    budget: int | None
    tokens: int
    items: int
    ms: float

    def __post_init__(self) -> None:
        counts = (self.tokens, self.items, 1 if self.budget is None else self.budget)
        if not all(type(count) is int and count > 0 for count in counts) or not self.ms >= 0:
            raise ValueError(f"no pack: {self}")


class RunRecorder:
    """What a manager ran, pack by pack: its `on_pack`."""

    def __init__(self, packs: list[PackRecord] | None = None) -> None:
        self.packs = packs or []

    def __call__(self, pack: Pack, watch: Stopwatch) -> None:
        """Append one pack; waits for it."""
        tokens, items = int(pack.tokens), len(pack.indices)
        self.packs.append(PackRecord(pack.budget, tokens, items, 1e3 * watch.seconds()))

    def save(self, path: str | Path) -> None:
        """Write JSON: {"packs": [{"budget", "tokens", "items", "ms"}]}."""
        packs = [asdict(pack) for pack in self.packs]
        Path(path).write_text(json.dumps({"packs": packs}) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "RunRecorder":
        """Read what `save` wrote.

        Raises:
            ValueError: no such file, or one that holds something else.
        """
        try:
            packs = json.loads(Path(path).read_text())["packs"]
            return cls([PackRecord(**pack) for pack in packs])
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(f"{path} is no recorded run") from None

    def by_budget(self) -> dict[int | None, list[PackRecord]]:
        """Packs of each budget, ascending, the eager ones last."""
        budgets = sorted({pack.budget for pack in self.packs}, key=lambda b: (b is None, b))
        return {b: [pack for pack in self.packs if pack.budget == b] for b in budgets}


def table(run: RunRecorder) -> Table:
    """One row a budget."""
    view = Table(box=None, pad_edge=False)
    columns = ("budget", "replays", "items", "tokens", "padded", "fill", "mean ms", "P50", "P99")
    for name in columns:
        view.add_column(name, justify="right")
    for budget, packs in run.by_budget().items():
        tokens, times = sum(pack.tokens for pack in packs), [pack.ms for pack in packs]
        capacity = (budget or 0) * len(packs)
        p99 = quantiles(times, n=100, method="inclusive")[-1] if len(times) > 1 else times[0]
        view.add_row(
            str(budget or "eager"),
            str(len(packs)),
            str(sum(pack.items for pack in packs)),
            str(tokens),
            str(capacity - tokens) if budget else "-",
            f"{tokens / capacity:.0%}" if budget else "-",
            *(f"{value:.2f}" for value in (mean(times), median(times), p99)),
        )
    return view


def picture(run: RunRecorder) -> "Figure":
    """Fill per budget, and latency against tokens.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    fills, latency = figure.subplots(1, 2)
    by_budget = run.by_budget()
    replayed = {budget: packs for budget, packs in by_budget.items() if budget is not None}
    labels = [str(budget) for budget in replayed]
    values = [
        100 * sum(pack.tokens for pack in packs) / (budget * len(packs))
        for budget, packs in replayed.items()
    ]
    bars = fills.bar(labels, values, color="#3b6ea5")
    counts = [f"{len(packs)} replay{'s' * (len(packs) > 1)}" for packs in replayed.values()]
    fills.bar_label(bars, counts, fontsize=8)
    fills.set(xlabel="budget (tokens)", ylabel="fill (%)", ylim=(0, 110), title="Fill per budget")
    for budget, packs in by_budget.items():
        label = f"budget {budget}" if budget is not None else "eager"
        marker = "o" if budget is not None else "x"
        tokens, times = [pack.tokens for pack in packs], [pack.ms for pack in packs]
        latency.scatter(tokens, times, s=16, marker=marker, label=label)
    latency.set(xlabel="real tokens of the pack", ylabel="time (ms)", title="Latency of each pack")
    latency.set(xlim=(0, None), ylim=(0, None))
    latency.legend(fontsize=8)
    if not replayed:
        fills.set_xticks([])
        fills.text(0.5, 0.5, "nothing was replayed", transform=fills.transAxes, ha="center")
    return figure
