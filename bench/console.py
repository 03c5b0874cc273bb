"""Where commands print: as wide as the terminal is, and whole where there is none."""

from rich.console import Console

NO_EDGE = 10_000  # characters, more than a table has


def make_console(*, stderr: bool = False) -> Console:
    """One that folds lines and tables at the edge of a terminal; a file has no edge."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = NO_EDGE
    return console
