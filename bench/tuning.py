"""What the tuning scripts share: candidates compiled in parallel, launches timed in a graph."""

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed

import torch
from rich.progress import Progress

REPLAYS = 7  # counted, after two that are not


def compile_all(
    pool: Executor, compile_one: Callable, title: str, configs: Sequence, bar: Progress
) -> list:
    """`compile_one(config)` of each candidate, in their order."""
    task = bar.add_task(title, total=len(configs))
    futures = [pool.submit(compile_one, config) for config in configs]
    for _ in as_completed(futures):
        bar.advance(task)
    bar.remove_task(task)
    return [future.result() for future in futures]


def microseconds(launches: Sequence[Callable[[], object]]) -> float:
    """Median time of one of `launches`, captured together."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(launches) * 1e3)
    return statistics.median(times[2:])
