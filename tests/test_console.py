"""What commands print is folded at the edge of a terminal, and whole in a file."""

import pytest
from rich.table import Table

from vitgraph.bench.console import make_console

WIDE = "x" * 300


def print_wide(*, stderr: bool = False) -> None:
    """A row and a line."""
    table = Table.grid()
    table.add_row(WIDE)
    make_console(stderr=stderr).print(table, WIDE)


@pytest.mark.parametrize("stderr", [False, True])
def test_a_file_has_no_edge(stderr, monkeypatch, capsys) -> None:
    """Whatever COLUMNS says, which a shell may have passed on."""
    monkeypatch.setenv("COLUMNS", "40")
    print_wide(stderr=stderr)
    said = capsys.readouterr()
    assert (said.err if stderr else said.out).splitlines() == [WIDE, WIDE]


def test_a_terminal_has_one(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # what is captured is a terminal to rich
    print_wide()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2 and max(map(len, lines)) == 40
