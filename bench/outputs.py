"""Files that a command will write, tried before it works for them."""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path


def check_output(option: str, path: Path | None, inputs: Iterable[Path] = ()) -> None:
    """Refuse a file that could not be written in the end, or is one of the inputs.

    Raises:
        ValueError: naming the option, the file and what is wrong.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder, name a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent} to write a file in")
    if path.exists() and not path.is_file():  # a pipe: opening it now would end it
        return
    try:
        target = os.path.realpath(path)
        for other in inputs:  # one that is a link in a circle is its own affair
            if target == os.path.realpath(other):
                raise ValueError(f"{option} {path} would overwrite {other}")
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:  # ranks may try the same file at once
            Path(target).unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from None


def output_file(text: str) -> Path:
    """`check_output` as the type of an argument of argparse."""
    path = Path(text)
    try:
        check_output("", path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).strip()) from None
    return path
