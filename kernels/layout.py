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
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the real rows of a batch are. All tensors live on the device and none is read by the
    host.

    Attributes:
        num_patches: int32 [1], real rows of the patch dimension.
        num_tokens: int32 [1], real output rows, num_patches / merge_size**2.
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
    cu_seqlens: Tensor
    coords: Tensor
    max_seqlen: int
    seqlens: tuple[int, ...] | None = None


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
    frames, height, width = grid_thw.long().unbind(1)
    frame_patches = height * width
    item_end = (frames * frame_patches).cumsum(0)
    item_start = item_end - frames * frame_patches
    frame_end = frames.cumsum(0)
    total = item_end[-1:]

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
        cu_seqlens=cu_seqlens.int(),
        coords=coords.int(),
        max_seqlen=max(seqlens, default=0) if seqlens is not None else num_patches,
        seqlens=seqlens,
    )
