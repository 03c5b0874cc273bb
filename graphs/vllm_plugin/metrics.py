"""What vLLM's worker processes encode, on vLLM's own `/metrics`.

vLLM serves the registry of its API server, and encodes in other processes. A worker counts in a
file of prometheus_client's multiprocess format, and the registry of the API server reads all of
them from one folder, which processes inherit through the environment:

    PROMETHEUS_MULTIPROC_DIR   where vLLM (with several API servers) or the user has set it; vLLM
                               reads this folder itself
    VITGRAPH_METRICS_DIR       made by `publish` otherwise

Setting the former here would come too late: prometheus_client has been imported by then and keeps
vLLM's metrics in memory, and vLLM would look for them in files.

Seconds lie between two CUDA events that are read when they have passed, at the next batch: nothing
ever waits for the device. They hold what the GPU did between them, waiting for the host included.
"""

import atexit
import functools
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate

from vitgraph.graphs.metrics import FAMILIES, PREFIX
from vitgraph.graphs.vllm_plugin import logger

SHARED, OURS = "PROMETHEUS_MULTIPROC_DIR", "VITGRAPH_METRICS_DIR"
ENCODER = "vision"  # the label
FILE_BYTES = 1 << 16  # of 200 a counter: 24 budgets need 100 counters


class FolderCollector:
    """Sums the counters of every process that shares `OURS`; a broken folder has none."""

    def describe(self) -> Iterator[Any]:
        """Nothing: registering reads no files."""
        return iter(())

    def collect(self) -> Iterator[Any]:
        """One family a counter."""
        from prometheus_client.multiprocess import MultiProcessCollector

        try:
            families = list(MultiProcessCollector(None, os.environ[OURS]).collect())
        except Exception:  # a folder that was cleared away must not take vLLM's metrics with it
            families = []
        yield from families


@functools.cache
def publish() -> None:
    """Let the registry of this process report what it and the processes that it starts encode.

    Without prometheus_client, or where vLLM reads the files itself, nothing happens.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return
    if os.environ.get(SHARED):
        return
    if not os.environ.get(OURS):
        os.environ[OURS] = folder = tempfile.mkdtemp(prefix="vitgraph-metrics-")
        atexit.register(_remove, folder, os.getpid())
    REGISTRY.register(FolderCollector())


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


Method = Callable[Concatenate["TowerMetrics", ...], None]


def _guarded(method: Method) -> Method:
    """Counting that fails ends, with one line in the log, and serving goes on."""

    @functools.wraps(method)
    def call(metrics: "TowerMetrics", *arguments: Any, **keywords: Any) -> None:
        if metrics.file is None:
            return
        try:
            method(metrics, *arguments, **keywords)
        except Exception as error:
            metrics.file = None
            logger.warning("vitgraph: no metrics: %s: %s", type(error).__name__, error)

    return call


class TowerMetrics:
    """Counters of one process's tower; without a folder or prometheus_client all of it is idle.

    Args:
        on_gpu: time with CUDA events, else with the host's clock.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.file = _open()
        self._on_gpu = on_gpu
        self._values: dict[str, float] = {}
        self._start: Any = None
        self._replay: tuple[int, int, int] | None = None  # items, tokens, budget
        self._running: deque[tuple[str, Any, Any]] = deque()  # served, start, end
        self._events: list[Any] = []

    @_guarded
    def start_replay(self, items: int, tokens: int, budget: int) -> None:
        """A replay is about to be launched; `end_replay` counts it."""
        self._read_clock()
        self._replay = items, tokens, budget
        self._start = self._now()

    @_guarded
    def end_replay(self, timed: bool = True) -> None:
        """The replay has been launched, if there was one: the GPU is busy, and counting is free.

        Args:
            timed: False where it will be launched only now, as nothing is called after it.
        """
        if self._replay is None:
            return
        if timed:
            self._running.append(("graph", self._start, self._now()))
        (items, tokens, budget), self._replay = self._replay, None
        self._add("items", "graph", items)
        for family, amount in (
            ("replays", 1),
            ("replayed_items", items),
            ("tokens", tokens),
            ("capacity_tokens", budget),
        ):
            self._add(family, budget, amount)
        self._read_clock()

    @contextmanager
    def eager(self, items: int, reason: str) -> Iterator[None]:
        """Count and time items that are encoded eagerly within, unless that fails."""
        self._begin_eager()
        yield
        self._end_eager(items, reason)

    @_guarded
    def _begin_eager(self) -> None:
        self._read_clock()
        self._start = self._now()

    @_guarded
    def _end_eager(self, items: int, reason: str) -> None:
        self._running.append(("eager", self._start, self._now()))
        self._add("items", "eager", items)
        self._add("misses", reason, items)
        self._read_clock()

    def _add(self, family: str, label: str | int, amount: float) -> None:
        key = _key(family, label)
        self._values[key] = self._values.get(key, 0.0) + amount
        self.file.write_value(key, self._values[key], 0.0)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        import torch

        event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read_clock(self) -> None:
        """Add the seconds of everything that has ended by now."""
        while self._running and (not self._on_gpu or self._running[0][2].query()):
            served, start, end = self._running.popleft()
            if self._on_gpu:
                self._events += (start, end)
                self._add("seconds", served, start.elapsed_time(end) / 1000)
            else:
                self._add("seconds", served, end - start)


def _open() -> Any:
    """This process's file, its memory reserved: a full disk is an error here, no bus error later.
    None where there are no metrics."""
    folder = os.environ.get(SHARED) or os.environ.get(OURS)
    if not folder:
        return None
    try:
        from prometheus_client.mmap_dict import MmapedDict

        # vLLM may have a file of its own for this process's counters.
        path = os.path.join(folder, f"counter_vitgraph-{os.getpid()}-{time.time_ns()}.db")
        descriptor, made = tempfile.mkstemp(dir=folder)
        try:
            os.posix_fallocate(descriptor, 0, FILE_BYTES)
            os.rename(made, path)  # readers never see half a file
        except OSError:
            os.unlink(made)
            raise
        finally:
            os.close(descriptor)
        return MmapedDict(path)
    except Exception as error:
        logger.warning("vitgraph: no metrics: %s: %s", type(error).__name__, error)
        return None


@functools.cache
def _key(family: str, label: str | int) -> str:
    from prometheus_client.mmap_dict import mmap_key

    text, labels = FAMILIES[family]
    name = PREFIX + family
    return mmap_key(name, f"{name}_total", labels, [ENCODER, str(label)], text)
