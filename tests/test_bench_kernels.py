"""What surrounds the kernel benchmarks (`pytest bench`), without a GPU."""

import io
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "2026-11-30-h200-kernels.json"


def pytest_bench(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "bench", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would measure")
def test_benchmarks_are_skipped_with_the_reason() -> None:
    done = pytest_bench("--compare", str(RESULT))
    assert done.returncode == 0, done.stdout
    assert "skipped" in done.stdout and "needs a CUDA GPU" in done.stdout
    assert "passed" not in done.stdout and "failed" not in done.stdout


def test_a_file_that_is_not_there_is_refused_before_anything_runs(tmp_path) -> None:
    done = pytest_bench("--compare", str(tmp_path / "none.json"))
    assert done.returncode == 4 and "none.json: " in done.stderr


def test_the_table_shows_the_change() -> None:
    conftest = runpy.run_path(str(ROOT / "bench" / "conftest.py"))
    saved = json.loads(RESULT.read_text())
    rows = [conftest["Row"](**row) for row in saved["rows"][:2]]
    before = {rows[0].name: rows[0].median_us / 1.1}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(conftest["_table"](rows, saved, before))
    text = console.export_text()
    assert "+10.0%" in text and "new" in text and rows[0].name in text
    for part in (f"driver {saved['driver']}", f"commit {saved['commit']}", "TB/s", "quartiles"):
        assert part in text
