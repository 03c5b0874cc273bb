"""An end to what cannot be asked to stop: compiling, above all."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(BaseException):
    """Raised in the middle of whatever ran; no `Exception`, so that nobody takes it for theirs."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the block after so many seconds; outside the main thread, never."""
    if seconds == float("inf") or threading.current_thread() is not threading.main_thread():
        yield
        return
    if seconds <= 0:
        raise OutOfTime

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
