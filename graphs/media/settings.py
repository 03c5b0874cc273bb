"""What transformers' image and video processors of Qwen3-VL are told, and the sizes and video
frames that follow from it.

Their size rules (`smart_resize`) and defaults are used as they are installed; the per-frame cap and
the sampling rule are `Qwen3VLVideoProcessor`'s, which itself cannot be built without torchvision.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from vitgraph.encoder.checkpoint import Checkpoint

# As published with Qwen3-VL, for use without a checkpoint.
_PUBLISHED = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_PUBLISHED_IMAGE = _PUBLISHED | {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
_PUBLISHED_VIDEO = _PUBLISHED | {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}
UNKNOWN_RATE = 24.0  # frames a second, where a video does not say
_MODES = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers


@dataclass(frozen=True)
class ImageSettings:
    """Settings of an image processor, under transformers' names; `size` is min and max_pixels."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    rescale_factor: float
    resample: int
    do_resize: bool
    do_rescale: bool
    do_normalize: bool

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "min_pixels", "max_pixels"):
            _require_count(name, getattr(self, name))
        if self.temporal_patch_size != 2:
            raise ValueError(f"temporal_patch_size {self.temporal_patch_size} is not 2")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        for name, least in (("image_mean", -math.inf), ("image_std", 0.0)):
            values = getattr(self, name)
            if len(values) != 3 or not all(least < value < math.inf for value in values):
                raise ValueError(f"{name} {list(values)} are not three numbers above {least:g}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool and not isinstance(value, bool):  # "false" would be true
                raise ValueError(f"{field.name} {value!r} is neither true nor false")
        scale = self.rescale_factor
        if not _is_number(scale) or not 0 < scale < math.inf:
            raise ValueError(f"rescale_factor {scale!r} is no positive number")
        if self.resample not in _MODES:
            raise ValueError(f"resample {self.resample} is none of {_MODES}")

    @classmethod
    def of(cls, stored: Mapping[str, Any], given: Mapping[str, Any]) -> Self:
        """From a processor's file, then what was asked for; what neither has is transformers' own.

        Raises:
            ValueError: an unknown name in `given`, or a value that cannot be.
        """
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in given if name not in (*names, "size")]:
            raise ValueError(f"no setting {unknown[0]!r}; there are {', '.join(names)}, size")
        values = cls._defaults()
        for source in (cls._read(stored), given):
            values |= {
                k: v for k, v in source.items() if k in names and (v is not None or k in _NO)
            }
            values |= cls._edges(source)
        try:
            values |= {k: tuple(map(float, values[k])) for k in ("image_mean", "image_std")}
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"processor settings: {error}") from None

    @staticmethod
    def _read(stored: Mapping[str, Any]) -> Mapping[str, Any]:
        return stored

    @staticmethod
    def _edges(source: Mapping[str, Any]) -> dict[str, Any]:
        """`size`, unless the pixels themselves are given."""
        size = source.get("size") or {}
        if not isinstance(size, Mapping):
            raise ValueError(f"size {size!r} has no shortest_edge and longest_edge")
        found = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        found = {k: source[k] if source.get(k) is not None else v for k, v in found.items()}
        return {k: v for k, v in found.items() if v is not None}

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        try:
            from transformers import Qwen2VLImageProcessorPil as Processor
        except ImportError as error:  # a torchvision of another build than torch, say
            raise ValueError(f"transformers' image processor cannot be imported: {error}") from None
        return _attributes(cls, Processor)

    @property
    def factor(self) -> int:
        """What the sides of a picture are multiples of."""
        return self.patch_size * self.merge_size

    @property
    def mode(self) -> str:
        """`resample` under torch's name."""
        return _MODES[self.resample]

    def target(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that a picture is resized to.

        Raises:
            ValueError: a picture thinner than 1 to 200, or one that may not be resized and must.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        if not self.do_resize:
            return self._as_it_is(height, width)
        return smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)

    def _as_it_is(self, height: int, width: int) -> tuple[int, int]:
        if height % self.factor or width % self.factor:
            raise ValueError(
                f"{width}x{height} are no multiples of {self.factor}; do_resize is off"
            )
        return height, width


