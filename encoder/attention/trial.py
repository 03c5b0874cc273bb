"""What an attention backend is told, and trying a library out before it is trusted.

A library is called on a small pack with garbage around it, eagerly and from a captured graph whose
offsets change between capture and replay. What it answers is compared with float32.

FlashAttention 3 and 4 load the values of whole key tiles, so a NaN in the rows behind a sequence,
which are its neighbour's, reaches it. Behind the last sequence we put zeros for them; a NaN inside
an item still reaches the item before it, which is why `auto` does not choose them.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitgraph.kernels.clear_tail import clear_tail
from vitgraph.kernels.launch import on_device
from vitgraph.kernels.layout import Layout

Attend = Callable[[Tensor], Tensor]  # qkv [P, 3, H, D] -> [P, H * D]
TAIL = 256  # rows; no library has taller key tiles
LEAKS = "a NaN in an item reaches the one before it"
ROWS, SLOTS = 640, 8
LENGTHS = (40, 300, 4, 0, 129)
REPLAYED = (8, 1, 520)


@dataclass(frozen=True)
class Heads:
    """What attention needs to know of a tower."""

    count: int
    dim: int
    dtype: torch.dtype


Build = Callable[[Layout, Heads], Attend]


@dataclass(frozen=True)
class Capability:
    """Whether a backend serves heads on a device.

    Attributes:
        backend: "triton", "flash_attn", "flashinfer" or "sdpa".
        provider: the package that computes.
        ok: it serves.
        reason: why it does not, or what to know about it.
        capturable: no length is read on the host.
        isolates: a NaN stays in its sequence.
    """

    backend: str
    provider: str
    ok: bool
    reason: str = ""
    capturable: bool = True
    isolates: bool = True


def guarded(build: Build) -> Build:
    """`build`, with zeros for values behind the last sequence."""

    def build_guarded(layout: Layout, heads: Heads) -> Attend:
        attend = build(layout, heads)

        def attend_guarded(qkv: Tensor) -> Tensor:
            clear_tail(qkv[:, 2], layout.num_patches, TAIL)
            return attend(qkv)

        return attend_guarded

    return build_guarded


def try_out(build: Build, heads: Heads, device: torch.device) -> bool:
    """Whether `build` isolates sequences; False asks for `guarded(build)`.

    Raises:
        Exception: whatever the library raises.
        ArithmeticError: wrong results, saying by how much.
    """
    with torch.inference_mode(), on_device(device):
        rng = torch.Generator(device).manual_seed(0)
        shape = ROWS, 3, heads.count, heads.dim
        qkv = torch.randn(shape, generator=rng, device=device, dtype=torch.float32)
        qkv = qkv.to(heads.dtype)
        layout = _layout(LENGTHS, device)
        poisoned = _poison(qkv, LENGTHS, sequence=1)
        isolates = _error(build(layout, heads)(poisoned.clone()), poisoned, LENGTHS) < _bound(heads)
        if not isolates:
            build = guarded(build)
            poisoned = _poison(qkv, LENGTHS)
            _check(build(layout, heads)(poisoned), poisoned, LENGTHS, heads, "eagerly")
        if device.type == "cuda":
            replayed = _poison(qkv, REPLAYED)
            _check(_replay(build, heads, replayed), replayed, REPLAYED, heads, "replayed")
    return isolates


def _replay(build: Build, heads: Heads, qkv: Tensor) -> Tensor:
    """Captured for one layout, replayed for another; a second stream, as capture wants it."""
    layout, other = _layout(LENGTHS, qkv.device), _layout(REPLAYED, qkv.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            build(layout, heads)(qkv.clone())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = build(layout, heads)(qkv)
            layout.cu_seqlens.copy_(other.cu_seqlens)
            layout.num_patches.copy_(other.num_patches)
            out.fill_(float("nan"))
            graph.replay()
            result = out.clone()
    finally:  # also where a library raised: what it launched may still write
        torch.cuda.current_stream().wait_stream(stream)
    stream.synchronize()
    return result


def _layout(lengths: tuple[int, ...], device: torch.device) -> Layout:
    offsets = [0, *itertools.accumulate((*lengths, *[0] * (SLOTS - len(lengths))))]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    coords = torch.zeros(ROWS, 4, dtype=torch.int32, device=device)
    total = cu_seqlens[-1:].clone()
    slots = torch.full_like(total, SLOTS)
    return Layout(total, total // 4, slots, cu_seqlens, coords, max_seqlen=ROWS)


def _poison(qkv: Tensor, lengths: tuple[int, ...], sequence: int | None = None) -> Tensor:
    """NaN behind the last sequence, and in one of them."""
    qkv = qkv.clone()
    qkv[sum(lengths) :] = float("nan")
    if sequence is not None:
        start = sum(lengths[:sequence])
        qkv[start : start + lengths[sequence]] = float("nan")
    return qkv


def _error(out: Tensor, qkv: Tensor, lengths: tuple[int, ...]) -> float:
    """Largest relative error of a sequence; NaN, where there is none in the sequence, is infinite
    error."""
    worst, start = 0.0, 0
    for length in lengths:
        rows, start = slice(start, start + length), start + length
        q, k, v = qkv[rows].permute(1, 2, 0, 3).float()
        if not length or q.isnan().any():
            continue
        expected = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        error = (out[rows].float() - expected).norm() / expected.norm()
        worst = max(worst, error.nan_to_num(float("inf")).item())
    return worst


def _bound(heads: Heads) -> float:
    return 1e-4 if heads.dtype == torch.float32 else 2e-2


def _check(out: Tensor, qkv: Tensor, lengths: tuple[int, ...], heads: Heads, when: str) -> None:
    error, bound = _error(out, qkv, lengths), _bound(heads)
    if not error < bound:
        raise ArithmeticError(f"{when}, its error is {error:.2g}, above {bound:.2g}")
