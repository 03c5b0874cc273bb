"""What a caller may hand in, checked before anything is launched."""

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitgraph.encoder.config import VisionConfig

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # the last for truth
LINEAR_DTYPES = ("same", "fp8")
Grid = tuple[int, int, int]
PLAIN = [int, int, int]


class Grids(list[Grid]):
    """Grids that have been checked: a list of (t, h, w) in patches, one an item, never changed."""

    @cached_property
    def num_patches(self) -> list[int]:
        """Patches of each item."""
        return [t * h * w for t, h, w in self]

    @cached_property
    def seqlens(self) -> tuple[int, ...]:
        """Length of every sequence: h*w, once a frame."""
        return tuple(h * w for t, h, w in self for _ in range(t))


def check_grids(grid_thw: Any, merge_size: int = 2) -> Grids:
    """Turn grids of any form into checked host integers.

    Args:
        grid_thw: [items, 3] of (t, h, w) in patches: a list, an array or a tensor on any device, of
            any integer type. A tensor on a GPU costs a synchronisation.
        merge_size: h and w must be multiples of it.

    Raises:
        ValueError: naming the item and the numbers at fault.
    """
    if isinstance(grid_thw, Grids):
        return grid_thw
    if isinstance(grid_thw, str | bytes):
        raise ValueError(f"grid_thw must be [items, 3], got {grid_thw!r:.100}")
    if isinstance(grid_thw, Tensor):
        dense = not grid_thw.is_nested and grid_thw.layout == torch.strided and not grid_thw.is_meta
        if grid_thw.dtype == torch.bool or not dense:
            raise ValueError(
                f"grid_thw must hold integers, got {grid_thw.dtype} on {grid_thw.device}"
            )
        grid_thw = grid_thw.tolist() if grid_thw.ndim else [grid_thw.item()]
    elif isinstance(grid_thw, np.ndarray):
        grid_thw = grid_thw.tolist()
    if not isinstance(grid_thw, Sequence):
        raise ValueError(f"grid_thw must be [items, 3], got {type(grid_thw).__name__}")
    grids = Grids()
    for item, grid in enumerate(grid_thw):
        if type(grid) not in (list, tuple) or [*map(type, grid)] != PLAIN:
            grid = _integers(item, grid)
        t, h, w = grid
        if t < 1 or h < 1 or w < 1:
            raise ValueError(f"item {item}: grid ({t}, {h}, {w}) must be positive")
        if h % merge_size or w % merge_size:
            raise ValueError(
                f"item {item}: h {h} and w {w} must be multiples of the merge size {merge_size}"
            )
        grids.append((t, h, w))
    return grids


def host_grids(grids: Sequence[Grid], slots: int, device: torch.device) -> Tensor:
    """Grids and empty slots on the host, int32 [slots, 3], for a copy to `device` without waiting.

    Pinned for a GPU: torch keeps such memory until the copy has been made. What becomes of pageable
    memory that is freed before then is for the driver to say, and a wrong grid is no small thing.
    """
    pinned = device.type == "cuda"
    tensor = torch.empty(slots, 3, dtype=torch.int32, device="cpu", pin_memory=pinned)
    values = tensor.numpy()  # several times faster than torch.tensor(grids)
    if grids:
        values[: len(grids)] = grids
    values[len(grids) :] = 0
    return tensor


def outlives(source: Tensor, device: torch.device) -> bool:
    """Whether a copy from `source` to `device` need not be waited for: torch or the caller keeps
    its memory, and what reads the copy is queued behind it, as nothing on the host is."""
    return device.type == "cuda" and (source.is_cuda or source.is_pinned())


def _integers(item: int, grid: Any) -> list[int]:
    """A grid of any form as three plain integers."""
    if isinstance(grid, Tensor | np.ndarray):
        grid = grid.tolist()
    if not isinstance(grid, Sequence) or isinstance(grid, str | bytes) or len(grid) != 3:
        raise ValueError(f"item {item}: a grid has 3 values (t, h, w), got {grid!r:.100}")
    values = []
    for value in grid:
        is_bool = isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) == torch.bool
        if is_bool or not hasattr(value, "__index__"):
            raise ValueError(f"item {item}: grid values must be integers, got {value!r:.100}")
        try:
            values.append(operator.index(value))
        except TypeError:
            raise ValueError(
                f"item {item}: grid values must be integers, got {value!r:.100}"
            ) from None
    return values


