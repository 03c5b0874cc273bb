"""Pictures of benchmark results; None where matplotlib is not installed."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vitgraph.bench.report import title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure | None":
    """An empty figure, or None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(figsize=(width, height), layout="constrained")


def style(name: str, names: Sequence[str]) -> tuple[str, bool]:
    """Colour by what is compared; whether filled: graphs are, eager runs are hollow."""
    stems = list(dict.fromkeys(n.rpartition(" ")[0] for n in names))
    stem, _, mode = name.rpartition(" ")
    return f"C{stems.index(stem)}", mode != "eager"


def encoder_picture(result: dict[str, Any]) -> "Figure | None":
    """Latency against tokens with the floor, and bars of the ratios."""
    workloads = result["workloads"]
    names = [name for name, about in result["systems"].items() if "missing" not in about]
    others = [name for name in names if name != result["baseline"]]
    figure = new_figure(15, max(2 + len(workloads) * (len(others) + 1) * 0.13, 7))
    if figure is None or not workloads:
        return None
    latency, bars = figure.subplots(1, 2)
    by_tokens = sorted(workloads.values(), key=lambda row: row["tokens"])
    single = [row for row in by_tokens if row["sequences"] == 1]
    several = [row for row in by_tokens if row["sequences"] > 1]
    for name in names:
        colour, filled = style(name, names)
        look = {"color": colour, "markerfacecolor": colour if filled else "white", "markersize": 5}
        for rows, form in ((single, "o-" if filled else "o:"), (several, "s")):
            timed = [row for row in rows if "p50_ms" in row["systems"].get(name, {})]
            x, y = [r["tokens"] for r in timed], [r["systems"][name]["p50_ms"] for r in timed]
            latency.plot(x, y, form, linewidth=1, label=name if rows is single else None, **look)
    for rows, form, which in ((single, "k--", "one image"), (several, "k_", "several")):
        known = [row for row in rows if row["floor_ms"] is not None]
        x, y = [row["tokens"] for row in known], [row["floor_ms"] for row in known]
        label = f"floor of {which} (useful FLOPs)" if known else None
        latency.plot(x, y, form, linewidth=1, markersize=9, label=label)
    latency.set(xscale="log", yscale="log", xlabel="tokens of the batch", ylabel="median time (ms)")
    latency.set_title(
        "Time to the synchronised result\n(lines: one image; squares: several, or frames)"
    )
    latency.grid(True, which="both", alpha=0.2)
    latency.legend(fontsize=9)
    _ratio_bars(bars, workloads, others, names)
    bars.set_xlabel(f"times as long as {result['baseline']} (bars: median, whiskers: quartiles)")
    for axis in (latency.xaxis, latency.yaxis, bars.xaxis):
        axis.set_major_formatter("{x:g}")
    figure.suptitle(title_of(result), fontsize=10)
    return figure


def _ratio_bars(
    axes: "Axes", workloads: dict[str, Any], others: Sequence[str], names: Sequence[str]
) -> None:
    step = 1 / (len(others) + 1)
    for index, name in enumerate(others):
        colour, filled = style(name, names)
        found = [
            (place + (index - (len(others) - 1) / 2) * step, row["systems"][name])
            for place, row in enumerate(workloads.values())
            if "ratio" in row["systems"].get(name, {})
        ]
        lows = [one["ratio"] - one["ratio_quartiles"][0] for _, one in found]
        highs = [one["ratio_quartiles"][1] - one["ratio"] for _, one in found]
        axes.barh(
            [place for place, _ in found],
            [one["ratio"] - 1 for _, one in found],
            left=1,
            height=step * 0.9,
            xerr=[lows, highs],
            color=colour if filled else "white",
            edgecolor=colour,
            error_kw={"linewidth": 0.8},
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.axvline(1, color="black", linewidth=1)
    labels = [f"{name}\n{row['tokens']} tokens" for name, row in workloads.items()]
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_title("Ratio to ours: right of 1, ours is faster")
    axes.grid(True, axis="x", alpha=0.2)
    axes.legend(fontsize=9)


def serving_picture(result: dict[str, Any]) -> "Figure | None":
    """For each experiment the share of requests that took at most so long."""
    experiments = result["experiments"].values()
    columns = min(len(experiments), 2)
    lines = -(-len(experiments) // 2)
    figure = new_figure(7.5 * columns, 6 * lines)
    if figure is None or not experiments:
        return None
    for axes, one in zip(
        figure.subplots(lines, columns, squeeze=False).flat, experiments, strict=False
    ):
        names = list(one["systems"])
        for name, numbers in one["systems"].items():
            colour, filled = style(name, names)
            label = f"{name}: mean {numbers['mean_ms']:.1f}, P99 {numbers['p99_ms']:.1f} ms"
            form = "-" if filled else ":"
            axes.plot(numbers["percentiles_ms"], range(1, 100), form, color=colour, label=label)
        axes.set(xlabel="encoder time of a request (ms)", xlim=(0, None), ylim=(0, 100))
        axes.set(ylabel="requests that took at most so long (%)", title=one["title"])
        axes.grid(True, alpha=0.2)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    for axes in figure.axes[len(experiments) :]:
        axes.set_visible(False)
    width = int(14 * figure.get_figwidth())  # characters of this size
    figure.suptitle(textwrap.fill(title_of(result), width), fontsize=10)
    return figure
