"""Pictures to patches in torch, on any device: what transformers' processors do with torchvision.

On a CPU the resized bytes are theirs exactly. On a GPU torch resizes in floats: each direction is
rounded to bytes as on the CPU, and a value differs by two levels of 255 at most.
"""

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from vitgraph.graphs.media.settings import ImageSettings


def resize(picture: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Resample uint8 pixels [3, H, W] to uint8 [3, *size], with antialiasing.

    Args:
        mode: "bicubic", "bilinear" or "nearest".
    """
    if tuple(picture.shape[-2:]) == size:
        return picture
    pictures = picture[None]
    if mode == "nearest":
        return interpolate(pictures, size, mode=mode)[0]
    if picture.device.type == "cpu":
        return interpolate(pictures, size, mode=mode, antialias=True)[0]
    return resize_in_floats(pictures, size, mode)[0]


def resize_in_floats(pictures: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """uint8 [N, 3, H, W] resampled where torch cannot do it in bytes: columns, then rows."""
    for step in ((pictures.shape[-2], size[1]), size):
        pictures = interpolate(pictures.float(), step, mode=mode, antialias=True)
        pictures = pictures.round_().clamp_(0, 255).to(torch.uint8)
    return pictures


def to_patches(pair: Tensor, settings: ImageSettings) -> Tensor:
    """Two pictures [2, 3, h, w] as patches [h * w / patch_size**2, 3 * 2 * patch_size**2], in
    spatial-merge order."""
    patch, merge = settings.patch_size, settings.merge_size
    pictures, channels, height, width = pair.shape
    blocks = pair.reshape(
        pictures,
        channels,
        height // settings.factor,
        merge,
        patch,
        width // settings.factor,
        merge,
        patch,
    )
    return blocks.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(-1, channels * pictures * patch**2)


def normalise(patches: Tensor, settings: ImageSettings, dtype: torch.dtype) -> Tensor:
    """uint8 patches as the processor's floats, rounded once to `dtype`."""
    values = patches.float()
    if settings.do_normalize:
        scale = 1 / settings.rescale_factor if settings.do_rescale else 1.0
        mean, std = (
            (torch.tensor(numbers, device=patches.device) * scale).view(3, 1)
            for numbers in (settings.image_mean, settings.image_std)
        )
        values = values.view(len(patches), 3, -1).sub_(mean).div_(std).view(patches.shape)
    elif settings.do_rescale:
        values *= settings.rescale_factor
    return values.to(dtype)