def check_pixels(pixel_values: Any, grids: Grids, patch_width: int) -> Tensor:
    """Check that `pixel_values` holds the patches the grids describe.

    Args:
        pixel_values: [patches, patch_width], floating point or uint8, on any device, contiguous or
            not.
        grids: of the same items, in the same order.
        patch_width: 1536 for Qwen3-VL.

    Raises:
        ValueError: naming the first item that does not fit and both numbers.
    """
    if isinstance(pixel_values, list | tuple):
        raise ValueError("pixel_values must be one tensor of all patches, got a list")
    try:
        # Not onto the default device, where torch would take tensors too.
        is_tensor = isinstance(pixel_values, Tensor)
        pixels = pixel_values if is_tensor else torch.as_tensor(pixel_values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"pixel_values is no tensor: {error!s:.200}") from None
    if pixels.is_nested:
        raise ValueError("pixel_values must be one tensor of all patches, got a nested tensor")
    if pixels.layout != torch.strided or pixels.is_meta:
        raise ValueError(f"pixel_values is {pixels.layout} on {pixels.device}, expected values")
    if pixels.ndim != 2 or pixels.shape[1] != patch_width:
        raise ValueError(
            f"pixel_values has shape {tuple(pixels.shape)}, expected [patches, {patch_width}]"
        )
    if not pixels.is_floating_point() and pixels.dtype != torch.uint8:
        raise ValueError(f"pixel_values has dtype {pixels.dtype}, expected floats or uint8")
    start = 0
    for item, patches in enumerate(grids.num_patches):
        if start + patches > pixels.shape[0]:
            raise ValueError(
                f"item {item} with grid {grids[item]} needs rows {start}..{start + patches - 1} of "
                f"pixel_values, which has {pixels.shape[0]}"
            )
        start += patches
    if start != pixels.shape[0]:
        last = f" (the last is item {len(grids) - 1})" if grids else ""
        raise ValueError(
            f"pixel_values has {pixels.shape[0]} rows, the grids of {len(grids)} items{last} "
            f"describe {start}"
        )
    return pixels


def check_channels(config: VisionConfig) -> None:
    """Bytes are normalised by three means and standard deviations."""
    if config.in_channels != 3:
        raise ValueError(f"uint8 pixels need in_channels 3, this encoder has {config.in_channels}")


def check_options(
    config: VisionConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    pixel_dtype: torch.dtype | None,
) -> None:
    """Check what an encoder is made with.

    Raises:
        ValueError: naming the option.
    """
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be a torch.dtype, got {dtype!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype} is none of {', '.join(map(str, DTYPES))}")
    if pixel_dtype not in (None, dtype, torch.uint8):
        raise ValueError(f"pixel_dtype {pixel_dtype} is neither {dtype} nor torch.uint8")
    if pixel_dtype == torch.uint8:
        check_channels(config)
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device}: torch sees no CUDA GPU")


def check_invariant(attention: str, ops: str) -> None:
    """Check that batches cannot change bits with these.

    Raises:
        ValueError: naming what is not ours.
    """
    if attention not in ("auto", "triton", "TRITON_ATTN") or ops == "torch":
        raise ValueError(
            f"batch_invariant has attention 'triton' and ops 'triton', not {attention!r} and "
            f"{ops!r}"
        )


def check_fp8(
    config: VisionConfig, linear_dtype: str, fp8_skip_blocks: int, batch_invariant: bool
) -> range:
    """The blocks that compute in FP8, by number.

    Raises:
        ValueError: naming the option.
    """
    if linear_dtype not in LINEAR_DTYPES:
        raise ValueError(f"linear_dtype {linear_dtype!r} is none of {', '.join(LINEAR_DTYPES)}")
    if type(fp8_skip_blocks) is not int or not 0 <= fp8_skip_blocks < config.depth:
        raise ValueError(
            f"fp8_skip_blocks {fp8_skip_blocks!r} must be an integer from 0 to {config.depth - 1}: "
            f"the tower has {config.depth} blocks"
        )
    if linear_dtype == "same":
        if fp8_skip_blocks:
            raise ValueError(
                f"fp8_skip_blocks {fp8_skip_blocks} goes with linear_dtype 'fp8', not 'same'"
            )
        return range(0)
    if batch_invariant:
        raise ValueError("batch_invariant has linear_dtype 'same', not 'fp8'")
    return range(fp8_skip_blocks, config.depth)
