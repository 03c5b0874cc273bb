"""Benchmarks under pytest: `pytest bench [--save] [--compare FILE]`.

A benchmark asks for the `measure` fixture and hands it a function. What is reported is the time of
one launch inside a replayed CUDA graph, so the host is not in it. The launches of a graph take
turns over `buffers`; enough of them keep the inputs out of the L2 cache (see `rotate`).
"""

import datetime
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from rich.table import Table
from torch import Tensor

from vitgraph.bench.console import make_console
from vitgraph.bench.report import header, title_of

MIN_LAUNCHES = 10  # a graph; more when there are more buffers
ROUNDS = 15  # replays of each graph, kernel and baseline alternating
COLD_BYTES = 256 << 20  # about four times the 50-60 MB of L2 on Hopper
MOST_BUFFERS = 64  # of what is small
RESULTS = Path(__file__).parent / "results"
ORIGIN = "{gpu}, torch {torch}, triton {triton}, commit {commit}, {date}"


@dataclass(frozen=True)
class Row:
    """One measured benchmark; times in microseconds a launch, rates in units a second."""

    name: str
    median_us: float
    quartiles_us: tuple[float, float]
    bytes: float
    flops: float
    ceiling_fraction: float | None
    baseline_name: str | None
    baseline_us: float | None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vitgraph benchmarks")
    group.addoption("--save", action="store_true", help="write a dated JSON to bench/results/")
    group.addoption("--compare", metavar="FILE", type=Path, help="print the change since FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_rows], config.stash[_ceilings], config.stash[_summaries] = [], {}, []
    config.stash[_before] = _load(config.getoption("compare"))


_rows = pytest.StashKey[list[Row]]()
_summaries = pytest.StashKey[list[tuple[Table, dict]]]()
_ceilings = pytest.StashKey[dict[str, float]]()
_before = pytest.StashKey[dict]()


def _load(path: Path | None) -> dict:
    """An earlier result, read before anything is measured."""
    if path is None:
        return {"rows": []}
    try:
        result = json.loads(path.read_text()) | {"path": path}
        [(row["name"], row["median_us"]) for row in result["rows"]]
        ORIGIN.format(**result)
    except OSError as error:
        raise pytest.UsageError(f"--compare {path}: {error}") from None
    except (ValueError, TypeError, LookupError) as error:
        raise pytest.UsageError(f"--compare {path}: no result of this ({error!r})") from None
    return result


@pytest.fixture(scope="session")
def ceilings(request: pytest.FixtureRequest) -> dict[str, float]:
    """What this GPU reaches: bytes a second (read and written) of a large copy, flop a second of
    a large product."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    # a captured copy_ is a memcpy node, which can be slower than a kernel: the better one counts
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    copy = min(statistics.median(_times([_capture(way, [()])])[0]) for way in ways)
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = statistics.median(_times([_capture(lambda: a @ b, [()])])[0])
    measured = {"copy": 2 * source.nbytes / copy * 1e6, "matmul": 2 * size**3 / matmul * 1e6}
    request.config.stash[_ceilings] = measured
    return measured


@pytest.fixture(scope="session")
def summarise(request: pytest.FixtureRequest) -> Callable[[Table, dict], None]:
    """`summarise(table, values)` prints a table after that of all rows; `--save` keeps the
    values."""
    return lambda table, values: request.config.stash[_summaries].append((table, values))


@pytest.fixture
def rotate() -> Callable[[Callable[[], tuple]], list[tuple]]:
    """`rotate(make)` calls `make` for argument tuples until their tensors exceed the L2 cache."""

    def make_all(make: Callable[[], tuple]) -> list[tuple]:
        buffers, held = [], 0
        while held < COLD_BYTES and len(buffers) < MOST_BUFFERS:
            buffers.append(make())
            held += sum(x.nbytes for x in buffers[-1] if isinstance(x, Tensor))
        return buffers

    return make_all


@pytest.fixture
def measure(request: pytest.FixtureRequest, ceilings: dict[str, float]) -> Callable[..., Row]:
    """Check, time and report one function; skips where there is no GPU. See `run` below."""

    def run(
        name: str,
        fn: Callable[..., object],
        *,
        baseline: Callable[..., object] | None = None,
        baseline_name: str = "torch",
        flops: float = 0,
        bytes: float = 0,
        check: Callable[[], None] | None = None,
        buffers: Sequence[tuple] | None = None,
    ) -> Row:
        """Time `fn` and add a row to the table at the end.

        Args:
            name: first column, e.g. "layer_norm 8160x1152 bf16"; the key of `--compare`.
            fn: launches the kernel; called as `fn(*buffers[i])`, capturable.
            baseline: the same work by other means, called likewise and replayed in turn with `fn`.
            flops, bytes: floating-point operations and least memory traffic of one launch.
            check: run once before anything is timed; raises if `fn` is wrong.
            buffers: argument tuples that successive launches take in turn. None calls `fn()` on
                what it closes over, hot in L2 where that fits.
        """
        buffers = list(buffers) if buffers is not None else [()]
        if check is not None:
            check()
        graphs = [_capture(f, buffers) for f in (fn, baseline) if f is not None]
        times, *others = _times(graphs)
        low, median, high = statistics.quantiles(times, n=4)
        floor = max(bytes / ceilings["copy"], flops / ceilings["matmul"]) * 1e6
        row = Row(
            name=name,
            median_us=median,
            quartiles_us=(low, high),
            bytes=bytes,
            flops=flops,
            ceiling_fraction=floor / median if floor else None,
            baseline_name=baseline_name if others else None,
            baseline_us=statistics.median(others[0]) if others else None,
        )
        request.config.stash[_rows].append(row)
        return row

    return run


def _capture(fn: Callable[..., object], buffers: list[tuple]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of at least `MIN_LAUNCHES` launches over all buffers, and how many it holds."""
    launches = -(-MIN_LAUNCHES // len(buffers)) * len(buffers)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            fn(*buffers[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    outputs = []
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            outputs.append(fn(*buffers[i % len(buffers)]))
            if len(buffers) == 1:
                outputs.clear()  # hot: the next launch writes the same memory
    del outputs  # cold: each launch of a turn had its own
    return graph, launches


def _times(graphs: list[tuple[torch.cuda.CUDAGraph, int]]) -> list[list[float]]:
    """Microseconds a launch of each graph, `ROUNDS` replays each, taking turns."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in graphs]
    times: list[list[float]] = [[] for _ in graphs]
    for turn in range(ROUNDS + 2):
        for (graph, launches), (start, end), samples in zip(graphs, events, times, strict=True):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                samples.append(start.elapsed_time(end) / launches * 1e3)
    return times


def _about(ceilings: dict[str, float]) -> dict[str, str | float]:
    """Where and with what the numbers were measured."""
    return {
        **header(),
        "copy_tb_s": round(ceilings["copy"] / 1e12, 3),
        "matmul_tflop_s": round(ceilings["matmul"] / 1e12, 1),
    }


def _table(rows: list[Row], about: dict[str, str | float], before: dict[str, float]) -> Table:
    caption = "ceilings measured here: copy {copy_tb_s} TB/s, matmul {matmul_tflop_s} TFLOP/s"
    table = Table(title=title_of(about), caption=caption.format(**about))
    columns = ["us", "quartiles", "GB/s", "TFLOP/s", "of ceiling", "against", "us", "ratio"]
    table.add_column("benchmark", no_wrap=True)
    for column in columns + ["change"] * bool(before):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        us, other = row.median_us, row.baseline_us
        cells = [
            row.name,
            f"{us:.2f}",
            "{:.2f}-{:.2f}".format(*row.quartiles_us),
            f"{row.bytes / us / 1e3:.0f}" if row.bytes else "",
            f"{row.flops / us / 1e6:.0f}" if row.flops else "",
            f"{row.ceiling_fraction:.0%}" if row.ceiling_fraction else "",
            row.baseline_name or "",
            f"{other:.2f}" if other else "",
            f"{other / us:.2f}x" if other else "",
        ]
        if before:
            old = before.get(row.name)
            cells.append(f"{us / old - 1:+.1%}" if old else "new")
        table.add_row(*cells)
    return table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    rows = config.stash[_rows]
    if not rows:
        return
    about = _about(config.stash[_ceilings])
    saved = config.stash[_before]
    before = {row["name"]: row["median_us"] for row in saved["rows"]}
    summaries = config.stash[_summaries]
    make_console().print(_table(rows, about, before), *(table for table, _ in summaries))
    if before:
        origin = ORIGIN.format(**saved)
        terminalreporter.write_line(f"change against {saved['path']}: {origin}")
    if config.getoption("save"):
        RESULTS.mkdir(exist_ok=True)
        gpu = about["gpu"].replace(" ", "-").lower()
        path = RESULTS / f"{datetime.datetime.now():%Y-%m-%d-%H%M}-{gpu}.json"
        content = {**about, "rows": [asdict(row) for row in rows]}
        content |= {str(table.title): values for table, values in summaries}
        path.write_text(json.dumps(content, indent=1) + "\n")
        terminalreporter.write_line(f"saved {path}")
