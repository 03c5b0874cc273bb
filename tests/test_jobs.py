"""`vitgraph encode` at work: what is finished is kept, whatever happens; files from anywhere."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from vitgraph.encoder.embeddings import split_embeddings
from vitgraph.graphs.cli.main import main
from vitgraph.graphs.media import MediaLoader

PHOTOS = Path(__file__).parents[1] / "graphs" / "cli" / "photos"
CAT = str(PHOTOS / "cat.jpg")
TINY = ["--geometry", "tiny", "--device", "cpu"]
EAGER = ["--compilation-config", '{"cudagraph_mm_encoder": false}', "--max-pixels", "4096", *TINY]


@pytest.fixture
def photos(tmp_path) -> list[str]:
    """Six small pictures, 0.jpg to 5.jpg."""
    (tmp_path / "photos").mkdir()
    paths = [tmp_path / "photos" / f"{index}.jpg" for index in range(6)]
    for index, path in enumerate(paths):
        Image.new("RGB", (64, 64), (40 * index, 90, 200)).save(path)
    return [str(path) for path in paths]


def vitgraph(*arguments: str, before: str = "", **options) -> subprocess.Popen:
    """The command line in a process of its own, after some code."""
    code = f"import sys; from vitgraph.graphs.cli.main import main; {before or 0}; sys.exit(main())"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True, **options)


def shards(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in an output folder, which its index must name."""
    items = json.loads((folder / "index.json").read_text())["items"]
    found = {n: load_file(folder / about["shard"])[n] for n, about in items.items()}
    assert sum(len(load_file(file)) for file in folder.glob("*.safetensors")) == len(found)
    return found


def equal(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == expected.keys()
    return all(torch.equal(ours[name], expected[name]) for name in ours)


def test_interrupted(photos, tmp_path, monkeypatch, capsys) -> None:
    """What is finished is kept, and not made again."""
    read, seen = MediaLoader.read, []

    def interrupt(self, path, **options) -> object:
        seen.append(path.name)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return read(self, path, **options)

    monkeypatch.setattr(MediaLoader, "read", interrupt)
    output = tmp_path / "out.safetensors"
    command = ["encode", *photos, "--output", str(output), "--batch-size", "1", *EAGER]
    assert main(command) == 130
    assert sorted(load_file(output)) == photos[:3]
    assert main(command) == 0
    assert "3 of 6 are in" in capsys.readouterr().out.replace("\n", " ")
    assert seen == ["0.jpg", "1.jpg", "2.jpg", "3.jpg", "3.jpg", "4.jpg", "5.jpg"]
    assert sorted(load_file(output)) == photos
    assert not list(tmp_path.glob("*.partial"))


def test_killed_and_run_again(photos, tmp_path) -> None:
    """A process that ends while it writes loses that shard; the rest is as if it had not."""
    whole = ["--output", str(tmp_path / "whole"), "--batch-size", "1"]
    assert main(["encode", *photos, *whole, *EAGER]) == 0
    output = tmp_path / "killed"
    kill = (  # safetensors writes a file named by itself, in the folder that is asked for
        "import os; from vitgraph.graphs.cli import shards; save = shards.save_file; "
        "shards.save_file = lambda tensors, path, **options: "
        "(path.with_name('.tmpc2UJYY').touch(), os.kill(os.getpid(), 9)) "
        "if path.name.startswith('000004') else save(tensors, path, **options)"
    )
    options = ["--output", str(output), "--batch-size", "1", "--shard-size", "0", *EAGER]
    process = vitgraph("encode", *photos, *options, before=kill)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert len(list(output.glob("*.safetensors"))) == 3 and len(list(output.iterdir())) == 4
    assert main(["encode", *photos, *options]) == 0
    assert equal(shards(output), shards(tmp_path / "whole"))
    assert len(list(output.iterdir())) == 6 + 1, "a shard for each photograph, and the index"


def test_a_folder_of_others_stays_as_it_is(photos, tmp_path, capsys) -> None:
    """Temporary files of other programs, too: safetensors names its own so."""
    others = {tmp_path / "index.json.part", tmp_path / "tmp" / ".tmpc2UJYY"}
    (tmp_path / "tmp").mkdir()
    for file in others:
        file.write_text("half of it")
    assert main(["encode", photos[0], "--output", str(tmp_path), *EAGER]) == 2
    assert "holds index.json.part" in capsys.readouterr().err.replace("\n", " ")
    assert main(["encode", photos[0], "--output", str(tmp_path / "tmp"), *EAGER]) == 2
    assert "holds .tmpc2UJYY" in capsys.readouterr().err.replace("\n", " ")
    assert others <= set(tmp_path.rglob("*"))


def test_a_link_in_the_place_of_what_is_unfinished(photos, tmp_path, capsys) -> None:
    """What it leads to is not ours to delete, and a file of that name neither."""
    theirs, output = tmp_path / "theirs", tmp_path / "out"
    for folder in (theirs, output):
        folder.mkdir()
    (theirs / "index.json").write_text("theirs")
    (output / ".vitgraph-unfinished").symlink_to(theirs)
    assert main(["encode", photos[0], "--output", str(output), *EAGER]) == 2
    assert "holds .vitgraph-unfinished" in capsys.readouterr().err.replace("\n", " ")
    assert (theirs / "index.json").read_text() == "theirs"


@pytest.mark.parametrize("metadata", ["[]", "null"])
def test_shards_of_others_are_refused(metadata, photos, tmp_path, capsys) -> None:
    file = tmp_path / "out" / "000001.safetensors"
    file.parent.mkdir()
    save_file({"a": torch.ones(1)}, file, metadata={"vitgraph": metadata})
    assert main(["encode", photos[0], "--output", str(file.parent), *EAGER]) == 2
    assert "is none of vitgraph's" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("name", ["out.safetensors", "out"])
def test_a_broken_file_after_good_ones(name, photos, tmp_path, capsys) -> None:
    broken, whole = Path(photos[4]), Path(photos[4]).read_bytes()
    broken.write_bytes(whole[:400])
    output = tmp_path / name
    command = ["encode", *photos, "--output", str(output), *EAGER]
    assert main(command) == 2
    assert f"error: {broken}: " in capsys.readouterr().err.replace("\n", "")
    load = load_file if output.suffix else shards
    assert sorted(load(output)) == photos[:4]
    broken.write_bytes(whole)
    assert main(command) == 0
    assert sorted(load(output)) == photos
    assert f"4 of 6 are in {output} already" in (said := capsys.readouterr().out)
    assert f"wrote {output}\n" in said
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.*")}
    assert main(command) == 0, "nothing is left to do"
    assert before == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.*")}
    assert capsys.readouterr().out == f"6 of 6 are in {output} already\n"


def test_a_full_disk(photos, tmp_path) -> None:
    """Three shards fit; the fourth is larger than a file may be. Named, and nothing lost."""
    Image.new("RGB", (640, 640)).save(photos[3])
    output = tmp_path / "out"
    config = ["--compilation-config", '{"cudagraph_mm_encoder": false}']
    options = ["--output", str(output), "--batch-size", "1", "--shard-size", "0", *config, *TINY]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, -1))"
    process = vitgraph("encode", *photos, *options, before=limit)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    message = f"error: --output {output}: File too large"
    assert message.split(": F")[0] in errors and "3 items are written" in errors, errors
    assert {file.suffix for file in output.iterdir()} == {".safetensors", ".json"}
    assert main(["encode", *photos, *options]) == 0
    assert sorted(shards(output)) == photos


