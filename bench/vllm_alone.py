"""One engine of vLLM alone on a GPU that several share: the others are stopped (SIGSTOP).

The process groups of a GPU are files in a folder, named by their numbers; the file `alone` is
locked by the engine that is alone and holds its number.
"""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

# What a stopped process has launched goes on, and launches of others wait for their turn meanwhile.
QUIET_SECONDS, QUIET_LAUNCHES, LONGEST_QUIET_LAUNCH = 30, 200, 3e-4


@contextlib.contextmanager
def alone(output: str) -> Iterator[bool]:
    """In the engine's process: the other engines of its GPU are stopped in here.

    Yields:
        Whether the GPU became quiet. Otherwise something else runs there, and times mean nothing.
    """
    groups = groups_of(output)
    mine = os.getpgid(0)
    with (groups / "alone").open("r+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.truncate()
        stream.write(str(mine))
        stream.flush()
        rest = others(groups, mine)
        signal_groups(rest, signal.SIGSTOP)
        try:
            yield _await_quiet_gpu()
        finally:
            stream.seek(0)
            stream.truncate()
            signal_groups(rest, signal.SIGCONT)


def _await_quiet_gpu() -> bool:
    """Return when many launches in a row ended at once: nothing else runs on the GPU. False if that
    did not come."""
    import torch

    if not torch.cuda.is_available():
        return True
    number, quiet = torch.zeros((), device="cuda"), 0
    deadline = time.monotonic() + QUIET_SECONDS
    while quiet < QUIET_LAUNCHES and time.monotonic() < deadline:
        started = time.perf_counter()
        number.add_(1)
        torch.cuda.synchronize()
        quiet = quiet + 1 if time.perf_counter() - started < LONGEST_QUIET_LAUNCH else 0
    return quiet >= QUIET_LAUNCHES


def groups_of(output: str) -> Path:
    """Where the process groups of an engine's GPU are listed, by name."""
    return Path(output).parent / f"GPU-{os.environ['CUDA_VISIBLE_DEVICES']}"


def others(groups: Path, mine: int) -> list[int]:
    return [int(p.name) for p in groups.iterdir() if p.name not in ("alone", str(mine))]


def was_alone(groups: Path, group: int) -> bool:
    """Whether this one ended while the others stood still."""
    return (groups / "alone").read_text() == str(group)


def signal_groups(groups: list[int], number: int) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
