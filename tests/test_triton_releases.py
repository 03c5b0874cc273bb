"""bench/triton_releases.py with two processes of the same release, on the CPU."""

import json
import sys

import pytest

from vitgraph.bench import triton_releases as script
from vitgraph.bench.workloads import WORKLOADS


def test_processes_take_turns(tmp_path, monkeypatch) -> None:
    """The processes inherit nothing of this one, so few workloads are a file on their path."""
    few = tmp_path / "sitecustomize.py"
    few.write_text(
        "from vitgraph.bench import workloads\n"
        "workloads.WORKLOADS = {'one': [(1, 4, 4)], 'two': [(1, 4, 4), (1, 8, 8)]}\n"
    )
    monkeypatch.setattr(script, "WORKLOADS", {"one": [(1, 4, 4)], "two": [(1, 4, 4), (1, 8, 8)]})
    save = tmp_path / "releases.json"
    command = f"script a={tmp_path} b={tmp_path} --geometry tiny --rounds 2 --save {save}"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(script, "CALLS", 5)
    assert script.main() == 0
    result = json.loads(save.read_text())
    assert set(result["releases"]) == {"a", "b"}
    for release in result["releases"].values():
        assert release["header"]["triton"] and set(release["quartiles_ms"]) == {"one", "two"}
        for low, median, high in release["quartiles_ms"].values():
            assert 0 < low <= median <= high


def test_a_release_that_fails_is_named(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(3)")
    release = script.Release("broken", str(tmp_path), "tiny")
    with pytest.raises(RuntimeError, match="broken ended with status"):
        release.read()


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ("3.6.0", "'3.6.0' is not of the form NAME=SITE"),
        ("=site", "'=site' is not of the form NAME=SITE"),
        ("a= a=x", "a name comes twice in a a"),
        ("a= --rounds 0", "--rounds 0 must be at least 1"),
    ],
)
def test_mistakes_start_nothing(arguments, reason, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments.split()])
    monkeypatch.setattr(script, "Release", None)
    with pytest.raises(SystemExit):
        script.main()
    assert reason in capsys.readouterr().err


def test_what_is_no_answer_is_named(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    release = script.Release("chatty", str(tmp_path), "tiny")
    with pytest.raises(RuntimeError, match="chatty answered 'hello"):
        release.read()
    release.process.kill()


@pytest.mark.parametrize(
    "quartiles, expected",
    [([[1, 2, 3], [2, 3, 4]], True), ([[1, 2, 3], [3.5, 4, 5]], False), ([[1, 2, 3]], True)],
)
def test_quartiles_overlap_where_one_time_lies_in_all(quartiles, expected) -> None:
    assert script.overlaps(quartiles) is expected
    assert len(WORKLOADS) == 9