@dataclass(frozen=True)
class VideoSettings(ImageSettings):
    """Settings of the video processor; min and max_pixels are of all video frames together."""

    fps: float | None
    num_frames: int | None
    min_frames: int
    max_frames: int
    do_sample_frames: bool
    cap_pixels_per_frame: bool
    max_video_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("min_frames", "max_frames", "max_video_tokens"):
            _require_count(name, getattr(self, name))
        if self.num_frames is not None:
            _require_count("num_frames", self.num_frames)
        if self.fps is not None and not (_is_number(self.fps) and 0 < self.fps < math.inf):
            raise ValueError(f"fps {self.fps!r} is no positive number")
        if self.min_frames > self.max_frames:
            raise ValueError(f"min_frames {self.min_frames} is above max_frames {self.max_frames}")

    @classmethod
    def of(cls, stored: Mapping[str, Any], given: Mapping[str, Any]) -> Self:
        """As for images; frames are counted by `num_frames` where it is set, else by `fps`."""
        if given.get("num_frames") is not None:
            if given.get("fps") is not None:
                raise ValueError(
                    f"fps {given['fps']} and num_frames {given['num_frames']}: one only"
                )
            given = {**given, "fps": None}
        elif given.get("fps") is not None:
            given = {**given, "num_frames": None}
        return super().of(stored, given)

    @staticmethod
    def _read(stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Qwen3-VL's video processor goes by `size` alone; a file's own pixels are left unread."""
        return {k: v for k, v in stored.items() if k not in ("min_pixels", "max_pixels")}

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

        return _attributes(cls, Qwen3VLVideoProcessor)

    def target(
        self, height: int, width: int, frames: int = 2, frame_pixels: int | None = None
    ) -> tuple[int, int]:
        """Height and width of each of `frames` video frames, no larger than `frame_pixels` pixels.

        Raises:
            ValueError: as for images.
        """
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        if not self.do_resize:
            return self._as_it_is(height, width)
        frames = max(frames, self.temporal_patch_size)  # a lone frame is repeated
        least, most = self.min_pixels, self.max_pixels
        if self.cap_pixels_per_frame:
            cap = min(self.max_video_tokens * self.factor**2, most // frames)
            most = frames * max(cap, int(1.05 * least))
        if frame_pixels is not None:
            most = min(most, frames * frame_pixels)
            least = min(least, most)
        return smart_resize(
            frames, height, width, self.temporal_patch_size, self.factor, least, most
        )

    def sample(self, total: int, rate: float | None) -> np.ndarray:
        """Indices of the video frames to take, of `total` that come at `rate` a second."""
        if not self.do_sample_frames:
            return np.arange(total)
        if self.num_frames is not None:
            wanted = self.num_frames
        elif self.fps is not None:
            wanted = int(total / (rate or UNKNOWN_RATE) * self.fps)
            wanted = min(max(wanted, self.min_frames), self.max_frames, total)
        else:
            wanted = min(max(total, self.min_frames), self.max_frames)
        return np.linspace(0, total - 1, wanted).round().astype(int)

    def timestamps(self, indices: Sequence[int], rate: float | None) -> tuple[float, ...]:
        """Seconds of each frame of the grid, the middle of its two video frames."""
        seconds = [int(index) / (rate or UNKNOWN_RATE) for index in indices]
        seconds += seconds[-1:] * (len(seconds) % 2)
        return tuple((a + b) / 2 for a, b in zip(seconds[::2], seconds[1::2], strict=True))


_NO = ("fps", "num_frames")  # for which None is a value


def read_settings(
    checkpoint: Checkpoint | None,
    image: Mapping[str, Any] | None = None,
    video: Mapping[str, Any] | None = None,
) -> tuple[ImageSettings, VideoSettings]:
    """A checkpoint's settings, or the published ones; `image` and `video` replace single ones.

    Raises:
        ValueError: which processor's, and what is wrong with it.
    """
    stored = checkpoint.processor_settings() if checkpoint is not None else (None, None)
    stored_image = stored[0] if stored[0] is not None else _PUBLISHED_IMAGE
    # A video processor without a file of its own takes the image processor's.
    stored_video = next((one for one in reversed(stored) if one is not None), _PUBLISHED_VIDEO)
    name = "image"
    try:
        of_images = ImageSettings.of(stored_image, image or {})
        name = "video"
        return of_images, VideoSettings.of(stored_video, video or {})
    except ValueError as error:
        raise ValueError(f"{name} settings: {error}") from None


def _attributes(settings: type, processor: Any) -> dict[str, Any]:
    """A processor's class defaults."""
    size = processor.size
    known = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    for field in fields(settings):
        known.setdefault(field.name, getattr(processor, field.name, None))
    known["rescale_factor"] = known["rescale_factor"] or 1 / 255
    if "cap_pixels_per_frame" in known:  # releases without it know no cap
        known["cap_pixels_per_frame"] = bool(known["cap_pixels_per_frame"])
        known["max_video_tokens"] = known["max_video_tokens"] or 768
    return known


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} {value!r} is no positive integer")
