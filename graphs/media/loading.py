"""Files decoded and cut into patches in worker processes, in order, while the encoder works.

What is read crosses the process boundary as arrays through a pipe: torch's own way, shared memory,
ends in a bus error where a container has little of it.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from vitgraph.graphs.media.loader import Media, MediaLoader, Picture

MOST_WORKERS = 16
FILES_A_WORKER = 4  # fewer do not pay for starting one
AHEAD = 2  # items that each worker has ready


@dataclass(frozen=True)
class Unreadable:
    """A file that gave no item, and why; the reason names it."""

    path: Path
    reason: str


@dataclass(frozen=True)
class _Files(Dataset):
    """What a worker makes of the file of an index."""

    loader: MediaLoader
    paths: Sequence[Path]
    whole: bool

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Media | Picture | Unreadable:
        path = self.paths[index]
        try:
            return self.loader.read(path, whole=self.whole)
        except ValueError as error:
            return Unreadable(path, str(error))
        except MemoryError:
            return Unreadable(path, f"{path}: too large for the memory")


@dataclass(frozen=True)
class _Parcel:
    """An item on its way, with an array for its tensor."""

    item: Any

    def opened(self) -> Any:
        return _converted(self.item, torch.as_tensor)

    def pin_memory(self, device: str | None = None) -> "_Parcel":
        """Called by the DataLoader's own thread, which also unpickles, beside the encoder."""
        return _Parcel(_converted(self.item, lambda x: torch.as_tensor(x).pin_memory()))


@dataclass(frozen=True)
class _Sent:
    """The same in parcels."""

    files: _Files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> _Parcel:
        return _Parcel(_converted(self.files[index], torch.Tensor.numpy))


def default_workers(files: int, device: torch.device) -> int:
    """Processes that keep a GPU busy; none on a CPU, whose cores the encoder uses itself."""
    if device.type == "cpu":
        return 0
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS, files // FILES_A_WORKER)


def read_all(
    loader: MediaLoader, paths: Sequence[Path], workers: int, *, pin: bool = False
) -> Iterator[Media | Picture | Unreadable]:
    """What the loader reads of each file, in their order, for `MediaLoader.finish`.

    The workers start at once, before a caller touches the GPU. With a loader on a GPU, images come
    as they were decoded, to be resized there.

    Args:
        workers: processes; 0 reads in this one.
        pin: receive them in a thread, in memory that a GPU copies from by itself.

    Raises:
        ValueError: a worker died.
    """
    whole = loader.device.type == "cpu"
    if not workers:
        return iter(map(_Files(loader, paths, whole).__getitem__, range(len(paths))))
    reader = MediaLoader.__new__(MediaLoader)
    reader.__dict__ |= vars(loader) | {"device": torch.device("cpu")}
    loaded: DataLoader[_Parcel] = DataLoader(
        _Sent(_Files(reader, paths, whole)),  # type: ignore[arg-type]  # a map-style data set
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=AHEAD,
        pin_memory=pin,
        worker_init_fn=_end_with_parent,
    )
    # DataLoader's own handler would raise wherever the caller is when a worker dies.
    handler = signal.getsignal(signal.SIGCHLD)
    items = iter(loaded)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
    return _received(items)


def _end_with_parent(worker: int) -> None:
    """In a worker: end when the process it works for was killed. The DataLoader's own way waits for
    a pipe to drain of which only other such workers hold the other end."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:  # whatever way it started this process
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _received(items: Iterator[Any]) -> Iterator[Media | Picture | Unreadable]:
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except RuntimeError as error:  # a worker that was killed, for its memory, say
            raise ValueError(f"reading files: {error}") from None
        yield item.opened()


def _as_it_is(item: Any) -> Any:
    return item


def _converted(item: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(item, Media):
        return replace(item, pixel_values=convert(item.pixel_values))
    return replace(item, pixels=convert(item.pixels)) if isinstance(item, Picture) else item
