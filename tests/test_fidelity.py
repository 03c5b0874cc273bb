"""`vitgraph fidelity`: the numbers are those of the outputs, and a bad item is named."""

import json
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.graphs.cli import fidelity as script
from vitgraph.graphs.cli.demo import PHOTOS
from vitgraph.graphs.cli.main import main
from vitgraph.graphs.media import MediaLoader

FAST = ["--geometry", "tiny", "--device", "cpu", "--max-pixels", "6000"]
SAME = ["--linear-dtypes", "same"]
CAT = str(PHOTOS / "cat.jpg")


def test_distances() -> None:
    """Two tokens of two levels: turned by 60 degrees, scaled, equal, opposite."""
    truth = torch.tensor([[1.0, 0, 3, 4], [2, 0, 0, 2]])
    half, sine = 0.5, math.sqrt(0.75)
    output = torch.tensor([[half, sine, 3, 4], [2.2, 0, 0, -2]])
    (merged, *first), (level, *second) = script.distances_of(output, truth, 1)
    assert (merged, level) == ("merged", "deepstack 0")
    assert first == pytest.approx([0.75, 0.5, math.sqrt((1 + 0.04) / 5)])
    assert second == pytest.approx([0, -1, 4 / math.sqrt(29)])


def run(*arguments: str) -> int:
    return main(["fidelity", *arguments, *FAST])


def test_what_is_saved_is_what_the_encoders_give(tmp_path, capsys) -> None:
    save = tmp_path / "result"
    assert run(CAT, "--dtypes", "float16", *SAME, "--save", str(save)) == 0
    said = capsys.readouterr().out
    assert "random weights prove little" in said and "cat.jpg" in said
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
    media = MediaLoader(max_pixels=6000).load(CAT)
    truth = encoder(media.pixel_values, [media.grid])
    output = encoder.half()(media.pixel_values, [media.grid])
    expected = {part: rest for part, *rest in script.distances_of(output, truth, 3)}
    saved = json.loads(save.with_suffix(".json").read_text())["distances"]
    assert {row["part"]: [row["cosine"], row["worst_token"], row["error"]] for row in saved} == {
        part: pytest.approx(numbers) for part, numbers in expected.items()
    }
    assert all(1e-5 < row["error"] < 1e-2 for row in saved)  # neither the truth nor nonsense
    assert {(row["variant"], row["tokens"]) for row in saved} == {("float16 sdpa", len(truth))}
    assert save.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_fp8_beside_the_first_dtype(tmp_path, capsys, monkeypatch) -> None:
    """A row each without it, with it in every block, and from a block on; less exact in that
    order. Small images, too, as they are packed with others elsewhere."""
    monkeypatch.setattr(Qwen3VLVisionEncoder, "fp8_min_patches", 2049)
    save = tmp_path / "result"
    options = ["--dtypes", "bfloat16", "float16", "--fp8-skip-blocks", "0", "3"]
    assert run(CAT, *options, "--save", str(save)) == 0
    rows = json.loads(save.with_suffix(".json").read_text())["distances"]
    errors = {row["variant"]: row["error"] for row in rows if row["part"] == "merged"}
    bf16, every, last, fp16 = (
        "bfloat16 sdpa", "bfloat16 fp8 sdpa", "bfloat16 fp8-skip3 sdpa", "float16 sdpa",
    )  # fmt: skip
    assert errors.keys() == {bf16, every, last, fp16}
    assert errors[fp16] < errors[bf16] < errors[last] < errors[every] < 0.1
    said = capsys.readouterr().out
    assert "FP8 beside bfloat16 only, not beside float16\n" in said
    printed = [line.split() for line in said.splitlines()]
    for row in rows:  # of the one item, so that it is the worst and the mean
        cosine, token = (f"{row[name]:.6f}" for name in ("cosine", "worst_token"))
        cells = row["variant"], row["part"], f"{row['error']:.2e}", cosine, cosine, token, "cat.jpg"
        assert " ".join(cells).split() in printed, "cut"


def test_an_item_below_the_bound_is_named_and_the_status_tells(capsys, monkeypatch) -> None:
    """One of two photographs comes out wrong in one deepstack level."""
    other = str(PHOTOS / "rocket.jpg")
    assert run(CAT, other, "--dtypes", "float16", "--at-least", "0.999", *SAME) == 0
    assert "2 of 2 items are at least 0.999 alike" in capsys.readouterr().out

    forward, calls = Qwen3VLVisionEncoder.forward, []

    def wrong(encoder, pixels, grids):
        rows = forward(encoder, pixels, grids)
        if encoder.dtype == torch.float16:
            calls.append(grids)
            if len(calls) == 2:
                rows[0, -1] = float("nan")
        return rows

    monkeypatch.setattr(Qwen3VLVisionEncoder, "forward", wrong)
    assert run(CAT, other, "--dtypes", "float16", "--at-least", "0.999", *SAME) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "rocket.jpg: deepstack 2 of float16 sdpa has cosine nan, below 0.999" in said
    assert "1 of 2 items are at least 0.999 alike" in said


def test_the_worst_item() -> None:
    one = script.Distance("a.jpg", 4, "bfloat16", "merged", 0.9, 0.8, 0.1)
    assert script.worst([one, replace(one, item="b.jpg", cosine=0.8)]).item == "b.jpg"
    assert script.worst([replace(one, item="c.jpg", cosine=math.nan), one]).item == "c.jpg"


def test_the_ten_worst_are_shown_in_order(capsys) -> None:
    """A NaN before all, wherever it is."""
    one = script.Distance("", 4, "bfloat16", "merged", 0, 0.8, 0.1)
    cosines = [0.5 + index / 100 for index in range(12)]
    cosines[6] = math.nan
    distances = [replace(one, item=f"{c:g}.jpg", cosine=c) for c in reversed(cosines)]
    assert script._verdict(distances, 0.9, Console(width=200)) == 1
    shown = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()][:10]
    assert shown == ["nan.jpg", *[f"{c:g}.jpg" for c in cosines if c == c][:9]]


def test_a_file_that_cannot_be_read(tmp_path, capsys) -> None:
    (bad := tmp_path / "bad.jpg").write_bytes(b"no picture")
    assert run(str(bad), CAT, "--dtypes", "float16") == 2
    assert "bad.jpg" in capsys.readouterr().err
    assert run(str(bad), CAT, "--dtypes", "float16", "--keep-going") == 1
    said = capsys.readouterr()
    assert "left out" in said.err and "cat.jpg" in said.out
    assert run(str(bad), "--keep-going") == 2
    assert "no file could be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at-least", "1.5"], "--at-least 1.5 is no cosine from 0 to 1"),
        (["--attention", "flash_attn"], "flash_attn"),
        (["--fp8-skip-blocks", "4"], "fp8_skip_blocks 4 must be an integer from 0 to 3"),
        (["--save", "none/result"], "there is no folder none"),
    ],
)
def test_mistakes_are_named(arguments, message, capsys) -> None:
    assert run(CAT, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
