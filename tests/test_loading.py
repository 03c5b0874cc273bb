"""Items read in other processes are those read in this one, in the order of the files."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vitgraph.graphs.media.loader import Media, MediaLoader
from vitgraph.graphs.media.loading import Unreadable, default_workers, read_all

PHOTOS = sorted((Path(__file__).parents[1] / "graphs" / "cli" / "photos").glob("*.jpg"))


@pytest.mark.parametrize("pin", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_order_and_content(workers, pin, tmp_path) -> None:
    (bad := tmp_path / "bad.jpg").write_bytes(b"no picture")
    (folder := tmp_path / "frames").mkdir()
    for photo in PHOTOS[:1] * 2:
        (folder / photo.name).write_bytes(photo.read_bytes())
    paths = [*PHOTOS, bad, folder, *PHOTOS[::-1]]
    loader = MediaLoader(max_pixels=128 * 128)
    items = list(read_all(loader, paths, workers, pin=pin))
    assert isinstance(items[4], Unreadable) and items[4].reason == f"{bad}: not an image"
    del items[4], paths[4]
    for path, item in zip(paths, items, strict=True):
        assert isinstance(item, Media) and item.pixel_values.dtype == torch.uint8
        assert item.pixel_values.is_pinned() == (pin and workers > 0)
        expected = loader.load(path)
        assert torch.equal(loader.finish(item).pixel_values, expected.pixel_values)
        assert (item.name, item.grid) == (str(path), expected.grid)


def test_how_many_workers(monkeypatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(64))
    assert [default_workers(files, gpu) for files in (1, 8, 1000)] == [0, 2, 16]
    assert default_workers(1000, cpu) == 0


def test_a_dead_worker_disturbs_nobody_but_who_waits_for_it(monkeypatch) -> None:
    """The caller may be in the middle of anything, a write say, when it dies."""
    read = MediaLoader.read

    def die(self, path, **options) -> object:
        if path == PHOTOS[1]:
            time.sleep(1)  # until the first item is on its way
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, path, **options)

    monkeypatch.setattr(MediaLoader, "read", die)
    items = read_all(MediaLoader(max_pixels=64 * 64), PHOTOS[:2], 1)
    assert isinstance(next(items), Media)
    time.sleep(3)
    with pytest.raises(ValueError, match="reading files: DataLoader worker"):
        next(items)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_end_with_a_killed_process(method, tmp_path) -> None:
    """KNOWN_FAILURES 45: though what they have read waits in a pipe that nobody empties."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys, time\n"
        "from pathlib import Path\n"
        "from vitgraph.graphs.media.loader import MediaLoader\n"
        "from vitgraph.graphs.media.loading import read_all\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_start_method(sys.argv[1])\n"
        "    items = read_all(MediaLoader(), [Path(p) for p in sys.argv[2:]], 2)\n"
        "    next(items)\n"
        "    time.sleep(1)\n"
        "    next(items)\n"
        "    workers = [str(child.pid) for child in multiprocessing.active_children()]\n"
        "    print(*workers, flush=True)\n"
        "    time.sleep(60)\n"
    )
    paths = [str(PHOTOS[0])] * 50
    command = [sys.executable, str(script), method, *paths]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2 and all(map(alive, workers))
        process.kill()
    deadline = time.monotonic() + 20
    while (left := [pid for pid in workers if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
