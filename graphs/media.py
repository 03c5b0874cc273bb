"""Image and video files to patches and grids, by transformers' own Qwen image processor on PIL.

A video's frames go through the same processor one by one, at the size its video processor would
choose for them together; two frames then share a temporal patch.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from vitgraph.encoder.checkpoint import open_checkpoint
from vitgraph.encoder.inputs import Grid

IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
VIDEO_SUFFIXES = {".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"}

# As published with Qwen3-VL, for use without a checkpoint.
_DEFAULTS = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}
_VIDEO_SIZE = {"shortest_edge": 4096, "longest_edge": 25165824}  # of all frames together
MIN_PIXELS = 32 * 32  # one token
FRAMES_PER_SECOND, MIN_FRAMES, MAX_FRAMES = 2.0, 4, 768


@dataclass(frozen=True)
class Media:
    """One item, ready to encode: its name, modality ("image" or "video"), patches and grid."""

    name: str
    modality: str
    pixel_values: Tensor  # [t * h * w, 1536]
    grid: Grid


class MediaLoader:
    """Read files with one processor.

    Args:
        model: checkpoint whose processor settings to use; Qwen3-VL's published values without.
        max_pixels: largest area of an image or of a video's frame; None leaves the processor's.
    """

    def __init__(self, model: str | Path | None = None, max_pixels: int | None = None) -> None:
        from transformers import Qwen2VLImageProcessorPil

        if max_pixels is not None and max_pixels < MIN_PIXELS:
            raise ValueError(f"max_pixels {max_pixels} is below one token, {MIN_PIXELS} pixels")
        image, video = None, None
        if model is not None:
            image, video = open_checkpoint(model).processor_settings()
        self.processor = (
            Qwen2VLImageProcessorPil.from_dict(image)
            if image is not None
            else Qwen2VLImageProcessorPil(**_DEFAULTS)
        )
        self.video_size = _VIDEO_SIZE | ((video or {}).get("size") or {})
        self.size = dict(self.processor.size)
        self.max_pixels = max_pixels
        if max_pixels is not None:
            self.size["longest_edge"] = max_pixels
            self.size["shortest_edge"] = min(self.size["shortest_edge"], max_pixels)

    def image(self, path: Path) -> Media:
        """Read one image file.

        Raises:
            ValueError: a file that is missing, truncated or no image, by name.
        """
        patches, grids = self._patches(path, [_open(path)], self.size)
        t, h, w = grids[0]
        return Media(str(path), "image", patches, (t, h, w))

    def video(self, path: Path) -> Media:
        """Read a video file (two frames a second, 4 to 768 in all) or a folder of frames.

        Raises:
            ValueError: what cannot be read, by name; PyAV missing for a video file.
        """
        frames = _frame_files(path) if path.is_dir() else _decode(path)
        if len(frames) % 2:
            frames = [*frames, frames[-1]]
        least, most = self.video_size["shortest_edge"], self.video_size["longest_edge"]
        size = {"shortest_edge": -(-least // len(frames)), "longest_edge": most // len(frames)}
        if self.max_pixels is not None:
            size = {edge: min(pixels, self.max_pixels) for edge, pixels in size.items()}
        patches, grids = self._patches(path, frames, size)
        # A lone frame fills both temporal slots of a patch; take one slot from each of a pair.
        slots = patches.view(len(frames), -1, 3, 2, self.processor.patch_size**2)
        pairs = torch.stack([slots[0::2, :, :, 0], slots[1::2, :, :, 1]], dim=3)
        grid = (len(frames) // 2, grids[0][1], grids[0][2])
        return Media(str(path), "video", pairs.reshape(-1, patches.shape[1]), grid)

    def load(self, path: Path) -> Media:
        """Read an image or a video, by suffix; a folder counts as the frames of a video."""
        if path.is_dir() or path.suffix.lower() in VIDEO_SUFFIXES:
            return self.video(path)
        return self.image(path)

    def _patches(
        self, path: Path, images: Sequence[Image.Image], size: dict[str, Any]
    ) -> tuple[Tensor, list[Grid]]:
        try:
            features = self.processor(images=list(images), size=size, return_tensors="pt")
        except ValueError as error:  # what the processor refuses: thinner than 1 to 200
            raise ValueError(f"{path}: {error}") from None
        return features["pixel_values"], features["image_grid_thw"].tolist()


def expand(paths: Iterable[Path], frame_folders: Iterable[Path] = ()) -> Iterator[Path]:
    """The files that `paths` name: folders give their images and videos, frame folders stay whole.

    Raises:
        ValueError: a folder without any image or video.
    """
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        known = IMAGE_SUFFIXES | VIDEO_SUFFIXES
        files = [file for file in sorted(path.iterdir()) if file.suffix.lower() in known]
        if not files:
            raise ValueError(f"{path} holds no image or video")
        yield from files
    yield from frame_folders


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, which "RGB" would clip at 255; of 32 where it holds no more than that."""
    values = np.asarray(image).astype(np.int64).clip(0, 65535)
    if image.mode == "I" and values.max(initial=0) < 256:
        return image
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            grey = upright.mode.startswith("I")
            return (_eight_bits(upright) if grey else upright).convert("RGB")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except UnidentifiedImageError:
        raise ValueError(f"{path}: not an image") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path}: {error}") from None


def _frame_files(folder: Path) -> list[Image.Image]:
    files = [file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES]
    files.sort(key=_by_number)
    if not files:
        raise ValueError(f"{folder} holds no frames")
    frames = [_open(file) for file in files]
    for file, frame in zip(files, frames, strict=True):
        if frame.size != frames[0].size:
            raise ValueError(f"{file}: a frame of {frame.size}, the first one has {frames[0].size}")
    return frames


def _decode(path: Path) -> list[Image.Image]:
    """Frames of a video file, evenly spaced."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        import av
    except ImportError:
        raise ValueError(f"{path}: video files need PyAV (pip install av)") from None
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            rate = float(stream.average_rate or 24)
            total = stream.frames or sum(1 for _ in container.decode(stream))
        wanted = int(total / rate * FRAMES_PER_SECOND)
        wanted = min(max(wanted, MIN_FRAMES), MAX_FRAMES, total)
        chosen = set(np.linspace(0, total - 1, wanted).round().astype(int).tolist())
        with av.open(str(path)) as container:
            decoded = enumerate(container.decode(container.streams.video[0]))
            # only the chosen frames become images: a minute of video would fill the memory
            frames = [frame.to_image() for index, frame in decoded if index in chosen]
    except (av.FFmpegError, IndexError, OSError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or 'no video'}") from None
    if not frames:
        raise ValueError(f"{path}: no frames")
    return frames


def _by_number(file: Path) -> list[tuple[int, str]]:
    """frame2 before frame10."""
    parts = re.split(r"(\d+)", file.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
