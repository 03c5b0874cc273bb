"""What launches share: the GPU they are for, how many programs it takes, the row count."""

import functools
import os
import threading
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

Capability = tuple[int, int]

# The Hopper tier is written in Gluon, which changes between releases of Triton: those it was tested
# with, on a GPU. Any other is tried before it is used.
GLUON_RELEASES = ("3.6.", "3.7.", "3.8.", "3.9.")

# Of the A100, A40, RTX 4090, H100 and H200 (SXM), B200, RTX 5090.
MULTIPROCESSORS = {
    (8, 0): 108, (8, 6): 84, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170,
}  # fmt: skip


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on the CPU."""
    return triton.knobs.runtime.interpret


def capability_of(device: torch.device) -> Capability:
    """Compute capability of a CUDA device. Elsewhere: of the GPU that is compiled for
    (bench/offline.py), or (0, 0) where kernels are interpreted."""
    if device.type == "cuda":
        return _cuda_capability(device)
    if is_interpreted():
        return 0, 0
    return divmod(triton.runtime.driver.active.get_current_target().arch, 10)


def hopper_tier_unavailable(device: torch.device) -> str | None:
    """Why the Gluon kernels cannot serve on `device`, or None where they can.

    The first call for a GPU may take a minute, under a release of Triton that they were not tested
    with. VITGRAPH_HOPPER_TIER=off leaves them out.

    Raises:
        ValueError: VITGRAPH_HOPPER_TIER is something else than on or off.
    """
    asked = os.environ.get("VITGRAPH_HOPPER_TIER", "").strip().lower()
    if asked in ("off", "0"):
        return "VITGRAPH_HOPPER_TIER is off"
    if asked not in ("", "on", "1"):
        raise ValueError(f"VITGRAPH_HOPPER_TIER {asked!r} is neither 'on' nor 'off'")
    capability = capability_of(device)
    if capability != (9, 0):
        return f"needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    if triton.__version__.startswith(GLUON_RELEASES) or device.type != "cuda":
        return None
    from vitgraph.kernels.sm90.trial import failure

    return failure(device)


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device, or of the one that is compiled for (bench/offline.py); 2
    where kernels are interpreted, one program after the other."""
    if device.type == "cuda":
        return _cuda_multiprocessors(device)
    return 2 if is_interpreted() else MULTIPROCESSORS[capability_of(device)]


_cuda_capability = functools.cache(torch.cuda.get_device_capability)


@functools.cache
def _cuda_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own unwraps its arguments for kernels first: slow on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def on_device(device: torch.device) -> AbstractContextManager:
    """Make `device` the current one: Triton launches there, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream a thread, for measurements: cuBLAS keeps a workspace of 32 MB for every stream it
    has seen."""
    return _side_stream(device, threading.get_ident())


@functools.cache
def _side_stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def num_programs(device: torch.device, max_rows: int, per_multiprocessor: int) -> int:
    """Programs of a persistent launch: as many as fit at once, no more than there are rows.

    A grid over the capacity would pay 0.7-3 us for each 1000 empty programs.
    """
    return min(max_rows, per_multiprocessor * num_multiprocessors(device))


@triton.jit
def row_count(num_rows_ptr, max_rows):
    """Real rows: the device's count where there is one, never above the capacity."""
    rows = max_rows
    if num_rows_ptr is not None:
        rows = tl.minimum(rows, tl.load(num_rows_ptr))
    return rows
