"""FlashInfer's varlen prefill on cuDNN: no length is read on the host, nothing is compiled by nvcc.

cuDNN wants the start of each sequence in elements of each tensor, and its length. It builds a plan
for each number of slots and each greatest length, which takes tens of milliseconds; both are
rounded up, so that there are few of them.
"""

import functools

import torch
from torch import Tensor

from vitgraph.encoder.attention.flash import describe, is_installed
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

WORKSPACE_BYTES = 128 << 20  # what FlashInfer documents as enough
MIN_SLOTS, MIN_LENGTH = 8, 1024
PACKAGES = {"flashinfer": "flashinfer-python", "cudnn": "nvidia-cudnn-frontend"}  # by module


def build(layout: Layout, heads: Heads, copies: bool = False) -> Attend:
    """Offsets and workspace once per forward; inside a capture they live in the graph's pool.

    Args:
        copies: hand q and k over contiguous, for a cuDNN that cannot read them from qkv.

    Raises:
        ValueError: more rows than int32 offsets in elements can reach.
    """
    from flashinfer.prefill import cudnn_batch_prefill_with_kv_cache

    offsets, num_patches = layout.cu_seqlens, layout.coords.shape[0]
    width = heads.count * heads.dim
    most = (2**31 - 1) // (3 * width)
    if num_patches > most:
        raise ValueError(
            f"attention backend 'flashinfer' reaches {most} rows of {heads.count} heads of "
            f"{heads.dim} with int32 offsets, got {num_patches}"
        )
    num_sequences = offsets.shape[0] - 1
    # FlashInfer up to 0.6 finds plans by shape but not by strides: ours must differ in shape from
    # each other, and from those of vLLM's own tower, which has multiples of 8 and other strides.
    slots = _round_up(num_sequences, MIN_SLOTS) + 1 + copies
    padded = torch.cat([offsets, offsets[-1:].expand(slots - num_sequences)])
    lengths = padded.diff().view(-1, 1, 1, 1)
    in_qkv, in_out = ((padded * n).view(-1, 1, 1, 1) for n in (3 * width, width))
    in_qk = in_out if copies else in_qkv
    longest = _round_up(layout.max_seqlen, MIN_LENGTH)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=offsets.device)

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unbind(1)
        if copies:
            q, k = q.contiguous(), k.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        cudnn_batch_prefill_with_kv_cache(
            q,
            k,
            v,
            heads.dim**-0.5,
            workspace,
            max_token_per_sequence=longest,
            max_sequence_kv=longest,
            actual_seq_lens_q=lengths,
            actual_seq_lens_kv=lengths,
            causal=False,
            return_lse=False,
            batch_offsets_q=in_qk,
            batch_offsets_k=in_qk,
            batch_offsets_v=in_qkv,
            batch_offsets_o=in_out,
            out=out,
        )
        return out.flatten(1)

    return attend


@functools.cache
def serving(heads: Heads, device: torch.device) -> tuple[Capability, Build]:
    """Whether FlashInfer serves, and how; tried out once."""
    answer = functools.partial(Capability, "flashinfer", "flashinfer-python")
    if reason := what_is_lacking(heads, device):
        return answer(False, reason), build
    for module, package in PACKAGES.items():
        if not is_installed(module):
            return answer(False, f"{package} is not installed"), build
    errors = []
    for copies in (False, True):
        way = functools.partial(build, copies=copies)
        try:
            trial = try_out(way, heads, device)
        except torch.OutOfMemoryError:
            raise  # says nothing of the library, and must not be remembered
        except Exception as error:
            errors.append(describe(error))
            continue
        remarks = ["q and k are copied"] if copies else []
        reason = "; ".join([*remarks, *trial.remarks])
        return answer(True, reason, **trial.fields()), way
    return answer(False, "; ".join(dict.fromkeys(errors))), build


def flashinfer(layout: Layout, heads: Heads) -> Attend:
    """Attend with FlashInfer."""
    chosen, way = serving(heads, layout.cu_seqlens.device)
    if not chosen.ok:
        raise ValueError(f"attention backend 'flashinfer': {chosen.reason}")
    return (guarded(way) if chosen.guard else way)(layout, heads)


def _round_up(number: int, least: int) -> int:
    """The next power of two."""
    return max(least, 1 << (max(number, 1) - 1).bit_length())
