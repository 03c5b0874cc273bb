"""Which files a command line means: files, folders, lists of names, links among them."""

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

IMAGE_SUFFIXES = {
    ".avif", ".bmp", ".gif", ".heic", ".heif", ".hif", ".jpe", ".jpeg", ".jpg", ".png", ".tif",
    ".tiff", ".webp",
}  # fmt: skip
VIDEO_SUFFIXES = {
    ".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ts",
    ".webm", ".wmv",
}  # fmt: skip
_TRANSPORT_STREAM = 188  # bytes of a packet, each of which starts with "G"


def is_picture(path: Path) -> bool:
    """Whether a file's name is that of a picture."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def is_video(path: Path) -> bool:
    """Whether a file's name is that of a video; `.ts` is TypeScript's, too, so that is read."""
    suffix = path.suffix.lower()
    if suffix != ".ts" or not path.is_file():
        return suffix in VIDEO_SUFFIXES
    try:
        with path.open("rb") as file:
            head = file.read(_TRANSPORT_STREAM + 1)
    except OSError:
        return True  # opening it as a video will tell what is wrong
    return head[:1] == head[_TRANSPORT_STREAM:] == b"G"


@dataclass
class Found:
    """The files to read, and what folders held besides.

    Attributes:
        left_out: of no known kind, or no file that could be read to its end (a pipe, a dead link).
        folders: in a folder that was not searched recursively.
        loops: links to a folder above them.
    """

    files: list[Path] = field(default_factory=list)
    left_out: list[Path] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    loops: list[Path] = field(default_factory=list)


def find(
    paths: Iterable[Path], frame_folders: Iterable[Path] = (), *, recursive: bool = False
) -> Found:
    """The files that `paths` name: folders give their images and videos in the order of their
    names, frame folders stay whole.

    Args:
        recursive: search the folders of folders; links are followed, but not in circles.

    Raises:
        ValueError: a folder without any image or video, or one that cannot be read.
    """
    found = Found()
    for path in paths:
        if not path.is_dir():
            found.files.append(path)
            continue
        before, folders = len(found.files), len(found.folders)
        _search(path, found, recursive)
        if len(found.files) == before:
            hint = "; --recursive searches its folders" if len(found.folders) > folders else ""
            raise ValueError(f"{path} holds no image or video{hint}")
    found.files += frame_folders
    return found


def _search(top: Path, found: Found, recursive: bool) -> None:
    pending = [(top, frozenset[tuple[int, int]]())]  # a path, and the folders that it is in
    while pending:
        path, above = pending.pop()
        if not path.is_dir():
            known = path.is_file() and (is_picture(path) or is_video(path))
            (found.files if known else found.left_out).append(path)
        elif above and not recursive:
            found.folders.append(path)
        elif (folder := _identity(path)) in above:
            found.loops.append(path)
        else:
            try:
                entries = sorted(path.iterdir(), reverse=True)
            except OSError as error:
                raise ValueError(f"{path}: {error.strerror}") from None
            pending += [(entry, above | {folder}) for entry in entries]


def _identity(folder: Path) -> tuple[int, int]:
    """The same under every name of a folder."""
    about = folder.stat()
    return about.st_dev, about.st_ino


def named(arguments: Iterable[str]) -> Iterator[Path]:
    """Paths of a command line: `@FILE` stands for the names in a file, `-` for those on standard
    input, one a line (or ended by zero bytes, as `find -print0` writes them).

    Raises:
        ValueError: a list that cannot be read.
    """
    for argument in arguments:
        if argument == "-":
            yield from _names(sys.stdin.buffer.read())
        elif argument.startswith("@"):
            try:
                yield from _names(Path(argument[1:]).read_bytes())
            except OSError as error:
                raise ValueError(f"{argument}: {error.strerror}") from None
        else:
            yield Path(argument)


def _names(text: bytes) -> list[Path]:
    names = text.split(b"\0") if b"\0" in text else text.splitlines()
    return [Path(os.fsdecode(name)) for name in names if name.strip()]
