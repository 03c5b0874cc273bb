"""What is encoded: named batches, a seeded stream of images, sizes from a file."""

import csv
import json
import math
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitgraph.encoder import Qwen3VLVisionEncoder, VisionConfig
from vitgraph.encoder.inputs import Grid, check_grids
from vitgraph.graphs.media.files import is_picture
from vitgraph.graphs.media.pictures import open_picture
from vitgraph.graphs.qwen3_vl import KEYS

BUDGETS, MAX_ITEMS = (128, 256, 512, 1024, 2048, 4096, 6144), 32
SERVING_BUDGETS, SERVING_ITEMS = (512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864), 8

# What a file of sizes may turn out to be, or its images.
UNREADABLE = (
    OSError,
    TypeError,
    ValueError,
    ArithmeticError,
    RecursionError,
    csv.Error,
    Image.DecompressionBombError,
)

# Grids after the processor's resize: a side is a multiple of 32 pixels, 2 patches.
_224, _256, _336, _448, _672, _1008 = ((1, n, n) for n in (16, 16, 20, 28, 42, 64))
_1280X720 = (1, 44, 80)


def _shuffled(grids: list[Grid]) -> list[Grid]:
    random.Random(42).shuffle(grids)
    return grids


WORKLOADS: dict[str, list[Grid]] = {
    "1 x (1,20,20)": [(1, 20, 20)],
    "1 x (1,32,32)": [(1, 32, 32)],
    "1 x (1,48,64)": [(1, 48, 64)],
    "1 x (1,68,120)": [(1, 68, 120)],
    "1 x (1,128,180)": [(1, 128, 180)],
    "8 x (1,32,32)": [(1, 32, 32)] * 8,
    "20 x (1,20,20)": [(1, 20, 20)] * 20,
    "1 video (8,24,40)": [(8, 24, 40)],
    "mix of 7": [
        (1, 14, 20), (1, 48, 64), (1, 30, 42), (1, 68, 120), (1, 26, 36), (1, 64, 36), (1, 20, 20)
    ],
}  # fmt: skip
# Public mixes of image sizes, twenty images in their exact proportions.
MIXES: dict[str, list[Grid]] = {
    "20 of random-mm": _shuffled([_256] * 10 + [_1280X720] * 10),
    "20 of five sizes": _shuffled([_224] * 4 + [_336] * 6 + [_448] * 4 + [_672] * 4 + [_1008] * 2),
}

ALL_WORKLOADS = WORKLOADS | MIXES


@dataclass(frozen=True)
class Batch:
    """Pixels [patches, width] and the grids they belong to, in the forms that callers use."""

    pixels: Tensor
    grids: list[Grid]

    @property
    def tokens(self) -> int:
        """Output rows."""
        return sum(t * h * w for t, h, w in self.grids) // 4

    @cached_property
    def mm_kwargs(self) -> dict[str, Any]:
        """Keyword inputs: a video's names where the first item has several frames."""
        names = KEYS["video" if self.grids and self.grids[0][0] > 1 else "image"]
        return dict(zip(names, (self.pixels, [list(grid) for grid in self.grids]), strict=True))

    @cached_property
    def grid_tensor(self) -> Tensor:
        """[items, 3] int64 beside the pixels."""
        return torch.tensor(self.grids, device=self.pixels.device)


def make_batch(encoder: Qwen3VLVisionEncoder, grids: Sequence[Grid]) -> Batch:
    """Seeded random pixels in the encoder's dtype, on its device."""
    generator = torch.Generator(encoder.device).manual_seed(0)
    shape = (sum(t * h * w for t, h, w in grids), encoder.config.patch_width)
    pixels = torch.randn(shape, device=encoder.device, generator=generator).to(encoder.dtype)
    return Batch(pixels, list(grids))


def photograph(chance: random.Random) -> Grid:
    """One image of a chat: tokens lognormal (median 350, sigma 0.7) clipped to 64..2500, aspect
    ratio lognormal (sigma 0.35) around 1."""
    tokens = min(max(chance.lognormvariate(math.log(350), 0.7), 64), 2500)
    aspect = chance.lognormvariate(0, 0.35)
    height = max(round(math.sqrt(tokens / aspect)), 1)
    return (1, 2 * height, 2 * max(round(tokens / height), 1))


def photographs(count: int, seed: int = 42) -> list[Grid]:
    """A seeded stream of `photograph`."""
    chance = random.Random(seed)
    return [photograph(chance) for _ in range(count)]


def image_grid(width: int, height: int) -> Grid:
    """The grid of an image of so many pixels, after the resize of Qwen3-VL's processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    resized = smart_resize(height, width, factor=32, min_pixels=65536, max_pixels=16777216)
    return (1, resized[0] // 16, resized[1] // 16)


def load_sizes(path: Path) -> list[Grid]:
    """Grids from a JSON or CSV list of (t, h, w) in patches or (width, height) in pixels, or from a
    folder of images.

    Raises:
        ValueError: no such file, or one that holds something else.
    """
    try:
        if path.is_dir():
            files = sorted(path.rglob("*"))
            images = [file for file in files if is_picture(file)]
            rows: list = [_image_size(file) for file in images]
        elif path.suffix == ".csv":
            lines = csv.reader(path.read_text(encoding="utf-8-sig").splitlines())
            rows = [row for row in lines if "".join(row).strip() and not row[0].startswith("#")]
            if rows and any(character.isalpha() for character in "".join(rows[0])):
                rows = rows[1:]  # a head line
        else:
            rows = json.loads(path.read_text())
        sizes = [tuple(map(_whole, row)) for row in rows]
        for size in sizes:
            if len(size) == 2 and min(size) < 1:
                raise ValueError(f"{size} are no width and height")
        grids = [image_grid(*size) if len(size) == 2 else size for size in sizes]
    except UNREADABLE as error:
        raise ValueError(f"--sizes {path}: no list of sizes ({error})") from None
    if not grids:
        raise ValueError(f"--sizes {path}: holds no size")
    return check_grids(grids)


def _whole(value: Any) -> int:
    """A number of a JSON list, or a cell of a CSV file."""
    if type(value) not in (int, str):
        raise ValueError(f"{value!r} is no whole number")
    return int(value)


def _image_size(path: Path) -> tuple[int, int]:
    with warnings.catch_warnings():  # of large ones: only the header is read
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with open_picture(path) as image:
            return image.size


def seconds_for(device: torch.device) -> float:
    """How long a run may take, unless told otherwise."""
    return 440 if device.type == "cuda" else 120


def flops(config: VisionConfig, grids: Sequence[Grid]) -> float:
    """Multiply-adds of the matrix products times two."""
    patches = sum(t * h * w for t, h, w in grids)
    hidden, inner = config.hidden_size, config.intermediate_size
    block = 2 * patches * hidden * (4 * hidden + 2 * inner)
    scores = sum(4 * t * (h * w) ** 2 * hidden for t, h, w in grids)
    wide = hidden * config.spatial_merge_size**2
    merge = 2 * patches // config.spatial_merge_size**2 * wide * (wide + config.out_hidden_size)
    levels = 1 + len(config.deepstack_visual_indexes)
    embed = 2 * patches * config.patch_width * hidden
    return embed + config.depth * (block + scores) + levels * merge
