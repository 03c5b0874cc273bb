"""Work beside the rest of a forward, on a branch of its CUDA graph."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

Beside = Callable[[Tensor], AbstractContextManager]

# Capacity in patches up to which the mergers of the levels are a branch. 100 tokens in a graph of
# 128 took 3 % less for it on an H200, 256 in one of 256 1 %; larger forwards fill the GPU.
BRANCH_ROWS = 2048


@functools.cache
def _branch_of(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    # one for each: cuBLAS's workspace of a stream becomes part of the graphs that use it
    return torch.cuda.Stream(stream.device)


@contextmanager
def branching(device: torch.device, wanted: bool) -> Iterator[Beside]:
    """Around a forward: yields `beside`.

    What is launched inside `with beside(x)` runs at the same time as all that follows, up to the
    end of this block; where no branch is wanted, in its turn. It shares no memory with what
    follows: `x`, which it reads, stays allocated as long, and nothing may write it.
    """
    if device.type != "cuda" or not wanted:
        yield nullcontext
        return
    kept: list[Tensor] = []
    stream = torch.cuda.current_stream(device)
    branch = _branch_of(stream)

    @contextmanager
    def beside(x: Tensor) -> Iterator[None]:
        kept.append(x)
        branch.wait_stream(stream)
        with torch.cuda.stream(branch):
            yield

    try:
        yield beside
    finally:  # also of a forward that fails: a capture with a loose end hides its error
        if kept:
            stream.wait_stream(branch)
        kept.clear()
