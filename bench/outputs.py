"""Files that a command will write, tried before it works for them."""

import argparse
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
        target = path.resolve()
        for other in inputs:
            if target == other.resolve():
                raise ValueError(f"{option} {path} would overwrite {other}")
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:  # ranks may try the same file at once
            target.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ValueError(f"{option} {path}: {getattr(error, 'strerror', error)}") from None


def output_file(text: str) -> Path:
    """`check_output` as the type of an argument of argparse."""
    path = Path(text)
    try:
        check_output("", path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).strip()) from None
    return path
