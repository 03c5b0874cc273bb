"""Everything the forward pass derives from the grids: offsets of the sequences, coordinates of the
patches.

An item with grid (t, h, w) owns t*h*w consecutive patches. Its t frames are t sequences of h*w
patches; inside a frame patches come in spatial-merge order: blocks of merge x merge patches, blocks
row by row, patches of a block row by row. (The order Qwen2-VL's image processor writes;
transformers' Qwen3VLVisionModel assumes it.)

Legend: I item slots, P patch capacity, S sequence capacity.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vitgraph.kernels.launch import cdiv

BLOCK = 256  # patches, and sequences, of one program
MAX_SLOTS = 1024  # each program holds all of them; above, the reference serves


@dataclass(frozen=True)
class Layout:
    """Where the real rows of a batch are. All tensors live on the device and none is read by the
    host.

    Attributes:
        num_patches: int32 [1], real rows of the patch dimension.
        num_tokens: int32 [1], real output rows, num_patches / merge_size**2.
        num_sequences: int32 [1], real sequences (frames).
        cu_seqlens: int32 [S + 1], start of each sequence; entries past the last sequence equal
            num_patches.
        coords: int32 [P, 4], (row, col, h, w) of each patch; rows past num_patches hold no meaning.
        max_seqlen: upper bound of a sequence's length, known to the host when the forward is
            launched or captured.
        seqlens: lengths of the sequences on the host, or None where the host does not know them
            (captured graphs).
    """

    num_patches: Tensor
    num_tokens: Tensor
    num_sequences: Tensor
    cu_seqlens: Tensor
    coords: Tensor
    max_seqlen: int
    seqlens: tuple[int, ...] | None = None


@triton.jit
def slot_of(ends, index, LEVELS: tl.constexpr):
    """First slot whose end is above `index`, by bisection; the last slot where there is none."""
    slot = tl.zeros_like(index)
    for level in tl.static_range(LEVELS):
        higher = slot + (1 << (LEVELS - 1 - level))
        slot = tl.where(tl.gather(ends, higher - 1, axis=0) <= index, higher, slot)
    return slot


@triton.jit(do_not_specialize=["num_slots", "max_patches", "max_sequences"])
def layout_kernel(
    grid_ptr,
    num_patches_ptr,
    num_tokens_ptr,
    num_sequences_ptr,
    cu_seqlens_ptr,
    coords_ptr,
    num_slots,
    max_patches,
    max_sequences,
    MERGE: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Every program scans all slots: a few hundred integers, cheaper than a second launch.
    slot = tl.arange(0, 1 << LEVELS)
    used = slot < num_slots
    frames = tl.load(grid_ptr + slot * 3, mask=used, other=0).to(tl.int32)
    height = tl.load(grid_ptr + slot * 3 + 1, mask=used, other=0).to(tl.int32)
    width = tl.load(grid_ptr + slot * 3 + 2, mask=used, other=0).to(tl.int32)
    patches = frames * height * width
    item_end = tl.cumsum(patches, axis=0)
    item_start = item_end - patches
    # Never above the capacity, whatever the grids say: what reads the offsets relies on that.
    total = tl.minimum(tl.sum(patches, axis=0), max_patches)

    first = tl.program_id(0) * BLOCK
    index = first + tl.arange(0, BLOCK)
    if first == 0:
        tl.store(num_patches_ptr, total)
        tl.store(num_tokens_ptr, total // (MERGE * MERGE))
        tl.store(num_sequences_ptr, tl.minimum(tl.sum(frames, axis=0), max_sequences))

    if first < total:
        item = slot_of(item_end, index, LEVELS)
        h = tl.gather(height, item, axis=0)
        w = tl.gather(width, item, axis=0)
        # max: lanes past the end look up the last slot, which may be empty
        within_frame = (index - tl.gather(item_start, item, axis=0)) % tl.maximum(h * w, 1)
        block = within_frame // (MERGE * MERGE)
        inside = within_frame % (MERGE * MERGE)
        blocks_per_row = tl.maximum(w // MERGE, 1)
        row = block // blocks_per_row * MERGE + inside // MERGE
        col = block % blocks_per_row * MERGE + inside % MERGE
        coords = tl.reshape(tl.join(tl.join(row, h), tl.join(col, w)), (BLOCK, 4))
        real = (index < total) & (index < max_patches)
        lane = tl.arange(0, 4)[None, :]
        tl.store(coords_ptr + index.to(tl.int64)[:, None] * 4 + lane, coords, mask=real[:, None])

    if first <= max_sequences:
        frame_end = tl.cumsum(frames, axis=0)
        item = slot_of(frame_end, index, LEVELS)
        frame = index - tl.gather(frame_end - frames, item, axis=0)
        frame_patches = tl.gather(height * width, item, axis=0)
        start = tl.gather(item_start, item, axis=0) + frame * frame_patches
        start = tl.where(index < tl.sum(frames, axis=0), tl.minimum(start, total), total)
        tl.store(cu_seqlens_ptr + index, start, mask=index <= max_sequences)


def layout(
    grid_thw: Tensor,  # [I, 3]
    num_patches: int,
    max_sequences: int,
    merge_size: int = 2,
    seqlens: tuple[int, ...] | None = None,
) -> Layout:
    """`layout_reference` as one kernel, compiled twice: for up to 64 slots and for up to MAX_SLOTS.
    A scan of more would not fit the registers, and runs in torch."""
    if not grid_thw.is_contiguous():
        raise ValueError(f"layout: grid_thw must be contiguous, strides are {grid_thw.stride()}")
    num_slots = grid_thw.shape[0]
    if num_slots > MAX_SLOTS:
        return layout_reference(grid_thw, num_patches, max_sequences, merge_size, seqlens)
    # 16 bytes apart: a kernel is compiled again for a pointer that is less aligned.
    counts = torch.empty(3, 4, dtype=torch.int32, device=grid_thw.device)[:, :1].unbind()
    cu_seqlens = torch.empty(max_sequences + 1, dtype=torch.int32, device=grid_thw.device)
    coords = torch.empty(num_patches, 4, dtype=torch.int32, device=grid_thw.device)
    layout_kernel[(cdiv(max(num_patches, max_sequences + 1), BLOCK),)](
        grid_thw,
        *counts,
        cu_seqlens,
        coords,
        num_slots,
        num_patches,
        max_sequences,
        MERGE=merge_size,
        LEVELS=6 if num_slots <= 64 else MAX_SLOTS.bit_length() - 1,
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return Layout(
        *counts,
        cu_seqlens=cu_seqlens,
        coords=coords,
        max_seqlen=max(seqlens, default=0) if seqlens is not None else num_patches,
        seqlens=seqlens,
    )


def layout_reference(
    grid_thw: Tensor,  # [I, 3]
    num_patches: int,
    max_sequences: int,
    merge_size: int = 2,
    seqlens: tuple[int, ...] | None = None,
) -> Layout:
    """Derive the `Layout` of a batch from its grids, without any host read.

    Args:
        grid_thw: integer [I, 3], (t, h, w) of each item; unused slots hold zeros and may stand
            anywhere.
        num_patches: capacity P; the grids must not describe more patches than this.
        max_sequences: capacity S; the grids must not describe more frames than this.
        merge_size: side of the square of patches that becomes one token.
        seqlens: host copy of the sequence lengths, if the caller has one.
    """
    grid_thw = F.pad(grid_thw, (0, 0, 0, 1))  # an empty slot, so that no items need no special case
    frames, height, width = grid_thw.long().unbind(1)
    frame_patches = height * width
    item_end = (frames * frame_patches).cumsum(0)
    item_start = item_end - frames * frame_patches
    frame_end = frames.cumsum(0)
    total = item_end[-1:].clamp(max=num_patches)

    patch = torch.arange(num_patches, device=grid_thw.device)
    last_slot = grid_thw.shape[0] - 1
    item = torch.searchsorted(item_end, patch, right=True).clamp(max=last_slot)
    within_frame = (patch - item_start[item]) % frame_patches[item].clamp(min=1)
    block, inside = within_frame // merge_size**2, within_frame % merge_size**2
    blocks_per_row = (width[item] // merge_size).clamp(min=1)
    row = block // blocks_per_row * merge_size + inside // merge_size
    col = block % blocks_per_row * merge_size + inside % merge_size
    coords = torch.stack([row, col, height[item], width[item]], dim=1)

    sequence = torch.arange(max_sequences + 1, device=grid_thw.device)
    item = torch.searchsorted(frame_end, sequence, right=True).clamp(max=last_slot)
    frame = sequence - (frame_end[item] - frames[item])
    cu_seqlens = torch.minimum(item_start[item] + frame * frame_patches[item], total)
    cu_seqlens = torch.where(sequence >= frame_end[-1:], total, cu_seqlens)

    return Layout(
        num_patches=total.int(),
        num_tokens=(total // merge_size**2).int(),
        num_sequences=frame_end[-1:].clamp(max=max_sequences).int(),
        cu_seqlens=cu_seqlens.int(),
        coords=coords.int(),
        max_seqlen=max(seqlens, default=0) if seqlens is not None else num_patches,
        seqlens=seqlens,
    )
