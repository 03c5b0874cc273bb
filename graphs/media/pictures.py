"""Picture files: Pillow opens them, pillow-heif too where it is installed."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

# What Pillow, or an extension of it, refuses a file with.
PICTURE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)
_ANIMATED = {"AVIF", "GIF", "PNG", "WEBP"}  # several pages of others are no film
_HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}


def open_picture(path: Path) -> Image.Image:
    """The file, opened and not yet decoded.

    Raises:
        ValueError: a file that is missing or no picture, by name, with what it may need.
    """
    try:
        try:
            return Image.open(path)
        except UnidentifiedImageError:
            if _brand(path) not in _HEIF_BRANDS or find_spec("pillow_heif") is None:
                raise
            from pillow_heif import register_heif_opener

            register_heif_opener()
            return Image.open(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except UnidentifiedImageError:
        raise ValueError(f"{path}: not an image{_what_it_needs(path)}") from None
    except PICTURE_ERRORS as error:
        raise ValueError(f"{path}: {error}") from None


def is_animation(image: Image.Image) -> bool:
    """Whether a picture moves: GIF, WebP, PNG or AVIF of several frames."""
    return image.format in _ANIMATED and getattr(image, "is_animated", False)


def upright(image: Image.Image) -> np.ndarray:
    """The pixels as RGB bytes [H, W, 3], turned as the camera was held; decodes the picture."""
    image = ImageOps.exif_transpose(image)
    image = _eight_bits(image) if image.mode.startswith("I") else image
    return np.array(image.convert("RGB"))


def read_picture(path: Path) -> np.ndarray:
    """RGB bytes [H, W, 3] of a picture file, the first frame of an animation.

    Raises:
        ValueError: as `open_picture`; a truncated file.
    """
    with open_picture(path) as image:
        try:
            return upright(image)
        except PICTURE_ERRORS as error:
            raise ValueError(f"{path}: {error}") from None


def _brand(path: Path) -> bytes:
    """What kind of ISO media file this is; empty for others."""
    with path.open("rb") as file:
        head = file.read(12)
    return head[8:] if head[4:8] == b"ftyp" else b""


def _what_it_needs(path: Path) -> str:
    brand = _brand(path)
    if brand in _HEIF_BRANDS:
        return " that Pillow reads alone; HEIC needs pillow-heif (pip install pillow-heif)"
    if brand in (b"avif", b"avis"):
        return " that this Pillow reads; AVIF needs Pillow 11.3 or later"
    return ""


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, which "RGB" would clip at 255; of 32 where it holds no more than that."""
    values = np.asarray(image).astype(np.int64).clip(0, 65535)
    if image.mode == "I" and values.max(initial=0) < 256:
        return image
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))