@pytest.mark.parametrize("name", ["out.safetensors", "out"])
def test_an_output_is_not_overwritten_unasked(name, photos, tmp_path, capsys) -> None:
    output = tmp_path / name
    load = load_file if output.suffix else shards
    first = ["encode", *photos[:3], "--output", str(output), *EAGER]
    assert main(first) == 0
    before = load(output)
    for command, message in (
        (["encode", *photos[1:], "--output", str(output), *EAGER], "1 items that are not asked"),
        ([*first, "--dtype", "float16"], "made with dtype float32, not float16"),
        ([*first, "--max-pixels", "2048"], "made with max_pixels 4096, not 2048"),
        ([*first, "--tensors", "merged"], "made with tensors joined, not merged"),
    ):
        assert main(command) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")
        assert equal(load(output), before)
    merged = ["encode", *photos[1:], "--output", str(output), "--tensors", "merged", *EAGER]
    assert main([*merged, "--overwrite"]) == 0
    assert sorted(load(output)) == photos[1:]
    assert {tensor.shape[1] for tensor in load(output).values()} == {128}


def test_a_file_of_others_is_not_overwritten(photos, tmp_path, capsys) -> None:
    output = tmp_path / "weights.safetensors"
    save_file({"weight": torch.ones(3)}, output)
    assert main(["encode", *photos, "--output", str(output), *EAGER]) == 2
    assert "none of vitgraph's" in capsys.readouterr().err.replace("\n", " ")
    assert list(load_file(output)) == ["weight"]


