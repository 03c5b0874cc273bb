"""Video frames of files, animations and folders, one in memory at a time."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitgraph.graphs.media.pictures import (
    PICTURE_ERRORS,
    is_animation,
    open_picture,
    read_picture,
    upright,
)

_UNTOLD_SECONDS = 0.1  # how long browsers show an animation's frame that does not say
Frames = Iterator[np.ndarray]


@dataclass(frozen=True)
class Clip:
    """Video frames that are there to be sampled.

    Attributes:
        total: how many.
        rate: a second; None where nobody knows.
        read: the frames of ascending indices, RGB bytes [H, W, 3]; may end early where the file
            holds fewer than `total`.
        label: what a message calls the frame of an index.
    """

    total: int
    rate: float | None
    read: Callable[[Sequence[int]], Frames]
    label: Callable[[int], str]


def frame_folder(folder: Path, files: Sequence[Path]) -> Clip:
    """Picture files as the frames of one clip, in the order of the numbers in their names.

    Raises:
        ValueError: no files.
    """
    if not files:
        raise ValueError(f"{folder} holds no frames")
    files = sorted(files, key=_by_number)
    return Clip(
        len(files),
        None,
        lambda indices: (read_picture(files[index]) for index in indices),
        lambda index: str(files[index]),
    )


def animation(path: Path) -> Clip | None:
    """A picture file that moves, at its mean rate; None for one that does not."""
    with open_picture(path) as image:
        try:
            if not is_animation(image):
                return None
            frames, seconds = getattr(image, "n_frames", 1), 0.0
            for frame in range(frames):
                image.seek(frame)
                image.load()  # WebP tells a frame's time no sooner
                seconds += (image.info.get("duration") or 0) / 1000 or _UNTOLD_SECONDS
        except PICTURE_ERRORS as error:
            raise ValueError(f"{path}: {error}") from None
    read = partial(_read_animation, path)
    return Clip(frames, frames / seconds, read, lambda index: f"{path}: frame {index}")


def video_file(path: Path, *, count: bool = False) -> Clip:
    """A video file as PyAV decodes it, turned by its display matrix.

    Args:
        count: decode it to count its frames, whatever its header says.

    Raises:
        ValueError: a file that is missing or no video, by name; PyAV missing.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        import av
    except ImportError:
        raise ValueError(f"{path}: video files need PyAV (pip install av)") from None
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            rate = float(stream.average_rate) if stream.average_rate else None
            total = 0 if count else stream.frames
            total = total or sum(1 for _ in container.decode(stream))
    except (av.FFmpegError, IndexError, OSError) as error:
        raise ValueError(f"{path}: {_reason(error)}") from None
    if not total:
        raise ValueError(f"{path}: no frames")
    read = partial(_read_video, path)
    return Clip(total, rate, read, lambda index: f"{path}: frame {index}")


def _read_video(path: Path, indices: Sequence[int]) -> Frames:
    import av

    wanted = iter(indices)
    index = next(wanted, None)
    rotation, matrix = None, None
    try:
        with av.open(str(path)) as container:
            for position, frame in enumerate(container.decode(container.streams.video[0])):
                if index is None:
                    return
                if position != index:
                    continue
                # The matrix comes with a reference cycle that keeps a frame until the next garbage
                # collection; it is read again only where the angle has changed.
                if frame.rotation != rotation:
                    rotation, matrix = frame.rotation, _display_matrix(frame)
                pixels = _turned(frame.to_ndarray(format="rgb24"), matrix)
                while index == position:  # more frames may be asked for than there are
                    yield pixels
                    index = next(wanted, None)
    except (av.FFmpegError, OSError) as error:
        raise ValueError(f"{path}: {_reason(error)}") from None


def _display_matrix(frame: Any) -> np.ndarray | None:
    """How a player turns the frame: nine numbers, row by row, x' = a x + c y, y' = b x + d y."""
    data = frame.side_data.get("DISPLAYMATRIX")
    return None if data is None else np.frombuffer(bytes(data), np.int32)[[0, 1, 3, 4]]


def _turned(pixels: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
    """Turned and mirrored by the nearest right angle."""
    if matrix is None:
        return pixels
    a, b, c, d = matrix.tolist()
    if abs(b) > abs(a):
        pixels, (a, d) = pixels.swapaxes(0, 1), (c, b)
    return np.ascontiguousarray(pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])


def _read_animation(path: Path, indices: Sequence[int]) -> Frames:
    with open_picture(path) as image:
        for index in indices:
            try:
                image.seek(index)
                yield upright(image)
            except PICTURE_ERRORS as error:
                raise ValueError(f"{path}: {error}") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or "no video"


def _by_number(file: Path) -> list[tuple[int, str]]:
    """frame2 before frame10."""
    parts = re.split(r"(\d+)", file.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
