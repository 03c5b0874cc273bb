"""Inputs of an attention backend, and the check of a library before it is used.

A library is called on a small pack with garbage around it, eagerly and from a captured graph whose
offsets change between capture and replay. What it answers is compared with float32.

FlashAttention 3 and 4 load the values of whole key tiles, so a NaN in the rows behind a sequence,
which are its neighbour's, reaches it. What does not isolate sequences by itself is tried again
behind a guard that lets no such value be read; `auto` chooses only what isolates, with it or
without.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitgraph.kernels.isolate import isolate
from vitgraph.kernels.launch import on_device
from vitgraph.kernels.layout import Layout

Attend = Callable[[Tensor], Tensor]  # qkv [P, 3, H, D] -> [P, H * D]
TAIL = 256  # rows; no library has taller key tiles
LEAKS = "a NaN does not stay in its item"
GUARDED = "values are checked first, so that a NaN stays in its item"
ROWS, SLOTS = 640, 8
LENGTHS = (40, 300, 4, 0, 129)
REPLAYED = (8, 1, 520)
POISONS = tuple(itertools.product("qkv", ("nan", "inf")))


@dataclass(frozen=True)
class Heads:
    """What attention needs to know of a tower."""

    count: int
    dim: int
    dtype: torch.dtype


Build = Callable[[Layout, Heads], Attend]


def what_is_lacking(heads: Heads, device: torch.device) -> str | None:
    """What every library needs and this lacks, or None."""
    if device.type != "cuda":
        return f"needs CUDA, not {device.type}"
    if heads.dtype not in (torch.float16, torch.bfloat16):
        return f"needs bf16 or fp16, not {heads.dtype}"
    return None


@dataclass(frozen=True)
class Capability:
    """Whether a backend serves heads on a device.

    Attributes:
        backend: "triton", "flash_attn", "flashinfer" or "sdpa".
        package: the package that computes.
        ok: it serves.
        reason: why it does not, or what to know about it.
        capturable: no length is read on the host.
        guard: it is to be called through `guarded`.
        isolates: a NaN stays in its sequence, with the guard where there is one.
    """

    backend: str
    package: str
    ok: bool
    reason: str = ""
    capturable: bool = True
    guard: bool = False
    isolates: bool = True


class Trial(NamedTuple):
    """What `try_out` found.

    Attributes:
        guard: the backend is to be called through `guarded`.
        leak: how a NaN gets out of its sequence, with the guard where there is one; None if it does
            not.
    """

    guard: bool
    leak: str | None = None

    @property
    def remarks(self) -> list[str]:
        """For a person, what to know about it."""
        return [GUARDED] * self.guard + [f"{LEAKS} ({self.leak})"] * (self.leak is not None)

    def fields(self) -> dict[str, bool]:
        """Of `Capability`."""
        return {"guard": self.guard, "isolates": self.leak is None}


def guarded(build: Build) -> Build:
    """`build`, on qkv whose values are all finite: see kernels/isolate.py."""

    def build_guarded(layout: Layout, heads: Heads) -> Attend:
        attend = build(layout, heads)

        def attend_guarded(qkv: Tensor) -> Tensor:
            return attend(isolate(qkv, layout.num_patches, TAIL))

        return attend_guarded

    return build_guarded


def try_out(build: Build, heads: Heads, device: torch.device) -> Trial:
    """Whether `build` computes what it should, needs `guarded`, and isolates sequences then.

    Raises:
        Exception: whatever the library raises.
        ArithmeticError: wrong results, saying by how much.
    """
    with torch.inference_mode(), on_device(device):
        rng = torch.Generator(device).manual_seed(0)
        shape = ROWS, 3, heads.count, heads.dim
        qkv = torch.randn(shape, generator=rng, device=device, dtype=torch.float32)
        qkv = qkv.to(heads.dtype)
        inputs = _inputs(qkv, LENGTHS)
        outs = _eagerly(build, heads, inputs)
        guard = not _error(outs[0], qkv, LENGTHS) < _bound(heads) or bool(_leak(outs, LENGTHS))
        if guard:
            build = guarded(build)
            outs = _eagerly(build, heads, inputs)
        _check(outs[0], qkv, LENGTHS, heads, "eagerly")
        leak = _leak(outs, LENGTHS)
        if device.type == "cuda":
            outs = _replayed(build, heads, _inputs(qkv, REPLAYED))
            _check(outs[0], qkv, REPLAYED, heads, "replayed")
            leak = leak or _leak(outs, REPLAYED, "replayed, ")
    return Trial(guard, leak)


def _inputs(qkv: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """NaN behind the last sequence; then also each of POISONS in sequence 1."""
    clean = qkv.clone()
    clean[sum(lengths) :] = float("nan")
    poisoned = []
    for part, value in POISONS:
        poisoned.append(clean.clone())
        poisoned[-1][lengths[0] : sum(lengths[:2]), "qkv".index(part)] = float(value)
    return [clean, *poisoned]


def _leak(outs: list[Tensor], lengths: tuple[int, ...], when: str = "") -> str | None:
    """None if what poisons sequence 1 is in all of its rows, and the others are as they were
    without, to the bit; else what went wrong."""
    start, end, total = lengths[0], sum(lengths[:2]), sum(lengths)
    others = torch.cat([torch.arange(start), torch.arange(end, total)]).to(outs[0].device)
    clean = outs[0][others]
    for (part, value), out in zip(POISONS, outs[1:], strict=True):
        if not torch.equal(out[others], clean):
            lost = "changes others" if out[others].isfinite().all() else "reaches others"
            return f"{when}{value} in {part} {lost}"
        if out[start:end].isfinite().any():
            return f"{when}{value} in {part} is lost in some of its own rows"
    return None


def _eagerly(build: Build, heads: Heads, inputs: list[Tensor]) -> list[Tensor]:
    attend = build(_layout(LENGTHS, inputs[0].device), heads)
    return [attend(qkv.clone()).clone() for qkv in inputs]


def _replayed(build: Build, heads: Heads, inputs: list[Tensor]) -> list[Tensor]:
    """Captured for one layout, replayed for another; a second stream, as capture wants it."""
    qkv = inputs[0].clone()
    layout, other = _layout(LENGTHS, qkv.device), _layout(REPLAYED, qkv.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    results = []
    try:
        with torch.cuda.stream(stream):
            build(layout, heads)(qkv)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = build(layout, heads)(qkv)
            layout.cu_seqlens.copy_(other.cu_seqlens)
            layout.num_patches.copy_(other.num_patches)
            for one in inputs:
                qkv.copy_(one)
                out.fill_(float("nan"))
                graph.replay()
                results.append(out.clone())
    finally:  # also where a library raised: what it launched may still write
        torch.cuda.current_stream().wait_stream(stream)
    stream.synchronize()
    return results


def _layout(lengths: tuple[int, ...], device: torch.device) -> Layout:
    offsets = [0, *itertools.accumulate((*lengths, *[0] * (SLOTS - len(lengths))))]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    coords = torch.zeros(ROWS, 4, dtype=torch.int32, device=device)
    total = cu_seqlens[-1:].clone()
    slots = torch.full_like(total, SLOTS)
    return Layout(total, total // 4, slots, cu_seqlens, coords, max_seqlen=ROWS)


def _error(out: Tensor, qkv: Tensor, lengths: tuple[int, ...]) -> float:
    """Largest relative error of a sequence; infinite where it is NaN."""
    worst, start = 0.0, 0
    for length in lengths:
        rows, start = slice(start, start + length), start + length
        q, k, v = qkv[rows].permute(1, 2, 0, 3).float()
        if not length:
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
