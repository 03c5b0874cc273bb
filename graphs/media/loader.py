"""Image and video files to patches and grids, as transformers' Qwen3-VL processors make them.

A video is decoded, sampled, turned and resized frame by frame: what it takes in memory is its
patches and one video frame.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitgraph.encoder.checkpoint import open_checkpoint
from vitgraph.encoder.inputs import Grid
from vitgraph.graphs.media.clips import Clip, animation, frame_folder, video_file
from vitgraph.graphs.media.files import is_picture, is_video
from vitgraph.graphs.media.patches import normalise, resize, to_patches
from vitgraph.graphs.media.pictures import read_picture
from vitgraph.graphs.media.settings import read_settings

MIN_PIXELS = 32 * 32  # one token


@dataclass(frozen=True)
class Media:
    """One item, ready to encode: its name, modality ("image" or "video"), patches and grid.

    `timestamps` are a video's, in seconds, one a frame of the grid (grid[0] of them), as the text
    prompt names them; empty for an image.
    """

    name: str
    modality: str
    pixel_values: Tensor  # [t * h * w, 1536]: floats, or uint8 before `MediaLoader.finish`
    grid: Grid
    timestamps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A decoded image, neither resized nor cut into patches yet."""

    name: str
    pixels: Tensor  # uint8 [H, W, 3]


class MediaLoader:
    """Read files as one checkpoint's processors would.

    Args:
        model: checkpoint whose processor settings to use; Qwen3-VL's published values without.
        max_pixels: largest area of an image or a video frame; None leaves the processor's.
        image, video: settings that replace the checkpoint's, by transformers' names: `fps`,
            `num_frames`, `max_frames`, `cap_pixels_per_frame`, `image_mean`, `size`, ...;
            `min_pixels` and `max_pixels` of a video count all its frames.
        device: where pictures are resized and cut into patches; floats come out there. A CPU's
            bytes are the processor's own, a GPU's differ by two levels of 255 at most.

    Raises:
        ValueError: a setting that does not exist or cannot be, by name.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        max_pixels: int | None = None,
        *,
        image: Mapping[str, Any] | None = None,
        video: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_pixels is not None and max_pixels < MIN_PIXELS:
            raise ValueError(f"max_pixels {max_pixels} is below one token, {MIN_PIXELS} pixels")
        checkpoint = open_checkpoint(model) if model is not None else None
        self.image_settings, self.video_settings = read_settings(checkpoint, image, video)
        self.max_pixels = max_pixels
        self.device = torch.device(device)
        if max_pixels is not None:
            least = min(self.image_settings.min_pixels, max_pixels)
            self.image_settings = replace(
                self.image_settings, min_pixels=least, max_pixels=max_pixels
            )

    def image(self, path: Path) -> Media:
        """Read one image file; an animation's first frame.

        Raises:
            ValueError: a file that is missing, truncated or no image, by name.
        """
        return self.finish(_picture(path))

    def video(self, path: Path) -> Media:
        """Read a video file, an animation, or a folder of frames.

        A folder's frames are all taken, as sampled already at `fps`.

        Raises:
            ValueError: what cannot be read, by name; PyAV missing for a video file.
        """
        return self.finish(self._video(path))

    def load(self, path: str | Path) -> Media:
        """Read an image or a video, by suffix; a folder counts as the frames of a video, and so
        does an animated picture.

        Raises:
            ValueError: what cannot be read, by name.
        """
        return self.finish(self.read(Path(path), whole=False))

    def read(self, path: Path, *, whole: bool = True) -> Media | Picture:
        """The first half of `load`, for another process: decoded, and cut into uint8 patches.

        Args:
            whole: False leaves an image as it was decoded.
        """
        if path.is_dir() or is_video(path):
            return self._video(path)
        if (clip := animation(path)) is not None:
            return self._video(path, clip)
        picture = _picture(path)
        return self._patches(picture) if whole else picture

    def finish(
        self,
        item: Media | Picture,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Media:
        """The second half of `load`: floats on a device, the loader's where none is named."""
        media = self._patches(item) if isinstance(item, Picture) else item
        settings = self.image_settings if media.modality == "image" else self.video_settings
        patches = media.pixel_values
        patches = patches.to(device or self.device, non_blocking=patches.is_pinned())
        return replace(media, pixel_values=normalise(patches, settings, dtype))

    def _patches(self, picture: Picture) -> Media:
        settings = self.image_settings
        pixels = picture.pixels
        if self.device.type != "cpu":  # asking what is pinned fails in a fork of a CUDA process
            pixels = pixels.to(self.device, non_blocking=pixels.is_pinned())
        height, width = _named(picture.name, settings.target, *pixels.shape[:2])
        frame = resize(pixels.permute(2, 0, 1), (height, width), settings.mode)
        patches = to_patches(frame.expand(2, -1, -1, -1), settings)
        grid = (1, height // settings.patch_size, width // settings.patch_size)
        return Media(picture.name, "image", patches, grid)

    def _video(self, path: Path, clip: Clip | None = None) -> Media:
        settings = self.video_settings
        if path.is_dir():
            clip = frame_folder(path, [file for file in path.iterdir() if is_picture(file)])
            indices, rate = range(clip.total), settings.fps
        else:
            clip = clip or (animation(path) if is_picture(path) else None) or video_file(path)
            indices, rate = settings.sample(clip.total, clip.rate).tolist(), clip.rate
        if (found := self._pairs(path, clip, indices)) is None:
            return self._video(path, video_file(path, count=True))
        return Media(str(path), "video", *found, settings.timestamps(indices, rate))

    def _pairs(self, path: Path, clip: Clip, indices: Sequence[int]) -> tuple[Tensor, Grid] | None:
        """Patches and grid of some video frames, two to a patch, an odd last one repeated;
        None where the clip ends before."""
        settings, last, first = self.video_settings, len(indices) - 1, None
        for place, frame in enumerate(clip.read(indices)):
            height, width = frame.shape[:2]
            if first is None:
                first = width, height
                target = _named(path, settings.target, height, width, last + 1, self.max_pixels)
                rows, columns = (side // settings.patch_size for side in target)
                grid = last // 2 + 1, rows, columns
                pair = torch.empty(2, 3, *target, dtype=torch.uint8, device=self.device)
                patches = pair.new_empty(grid[0], grid[1] * grid[2], 6 * settings.patch_size**2)
            if (width, height) != first:
                label = clip.label(indices[place])
                raise ValueError(
                    f"{label}: a frame of {(width, height)}, the first one has {first}"
                )
            pixels = torch.from_numpy(frame).to(self.device).permute(2, 0, 1)
            pair[place % 2] = resize(pixels, target, settings.mode)
            if place == last and not place % 2:
                pair[1] = pair[0]
            if place == last or place % 2:
                patches[place // 2] = to_patches(pair, settings)
        return (patches.flatten(0, 1), grid) if first and place == last else None


def _picture(path: Path) -> Picture:
    return Picture(str(path), torch.from_numpy(read_picture(path)))


def _named(path: object, call: Callable[..., tuple[int, int]], *arguments: Any) -> tuple[int, int]:
    try:
        return call(*arguments)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
