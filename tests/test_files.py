"""Folders, lists and links: what is taken, and what is named as left out."""

import io
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitgraph.graphs.media.files import find, is_video, named

DEPTH = 1500


@pytest.fixture
def tree(tmp_path) -> Path:
    """Images on three levels, a video, and files of other kinds."""
    for name in ("b.jpg", "a.PNG", "clip.mp4", "notes.txt", "noname", "in/c.webp", "in/deep/d.gif"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(b"")
    return tmp_path / "tree"


def names(paths) -> list[str]:
    return [path.name for path in paths]


def test_a_folder(tree) -> None:
    found = find([tree])
    assert names(found.files) == ["a.PNG", "b.jpg", "clip.mp4"]
    assert names(found.left_out) == ["noname", "notes.txt"] and names(found.folders) == ["in"]


def test_recursively(tree) -> None:
    found = find([tree], recursive=True)
    assert names(found.files) == ["a.PNG", "b.jpg", "clip.mp4", "c.webp", "d.gif"]
    assert not found.folders


def test_files_and_frame_folders_stay_as_they_are(tree) -> None:
    assert find([tree / "notes.txt"], [tree / "in"]).files == [tree / "notes.txt", tree / "in"]


def test_folders_without_media(tree, tmp_path) -> None:
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    with pytest.raises(ValueError, match="outer holds no image or video; --recursive"):
        find([tmp_path / "outer"])
    with pytest.raises(ValueError, match=r"outer holds no image or video$"):
        find([tmp_path / "outer"], recursive=True)


def test_links_in_a_circle(tree) -> None:
    (tree / "in" / "again").symlink_to(tree)
    (tree / "self.jpg").symlink_to("self.jpg")
    (tree / "gone.jpg").symlink_to("nowhere")
    found = find([tree], recursive=True)
    assert len(found.files) == 5 and found.loops == [tree / "in" / "again"]
    assert names(found.left_out) == ["gone.jpg", "noname", "notes.txt", "self.jpg"]


def test_a_pipe_is_left_out(tree) -> None:
    os.mkfifo(tree / "pipe.jpg")  # opening it would wait for a writer
    assert "pipe.jpg" in names(find([tree]).left_out)


def test_very_deep_folders(tmp_path, monkeypatch) -> None:
    """Deeper than Python recurses."""
    monkeypatch.chdir(tmp_path)
    for _ in range(DEPTH):
        Path("d").mkdir()
        os.chdir("d")
    Path("x.jpg").write_bytes(b"")
    os.chdir(tmp_path)
    try:
        assert names(find([Path("d")], recursive=True).files) == ["x.jpg"]
    finally:  # pytest's own clean-up recurses
        subprocess.run(["rm", "-r", "d"], check=True)


def test_transport_streams_and_typescript(tmp_path) -> None:
    (tmp_path / "clip.ts").write_bytes((b"G" + bytes(187)) * 3)
    (tmp_path / "code.ts").write_text("Given: string;\n" * 40)
    assert is_video(tmp_path / "clip.ts") and not is_video(tmp_path / "code.ts")


def test_lists(tmp_path, monkeypatch) -> None:
    (tmp_path / "list.txt").write_bytes(b"a b.jpg\n\nsub/\xff.jpg\r\n")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"x\ny.jpg\0z.jpg\0")))
    paths = list(named(["first.jpg", f"@{tmp_path}/list.txt", "-"]))
    assert [os.fsencode(path) for path in paths] == [
        b"first.jpg", b"a b.jpg", b"sub/\xff.jpg", b"x\ny.jpg", b"z.jpg",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"@gone\.txt: No such file"):
        list(named(["@gone.txt"]))
