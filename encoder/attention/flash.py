"""FlashAttention on packed sequences, from whichever package is installed and works on this GPU.

All read the offsets on the device. Their grids are sized by the longest sequence that the captured
capacity allows, and every sequence slot pays for that.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitgraph.encoder.attention.trial import (
    Attend,
    Build,
    Capability,
    Heads,
    guarded,
    try_out,
    what_is_lacking,
)
from vitgraph.kernels.layout import Layout

# (q, k, v [P, H, D], offsets [S + 1], longest) -> [P, H, D]
Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Package:
    """A package with a varlen FlashAttention.

    Attributes:
        name: what pip installs.
        module: what must be importable.
        load: imports it; its exceptions propagate.
    """

    name: str
    module: str
    load: Callable[[Heads], Varlen]


def load_vllm(heads: Heads) -> Varlen:
    """vLLM's own build: FlashAttention 3 on Hopper, 4 on Blackwell, else 2; the version is vLLM's
    choice, by flag or by itself."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    version = get_flash_attn_version(head_size=heads.dim)
    if version is None:
        raise ImportError("vLLM has no FlashAttention for this GPU")

    def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        return flash_attn_varlen_func(
            q,
            k,
            v,
            max_seqlen_q=longest,
            cu_seqlens_q=offsets,
            max_seqlen_k=longest,
            cu_seqlens_k=offsets,
            out=torch.empty(q.shape, dtype=q.dtype, device=q.device),
            # By default FlashAttention 3 divides the keys of long sequences, and what it makes of
            # the parts leaves those out whose sum is NaN: such an item would get numbers.
            num_splits=1,
            fa_version=version,
        )

    return attend


def load_sglang(heads: Heads) -> Varlen:
    """FlashAttention 3 of SGLang's kernels."""
    try:
        from sglang.kernels.ops.attention.flash_attention import flash_attn_varlen_func
    except ModuleNotFoundError:  # as late as 0.5.16
        from sglang.jit_kernel.flash_attention import flash_attn_varlen_func

    return _positional(flash_attn_varlen_func)


def load_fa3_fwd(heads: Heads) -> Varlen:
    """FlashAttention 3, forward only; its wheel has no fp16."""
    from fa3_fwd_interface import flash_attn_varlen_func

    return _positional(flash_attn_varlen_func)


def load_flash_attn(heads: Heads) -> Varlen:
    """FlashAttention 2."""
    from flash_attn import flash_attn_varlen_func

    return _positional(flash_attn_varlen_func)


def load_flash_attn_4(heads: Heads) -> Varlen:
    """FlashAttention 4; it returns the log-sum-exp too."""
    from flash_attn.cute import flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        result = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )
        return result[0] if isinstance(result, tuple) else result

    return attend


def load_torch(heads: Heads) -> Varlen:
    """torch's FlashAttention 2."""
    from torch.nn.attention.varlen import varlen_attn

    return _positional(varlen_attn)


def _positional(function: Callable[..., Any]) -> Varlen:
    def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        return function(q, k, v, offsets, offsets, longest, longest)

    return attend


# Tried in this order: what vLLM and SGLang would run, then by generation, torch's own last.
PACKAGES = (
    Package("vllm", "vllm", load_vllm),
    Package("sglang", "sglang", load_sglang),
    Package("fa3-fwd", "fa3_fwd_interface", load_fa3_fwd),
    Package("flash-attn-4", "flash_attn.cute", load_flash_attn_4),
    Package("flash-attn", "flash_attn.flash_attn_interface", load_flash_attn),
    Package("torch", "torch.nn.attention.varlen", load_torch),
)


@functools.cache
def load(package: Package, heads: Heads) -> Varlen:
    """Once: vLLM's choice of a version is to be what it was when the encoder was built."""
    return package.load(heads)


def build_with(package: Package) -> Build:
    """The backend on one package."""

    def build(layout: Layout, heads: Heads) -> Attend:
        varlen, offsets, longest = load(package, heads), layout.cu_seqlens, layout.max_seqlen

        def attend(qkv: Tensor) -> Tensor:
            q, k, v = qkv.unbind(1)
            return varlen(q, k, v, offsets, longest).flatten(1)

        return attend

    return build


@functools.cache
def probe(package: Package, heads: Heads, device: torch.device) -> Capability:
    """Whether a package serves; tried out once."""
    answer = functools.partial(Capability, "flash_attn", package.name)
    if reason := what_is_lacking(heads, device):
        return answer(False, reason)
    if not is_installed(package.module):
        return answer(False, "not installed")
    try:
        trial = try_out(build_with(package), heads, device)
    except torch.OutOfMemoryError:
        raise  # says nothing of the package, and must not be remembered
    except Exception as error:
        return answer(False, describe(error))
    return answer(True, "; ".join(trial.remarks), **trial.fields())


def capability(heads: Heads, device: torch.device) -> Capability:
    """The first package that serves, or why none does."""
    tried = []
    for package in PACKAGES:
        tried.append(probe(package, heads, device))
        if tried[-1].ok:
            return tried[-1]
    reasons = {one.reason for one in tried}
    reason = "; ".join(f"{one.package}: {one.reason}" for one in tried)
    return Capability("flash_attn", "-", False, reasons.pop() if len(reasons) == 1 else reason)


def flash_attn(layout: Layout, heads: Heads) -> Attend:
    """Attend with the first package that serves."""
    chosen = capability(heads, layout.cu_seqlens.device)
    if not chosen.ok:
        raise ValueError(f"attention backend 'flash_attn': {chosen.reason}")
    build = build_with(next(p for p in PACKAGES if p.name == chosen.package))
    return (guarded(build) if chosen.guard else build)(layout, heads)


def is_installed(module: str) -> bool:
    """Whether a module can be found. Its parents are imported; where that fails for another reason
    than their absence, the import reports it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        return error.name != module.split(".")[0]
    except Exception:
        return True


def describe(error: Exception) -> str:
    """One line for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"
