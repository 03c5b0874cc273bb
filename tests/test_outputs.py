"""Outputs are tried before the work, and nothing is left behind by that."""

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vitgraph.bench.outputs import check_output, output_file
from vitgraph.graphs.cli.main import main


def test_a_file_that_can_be_written(tmp_path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("kept")
    check_output("--save", new, [old])
    check_output("--save", old)
    check_output("--save", None)
    assert not new.exists() and old.read_text() == "kept"


def test_a_pipe_is_left_alone(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_output("--save", tmp_path / "pipe")  # opening it would wait for a reader
    reader, writer = os.pipe()
    try:
        check_output("--record", Path(f"/dev/fd/{writer}"))
    finally:
        os.close(reader)
        os.close(writer)


def test_links_in_a_circle(tmp_path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ValueError, match="--save "):
        check_output("--save", tmp_path / "a")


def test_an_input_that_is_a_link_in_a_circle_is_not_the_outputs_fault(tmp_path) -> None:
    (tmp_path / "a.jpg").symlink_to("a.jpg")
    check_output("--save", tmp_path / "new.json", [tmp_path / "a.jpg"])


def test_many_ranks_try_one_file(tmp_path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: check_output("--save", tmp_path / "new.json"), range(400)))
    # One that finds the trial of another leaves it: rank 0 will write there.
    assert not (tmp_path / "new.json").exists() or not (tmp_path / "new.json").read_text()


def test_a_dangling_link_stays_one(tmp_path) -> None:
    (link := tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    check_output("--save", link)
    assert link.is_symlink() and not link.exists()


@pytest.mark.parametrize(
    "path, problem",
    [
        (".", "is a folder"),
        ("no/such.json", "there is no folder"),
        ("/proc/x.json", "No such file or directory"),
        ("linked.json", "would overwrite"),
    ],
)
def test_files_that_cannot(path, problem, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.json").write_text("")
    (tmp_path / "linked.json").symlink_to("input.json")
    with pytest.raises(ValueError, match=f"--save .*{problem}"):
        check_output("--save", tmp_path / path, [tmp_path / "input.json"])
    if problem != "would overwrite":
        with pytest.raises(argparse.ArgumentTypeError, match=problem):
            output_file(path)


@pytest.mark.parametrize(
    "arguments",
    ["encode a.jpg --record a.jpg", "encode a.jpg --record x.safetensors --output x.safetensors",
     "encode a.jpg --output /proc/x.safetensors", "bench encoder --save /proc/x",
     "stats a.jpg --picture a.jpg"],
)  # fmt: skip
def test_commands_refuse_them(arguments, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jpg").write_text("a photograph")
    assert main(arguments.split()) == 2
    assert (tmp_path / "a.jpg").read_text() == "a photograph"
    assert [path.name for path in tmp_path.iterdir()] == ["a.jpg"]
    assert arguments.split()[-1] in capsys.readouterr().err