def test_levels_as_tensors_of_their_own(tmp_path) -> None:
    command = ["encode", CAT, *EAGER, "--output"]
    assert main([*command, str(tmp_path / "joined.safetensors")]) == 0
    assert main([*command, str(tmp_path / "split.safetensors"), "--tensors", "split"]) == 0
    (joined,) = load_file(tmp_path / "joined.safetensors").values()
    split = load_file(tmp_path / "split.safetensors")
    merged, deepstack = split_embeddings(joined, 3)
    expected = {CAT: merged} | {f"{CAT}#deepstack{i}": x for i, x in enumerate(deepstack)}
    assert equal(split, expected)
    with pytest.raises(ValueError, match=r"width 512 is no multiple of 3 \(1 \+ 2 levels\)"):
        split_embeddings(joined, 2)


def test_workers_read_the_same(photos, tmp_path, capsys) -> None:
    (bad := tmp_path / "bad.jpg").write_bytes(b"no picture")
    for workers in ("0", "2"):
        options = ["--workers", workers, "--output", str(tmp_path / workers), "--keep-going"]
        assert main(["encode", *photos, str(bad), CAT, *options, *EAGER]) == 1
        assert f"skipped {bad}: not an image" in capsys.readouterr().err.replace("\n", "")
    assert equal(shards(tmp_path / "0"), shards(tmp_path / "2"))


def test_a_worker_that_dies(photos, tmp_path, monkeypatch, capsys) -> None:
    """Named as what it is, and what was finished is kept."""
    read = MediaLoader.read

    def die(self, path, **options) -> object:
        if path.name == "4.jpg":
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, path, **options)

    monkeypatch.setattr(MediaLoader, "read", die)
    options = ["--workers", "1", "--batch-size", "1", "--output", str(tmp_path / "out")]
    assert main(["encode", *photos, *options, *EAGER]) == 2
    assert "error: reading files: DataLoader worker" in capsys.readouterr().err.replace("\n", " ")


def test_folders_lists_and_what_is_left_out(photos, tmp_path, capsys) -> None:
    (tmp_path / "photos" / "notes.txt").write_text("no picture")
    (tmp_path / "photos" / "more").mkdir()
    (tmp_path / "photos" / "more" / "cat.jpg").write_bytes(Path(CAT).read_bytes())
    assert main(["encode", str(tmp_path / "photos"), *EAGER]) == 0
    told = capsys.readouterr().err.replace("\n", "")
    assert "notes.txt" in told and "photos/more" in told and "--recursive" in told
    (tmp_path / "list.txt").write_text("\n".join(photos[:2]))
    output = tmp_path / "out.safetensors"
    command = ["encode", str(tmp_path / "photos"), f"@{tmp_path}/list.txt", "--recursive"]
    assert main([*command, "--output", str(output), *EAGER]) == 0
    assert len(load_file(output)) == 7 + 2


def test_names_on_standard_input(photos) -> None:
    process = vitgraph("encode", "-", *EAGER, stdin=-1)
    printed, _ = process.communicate("\n".join(photos), timeout=120)
    assert process.returncode == 0 and "6 items run eagerly" in printed
    assert all(f"\n{path} " in printed for path in photos), "rows in a pipe are whole"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_record_that_cannot_be_written(photos, tmp_path, capsys) -> None:
    output = tmp_path / "out.safetensors"
    command = ["encode", *photos, "--record", "/dev/full", "--output", str(output), *EAGER]
    assert main(command) == 2
    assert "--record /dev/full: No space left" in capsys.readouterr().err.replace("\n", " ")
    assert sorted(load_file(output)) == photos


def test_more_than_a_table_holds_is_summed_up(tmp_path, monkeypatch, capsys) -> None:
    from vitgraph.graphs.cli import jobs

    monkeypatch.setattr(jobs, "REPORT_SECONDS", 0)
    folder = tmp_path / "many"
    folder.mkdir()
    for index in range(jobs.MOST_ROWS + 1):
        Image.new("RGB", (32, 32)).save(folder / f"{index:02}.png")
    assert main(["encode", str(folder), *EAGER]) == 0
    printed = capsys.readouterr().out
    assert ".png" not in printed and "51 items run eagerly" in printed
    assert "8 of 51, " in printed and " s left" in printed
    assert "waiting for files" in printed and " a second: " in printed


@pytest.mark.parametrize("seconds", [0.3, 1, 2.5, 5])
def test_an_interrupt_at_any_time_is_quiet(seconds, tmp_path) -> None:
    """Of the whole process group, as a terminal sends it."""
    options = ["encode", *[CAT] * 4000, "--workers", "2", "--output", str(tmp_path / "out"), *EAGER]
    command = [sys.executable, "-m", "vitgraph", *options]
    process = subprocess.Popen(
        command,
        stdout=-1,
        stderr=-1,
        text=True,
        start_new_session=True,
        # A shell's background jobs ignore it, and so would this child of the tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert errors.strip() in ("", "interrupted")
