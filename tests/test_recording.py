"""A recorded run comes back as it was, as a table and as a picture."""

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from vitgraph.graphs.cli.main import main
from vitgraph.graphs.cli.stats import RunRecorder, picture, table
from vitgraph.graphs.packing import Pack
from vitgraph.graphs.statistics import Stopwatch

PHOTOS = Path(__file__).parents[1] / "graphs" / "cli" / "photos"


@pytest.fixture
def run() -> RunRecorder:
    run = RunRecorder()
    for milliseconds in range(1, 101):
        run(Pack((0, 1), 48, 64), took(milliseconds / 1e3))
    run(Pack((0,), 100, 128), took(0.005))
    run(Pack((0,), 9000, None), took(0.25))
    return run


def took(seconds: float) -> Stopwatch:
    """One that has measured."""
    watch = Stopwatch(torch.device("cpu"), on=True)
    watch.seconds = lambda: seconds
    return watch


def rendered(run: RunRecorder) -> list[list[str]]:
    text = StringIO()
    Console(file=text, width=120).print(table(run))
    return [line.split() for line in text.getvalue().splitlines()[1:]]


def test_save_and_load(run, tmp_path) -> None:
    run.save(tmp_path / "run.json")
    assert RunRecorder.load(tmp_path / "run.json").packs == run.packs


def test_table(run) -> None:
    small, large, eager = rendered(run)
    assert small == ["64", "100", "200", "4800", "1600", "75%", "50.50", "50.50", "99.01"]
    assert large == ["128", "1", "1", "100", "28", "78%", "5.00", "5.00", "5.00"]
    assert eager == ["eager", "1", "1", "9000", "-", "-", "250.00", "250.00", "250.00"]


def test_picture(run) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    fills, latency = picture(run).axes
    assert [bar.get_height() for bar in fills.patches] == [75.0, 78.125]
    assert [text.get_text() for text in latency.get_legend().get_texts()] == [
        "budget 64",
        "budget 128",
        "eager",
    ]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[" * 100_000,
        "[]",
        '{"packs": [{"budget": 1}]}',
        '{"packs": [{"budget": 0, "tokens": 1, "items": 1, "ms": 1}]}',
        '{"packs": [{"budget": null, "tokens": "x", "items": 1, "ms": 1}]}',
        '{"packs": [{"budget": 64, "tokens": 1, "items": 1, "ms": "q"}]}',
    ],
)
def test_other_files_are_refused(content, tmp_path) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json"):
        RunRecorder.load(tmp_path / "run.json")


def test_encode_records_and_stats_shows(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    record, image = tmp_path / "run.json", tmp_path / "run.png"
    command = ["encode", str(PHOTOS), "--geometry", "tiny", "--device", "cpu"]
    assert main([*command, "--batch-size", "1", "--record", str(record)]) == 0
    assert sum(pack.items for pack in RunRecorder.load(record).packs) == 4
    capsys.readouterr()
    assert main(["stats", str(record), "--picture", str(image)]) == 0
    assert "128" in capsys.readouterr().out
    assert image.read_bytes().startswith(b"\x89PNG")
    assert main(["stats", str(tmp_path / "none.json")]) == 2
