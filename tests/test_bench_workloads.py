"""What the benchmarks encode is what they say."""

import json
import statistics

import pytest
from PIL import Image

from vitgraph.bench.workloads import (
    MIXES,
    WORKLOADS,
    flops,
    image_grid,
    load_sizes,
    photographs,
)
from vitgraph.encoder import GEOMETRIES

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_stream_is_the_documented_one() -> None:
    grids = photographs(3300)
    assert grids == photographs(3300) != photographs(3300, seed=1)
    tokens = [h * w // 4 for _, h, w in grids]
    assert min(tokens) >= 60 and max(tokens) <= 2550
    assert statistics.median(tokens) == pytest.approx(350, rel=0.05)
    assert statistics.mean(tokens) == pytest.approx(454, rel=0.03)
    assert statistics.quantiles(tokens, n=100)[98] == pytest.approx(1800, rel=0.1)


def test_mixes_have_their_proportions() -> None:
    random_mm, sizes = MIXES.values()
    assert sorted(random_mm) == [image_grid(256, 256)] * 10 + [image_grid(1280, 720)] * 10
    counts = {sizes.count(image_grid(side, side)) for side in (336,)}
    assert counts == {6} and sizes.count(image_grid(1008, 1008)) == 2 and len(sizes) == 20


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.json", json.dumps([[1, 16, 16], [8, 24, 40]])),
        ("a.csv", "t,h,w\n1,16,16\n\n8,24,40\n"),
        ("pixels.json", json.dumps([[256, 256], [1280, 720]])),
        ("pixels.csv", "width,height\n256,256\n1280,720\n"),
        ("pixels.csv", "\ufeff256,256\n# a comment\n1280,720\n   \n,\n"),
    ],
)
def test_sizes_from_a_file(name, text, tmp_path) -> None:
    (tmp_path / name).write_text(text)
    second = (1, 44, 80) if name.startswith("pixels") else (8, 24, 40)
    assert load_sizes(tmp_path / name) == [(1, 16, 16), second]


def test_sizes_from_a_folder_of_images(tmp_path) -> None:
    Image.new("RGB", (1280, 720)).save(tmp_path / "wide.PNG")
    (tmp_path / "notes.txt").write_text("no image")
    assert load_sizes(tmp_path) == [(1, 44, 80)]


@pytest.mark.parametrize("row", ["-5,4,4", "1.5,4,4", "x,2,2", "-640,480", "640;480"])
def test_rows_of_a_csv_are_not_dropped(row, tmp_path) -> None:
    (tmp_path / "a.csv").write_text(f"t,h,w\n1,4,4\n{row}\n")
    with pytest.raises(ValueError, match=r"no list of sizes|must be positive|3 values"):
        load_sizes(tmp_path / "a.csv")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "no list of sizes"),
        ('{"a": 1}', "no list of sizes"),
        ("[[1, 2, 3, 4]]", "3 values"),
        ("[[1, 3, 4]]", "multiples of the merge size 2"),
        ("[]", "holds no size"),
    ],
)
def test_bad_sizes_are_named(text, message, tmp_path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_sizes(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"none\.json: no list"):
        load_sizes(tmp_path / "none.json")


def test_flops_are_those_of_the_modules() -> None:
    """Against torch's own counter over transformers' tower."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from vitgraph.bench.families import build
    from vitgraph.bench.systems import Setup
    from vitgraph.bench.workloads import make_batch
    from vitgraph.encoder import Qwen3VLVisionEncoder

    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
    grids = [(1, 4, 6), (2, 8, 4)]
    (system,), missing = build(Setup(encoder), ["transformers"])
    assert not missing
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        system.encode(make_batch(encoder, grids))
    assert counter.get_total_flops() == flops(encoder.config, grids)
    assert flops(GEOMETRIES["8b"], WORKLOADS["1 x (1,20,20)"]) == pytest.approx(0.38e12, rel=0.05)
