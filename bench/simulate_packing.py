"""Predicted time of the packing policies over 10,000 seeded requests, against lower bounds.

    python bench/simulate_packing.py [--measurements bench/results/NAME.json] [--save DIR]

greedy     greedy packing, budgets in powers of two
cost       packing for the least predicted time, the same budgets
ladder     the same packing, budgets in four steps an octave
traffic    the same packing, as many budgets as the powers of two have, chosen for other requests of
           the same mix
bound      of the packing: the same budgets as the policy's, if items could be cut like sand (the
           largest of a request excepted)
perfect    of the packing and the budgets: costs linear in the rows that are below those of every
           budget and of running eagerly, one run a request; no padding, no limits

Nothing runs on a GPU. The cost model is fitted to the times in a results file of
`vitgraph bench encoder`: from call to synchronised result, graph and eager.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vitgraph.graphs.benchmark.workloads import ALL_WORKLOADS, photograph
from vitgraph.graphs.budgets import TrafficRecorder, ladder, traffic
from vitgraph.graphs.config import Limits, powers_of_two
from vitgraph.graphs.cost import CostModel, Sample
from vitgraph.graphs.packing import Item, greedy, minimise_cost, predicted_seconds

RESULTS = Path(__file__).parent / "results"
MEASUREMENTS = RESULTS / "2026-11-30-h200-encoder.json"
SMALLEST, LARGEST, MAX_ITEMS, MAX_SEQUENCES = 64, 8192, 32, 64
REQUESTS, SEED = 2000, 42

Grid = tuple[int, int, int]


def choice(*weighted: tuple[float, Grid]) -> Callable[[random.Random], Grid]:
    """One of some grids."""
    weights, grids = zip(*weighted, strict=True)
    return lambda chance: chance.choices(grids, weights)[0]


two_sizes = choice((0.5, (1, 16, 16)), (0.5, (1, 44, 80)))
five_sizes = choice(
    (0.2, (1, 16, 16)),
    (0.3, (1, 20, 20)),
    (0.2, (1, 28, 28)),
    (0.2, (1, 42, 42)),
    (0.1, (1, 64, 64)),
)
# name -> (an item, fewest and most items of a request)
MIXES: dict[str, tuple[Callable[[random.Random], Grid], int, int]] = {
    "one photograph": (photograph, 1, 1),
    "1-8 photographs": (photograph, 1, 8),
    "20 of 336x336": (choice((1.0, (1, 20, 20))), 20, 20),
    "1-8 of 256x256, 1280x720": (two_sizes, 1, 8),
    "1-20 of five sizes": (five_sizes, 1, 20),
}


def requests(mix: str, count: int, seed: int) -> list[list[Item]]:
    """A seeded stream of one mix."""
    item, fewest, most = MIXES[mix]
    chance = random.Random(f"{mix} {seed}")
    return [
        [to_item(item(chance)) for _ in range(chance.randint(fewest, most))] for _ in range(count)
    ]


def to_item(grid: Grid) -> Item:
    """Sizes of an item."""
    t, h, w = grid
    return Item(t * h * w // 4, t, t * (h * w) ** 2)


def samples_of(result: dict) -> list[Sample]:
    """Graph and eager times of a results file; of graphs only where one replay served all."""
    samples: list[Sample] = []
    for name, row in result["workloads"].items():
        squares = sum(to_item(grid).squares for grid in ALL_WORKLOADS[name])
        samples.append((None, row["tokens"], squares, row["eager_ms"] / 1e3))
        if len(row["budgets"]) == 1 and row["budgets"][0]:
            samples.append((row["budgets"][0], row["tokens"], squares, row["graph_ms"] / 1e3))
    for budget, tokens, _, seconds in samples:
        if not 0 < tokens <= (budget or tokens) or not 0 < seconds < math.inf:
            raise ValueError(f"{tokens} tokens in a budget of {budget} in {seconds} s")
    if not any(budget for budget, *_ in samples):
        raise ValueError("no batch was served by one replay")
    return samples


@dataclass(frozen=True)
class Setting:
    """Budgets and what they cost."""

    samples: list[Sample]
    budgets: tuple[int, ...]

    @cached_property
    def limits(self) -> Limits:
        return Limits(self.budgets, MAX_ITEMS, MAX_SEQUENCES)

    @cached_property
    def model(self) -> CostModel:
        return CostModel.from_measurements(self.samples, self.budgets)

    @cached_property
    def cover(self) -> np.ndarray:
        """The least fixed cost of budgets that hold as many tokens as the index says."""
        cover = [0.0]
        for tokens in range(1, 20 * 1024 + 1):
            cover.append(
                min(fixed + cover[max(tokens - b, 0)] for b, fixed, _, _ in self.model.table)
            )
        return np.array(cover)

    def bound(self, items: list[Item]) -> float:
        """A time no packing of the items into these budgets, or eagerly, can beat."""
        tokens, longest = sum(i.tokens for i in items), max(i.tokens for i in items)
        squares = sum(i.squares for i in items)
        table, eager = self.model.table, self.model.eager
        per_row, per_square = (min(row[column] for row in table) for column in (2, 3))
        one = min(
            (f + r * tokens + s * squares for b, f, r, s in table if b >= tokens), default=math.inf
        )
        # More than one replay: the first holds the largest item, what it leaves is sand.
        first = [(b, fixed) for b, fixed, _, _ in table if b >= longest]
        several = min(f + self.cover[max(tokens - b, 1)] for b, f in first)
        several += per_row * tokens + per_square * squares
        best = min(one, max(several, self.model.bound(2, tokens, squares)))
        if eager is None:
            return best
        # Some eagerly, as sand, the rest in replays; squares are charged at the lower slope where
        # they are not hidden behind the launches.
        part = np.arange(tokens)
        run = eager.fixed + eager.per_row * part + min(eager.per_square, per_square) * squares
        mixed = np.maximum(run, eager.floor) + self.cover[tokens - part] + per_row * (tokens - part)
        return min(best, eager(tokens, squares), float(mixed.min()))


def settings_for(mix: str, samples: list[Sample], count: int) -> dict[str, Setting]:
    """The budgets of each policy; those of traffic are chosen for other requests of the mix."""
    powers = powers_of_two(SMALLEST, LARGEST)
    recorder, whole = TrafficRecorder(), Limits((LARGEST,), MAX_ITEMS, MAX_SEQUENCES)
    for items in requests(mix, count, SEED + 1):
        recorder.record(pack.tokens for pack in greedy(items, whole) if pack.budget)
    chosen = traffic(recorder.histogram(), len(powers), LARGEST, SMALLEST)
    return {
        "greedy": Setting(samples, powers),
        "cost": Setting(samples, powers),
        "ladder": Setting(samples, ladder(SMALLEST, LARGEST)),
        "traffic": Setting(samples, chosen),
    }


def run_policy(policy: str, setting: Setting, stream: list[list[Item]]) -> tuple[list[float], dict]:
    """Predicted seconds of every request, and what to report of them."""
    times, bounds, host = [], [], []
    eager_items = packs = 0
    for items in stream:
        started = time.perf_counter()
        if policy == "greedy":
            plan = greedy(items, setting.limits)
        else:
            plan = minimise_cost(items, setting.limits, setting.model)
        host.append(time.perf_counter() - started)
        times.append(predicted_seconds(plan, items, setting.model))
        bounds.append(setting.bound(items))
        eager_items += sum(len(pack.indices) for pack in plan if pack.budget is None)
        packs += len(plan)
    assert all(b <= t * (1 + 1e-9) for b, t in zip(bounds, times, strict=True)), policy
    return times, {
        "budgets": setting.budgets,
        "mean_ms": 1e3 * float(np.mean(times)),
        "p99_ms": 1e3 * float(np.percentile(times, 99)),
        "bound_ms": 1e3 * float(np.mean(bounds)),
        "above_bound": sum(times) / sum(bounds) - 1,
        "packs": packs / len(stream),
        "eager_items": eager_items / sum(map(len, stream)),
        "host_us_median": 1e6 * float(np.median(host)),
        "host_us_p90": 1e6 * float(np.percentile(host, 90)),
    }


def simulate(mix: str, samples: list[Sample], count: int) -> dict:
    """What the policies make of one mix."""
    stream = requests(mix, count, SEED)
    settings = settings_for(mix, samples, count)
    every = sorted({budget for setting in settings.values() for budget in setting.budgets})
    model = Setting(samples, tuple(every)).model
    totals = [(sum(i.tokens for i in r), sum(i.squares for i in r)) for r in stream]
    perfect_ms = 1e3 * float(np.mean([model.bound(1, *total) for total in totals]))
    times, policies = {}, {}
    for policy, setting in settings.items():
        times[policy], policies[policy] = run_policy(policy, setting, stream)
        policies[policy]["above_perfect"] = policies[policy]["mean_ms"] / perfect_ms - 1
    pairs = zip(times["cost"], times["greedy"], strict=True)
    assert all(cost <= other * (1 + 1e-9) for cost, other in pairs), "cost is above greedy"
    return {
        "requests": count,
        "items": sum(map(len, stream)) / count,
        "tokens": sum(tokens for tokens, _ in totals) / count,
        "perfect_ms": perfect_ms,
        "policies": policies,
    }


def show(result: dict) -> None:
    """One row a mix; in brackets, how far above the bound of its own budgets."""
    view = Table(box=None, title_justify="left")
    view.title = f"predicted ms a request, cost model from {result['measurements']}"
    view.add_column("mix")
    for name in ("tokens", "greedy", "cost", "ladder", "traffic", "perfect"):
        view.add_column(name, justify="right")
    view.add_column("host us, cost: median, P90", justify="right")
    for mix, row in result["mixes"].items():
        policies = row["policies"]
        view.add_row(
            mix,
            f"{row['tokens']:.0f}",
            *(f"{p['mean_ms']:.2f} (+{p['above_bound']:.1%})" for p in policies.values()),
            f"{row['perfect_ms']:.2f}",
            f"{policies['cost']['host_us_median']:.0f}, {policies['cost']['host_us_p90']:.0f}",
        )
    total = result["all"]
    view.add_row(
        "all",
        "",
        *(f"{p['mean_ms']:.2f} (+{p['above_bound']:.1%})" for p in total["policies"].values()),
        f"{total['perfect_ms']:.2f}",
    )
    Console(width=150).print(view)


def over_all(mixes: dict[str, dict]) -> dict:
    """Means over the mixes, which have equally many requests."""

    def mean(policy: str, key: str) -> float:
        return float(np.mean([row["policies"][policy][key] for row in mixes.values()]))

    names = list(next(iter(mixes.values()))["policies"])
    perfect = float(np.mean([row["perfect_ms"] for row in mixes.values()]))
    policies = {
        name: {
            "mean_ms": mean(name, "mean_ms"),
            "bound_ms": mean(name, "bound_ms"),
            "above_bound": mean(name, "mean_ms") / mean(name, "bound_ms") - 1,
            "above_perfect": mean(name, "mean_ms") / perfect - 1,
        }
        for name in names
    }
    return {"perfect_ms": perfect, "policies": policies}


def draw(result: dict, path: Path) -> None:
    """Time above the perfect bound, by mix and policy; a line for the bound of the packing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    rows = {**result["mixes"], "all": result["all"]}
    policies = list(result["all"]["policies"])
    colours = ("#9aa5b1", "#3b6ea5", "#e08e45", "#4c9f70")
    for position, (policy, colour) in enumerate(zip(policies, colours, strict=True)):
        heights = [100 * row["policies"][policy]["above_perfect"] for row in rows.values()]
        offsets = np.arange(len(rows)) + (position - 1.5) * 0.2
        bars = axes.bar(offsets, heights, 0.19, label=policy, color=colour)
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
        bounds = [
            100 * (row["policies"][policy]["bound_ms"] / row["perfect_ms"] - 1)
            for row in rows.values()
        ]
        what = "best packing into the same budgets" if position == 3 else None
        axes.hlines(bounds, offsets - 0.1, offsets + 0.1, color="black", lw=1.2, label=what)
    names = [name.replace(", ", ",\n") for name in rows]
    labels = [f"{n}\n{r['perfect_ms']:.1f} ms" for n, r in zip(names, rows.values(), strict=True)]
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylabel("% above the perfect bound")
    axes.set_title(
        f"Predicted time of {result['requests']:,} requests; the perfect bound below each mix",
        fontsize=10,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Simulate, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measurements", type=Path, default=MEASUREMENTS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each of the five mixes")
    parser.add_argument("--save", type=Path, default=None, metavar="DIR", help="a JSON and a PNG")
    args = parser.parse_args()
    if args.requests < 1:
        parser.error(f"--requests {args.requests} must be at least 1")
    if args.save and args.save.exists() and not args.save.is_dir():
        parser.error(f"--save {args.save} is a file, name a folder")
    try:
        measured = json.loads(args.measurements.read_text())
        samples, gpu = samples_of(measured), measured["gpu"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        parser.error(f"--measurements {args.measurements}: no result of bench encoder ({error!r})")
    mixes = {
        mix: simulate(mix, samples, args.requests)
        for mix in track(MIXES, description="mixes", transient=True)
    }
    result = {
        "date": date.today().isoformat(),
        "measurements": args.measurements.name,
        "gpu": gpu,
        "seed": SEED,
        "requests": args.requests * len(mixes),
        "max_items": MAX_ITEMS,
        "max_sequences": MAX_SEQUENCES,
        "all": over_all(mixes),
        "mixes": mixes,
    }
    show(result)
    if args.save:
        source = args.measurements.stem.lstrip("0123456789-")
        stem = f"{result['date']}-packing-{source}"
        args.save.mkdir(parents=True, exist_ok=True)
        (args.save / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
        draw(result, args.save / f"{stem}.png")


if __name__ == "__main__":
    main()
