"""`vitgraph bench` from the command line, on a CPU and a tiny tower."""

import json

import pytest

from vitgraph.graphs.cli.main import main

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = ["--geometry", "tiny", "--device", "cpu"]


def test_bench_encoder(tmp_path, capsys) -> None:
    path = tmp_path / "results" / "encoder.json"
    arguments = ["--repeats", "3", "--workloads", "1 x (1,20,20)", "--save", str(path)]
    assert main(["bench", "encoder", "--systems", "vitgraph", "vllm", *arguments, *TINY]) == 0
    result = json.loads(path.read_text())
    row = result["workloads"]["1 x (1,20,20)"]
    assert row["tokens"] == 100 and row["budgets"] == [128]
    assert row["turns"] == 3 and row["error_to_eager"] < 1e-3
    assert 0 < row["systems"]["vitgraph graph"]["host_ms"] <= row["graph_ms"]
    assert row["floor_ms"] is None  # of GPUs only
    assert {"gpu", "driver", "torch", "commit", "matmul_tflops"} <= result.keys()
    assert "missing" in result["systems"]["vllm FLASHINFER"]
    printed = capsys.readouterr().out
    assert "not here: vllm FLASH_ATTN: ModuleNotFoundError" in printed
    assert "Median time" in path.with_suffix(".md").read_text()
    assert path.with_suffix(".png").read_bytes()[1:4] == b"PNG"


def test_bench_encoder_with_fp8_beside_it(tmp_path) -> None:
    """One system a dtype, against the first; the others' outputs stay the truth."""
    sizes, path = tmp_path / "mine.csv", tmp_path / "encoder.json"
    sizes.write_text("1,4,4\n1,8,4\n")
    arguments = ["--repeats", "2", "--sizes", str(sizes), "--save", str(path)]
    arguments += ["--linear-dtype", "fp8", "same"]
    assert main(["bench", "encoder", "--systems", "vitgraph", *arguments, *TINY]) == 0
    result = json.loads(path.read_text())
    systems = result["workloads"]["mine"]["systems"]
    assert result["baseline"] == "vitgraph graph"
    assert list(systems) == [
        "vitgraph eager", "vitgraph graph", "vitgraph fp8 eager", "vitgraph fp8 graph",
    ]  # fmt: skip
    assert systems["vitgraph graph"]["error"] < 1e-5 < systems["vitgraph fp8 graph"]["error"] < 0.15


def test_bench_encoder_with_sizes(tmp_path) -> None:
    sizes, path = tmp_path / "mine.csv", tmp_path / "encoder.json"
    sizes.write_text("1,4,4\n1,8,4\n")
    arguments = ["--repeats", "2", "--sizes", str(sizes), "--save", str(path)]
    assert main(["bench", "encoder", "--systems", "vitgraph", *arguments, *TINY]) == 0
    assert json.loads(path.read_text())["workloads"]["mine"]["tokens"] == 12


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["encoder", "--workloads", "nothing"], "'nothing' is none of '1 x (1,20,20)'"),
        (["encoder", "--sizes", "none.json"], "none.json: no list of sizes"),
        (["encoder", "--systems", "vllm"], "none of the systems works here"),
        (["serving", "--ranks", "0"], "--ranks 0 is no number of processes"),
    ],
)
def test_mistakes_are_named(arguments, message, capsys) -> None:
    assert main(["bench", *arguments, *TINY]) == 2
    assert message in capsys.readouterr().err


def test_bench_serving_one_image_a_request(tmp_path) -> None:
    sizes, path = tmp_path / "sizes.json", tmp_path / "serving.json"
    sizes.write_text("[[1, 4, 4], [1, 8, 4], [1, 6, 6]]")
    arguments = ["--requests", "20", "--warm-up", "4", "--sizes", str(sizes), "--save", str(path)]
    command = ["bench", "serving", "--experiments", "images", "--seconds", "120"]
    assert main([*command, "--systems", "vitgraph", *arguments, *TINY]) == 0
    one = json.loads(path.read_text())["experiments"]["images"]
    assert (one["requests"], one["warm_up"], one["complete"]) == (20, 4, True)
    assert one["sizes"] == "sizes.json" and max(one["errors"].values()) < 1e-3
    graph = one["systems"]["vitgraph graph"]
    assert len(graph["percentiles_ms"]) == 99 and graph["p50_ms"] <= graph["p99_ms"]


def test_bench_serving_over_two_ranks(tmp_path) -> None:
    """Also 0, 1, 3, 4, 5 and 20 images: the outputs are the encoder's own."""
    path = tmp_path / "serving.json"
    command = ["bench", "serving", "--experiments", "parallel", "--ranks", "2", "--seconds", "120"]
    arguments = ["--requests", "2", "--warm-up", "1", "--systems", "vitgraph", "--save", str(path)]
    assert main([*command, *arguments, *TINY]) == 0
    result = json.loads(path.read_text())
    assert not result["not_run"]
    one = result["experiments"]["parallel 2"]
    assert one["images_compared"] == [0, 1, 3, 4, 5, 20] and one["ranks"] == 2
    assert set(one["errors"]) == {"vitgraph eager", "vitgraph graph"}
    assert max(one["errors"].values()) < 1e-3


def test_a_failing_rank_is_reported(tmp_path, capsys) -> None:
    """The launcher's last words, and a failing exit status."""
    command = ["bench", "serving", "--experiments", "parallel", "--attention", "nosuch"]
    assert main([*command, "--systems", "vitgraph", "--seconds", "60", *TINY]) == 1
    printed = capsys.readouterr().out
    assert "parallel 1: failed" in printed and "nosuch" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["encoder", "--seconds", "0"], "--seconds 0.0 must be at least 1"),
        (["encoder", "--seconds", "nan"], "--seconds nan"),
        (["encoder", "--repeats", "0"], "--repeats 0 must be at least 2"),
        (["serving", "--requests", "0"], "--requests 0 must be at least 1"),
        (["serving", "--warm-up", "-3"], "--warm-up -3 must be at least 0"),
        (["encoder", "--save", "run.v1"], "not .v1"),
        (["encoder", "--save", "/tmp"], "--save /tmp is a folder"),
        (["encoder", "--save", "/dev/null/x.json"], "--save /dev/null/x.json: "),
    ],
)
def test_options_are_checked_before_anything_is_built(arguments, message, capsys) -> None:
    assert main(["bench", *arguments, *TINY]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("sizes", ["[[1.9, 2, 2]]", "[[true, 4, 4]]", "[[1e400, 3]]", "[[0, 0]]"])
def test_sizes_that_are_none(sizes, tmp_path, capsys) -> None:
    file = tmp_path / "sizes.json"
    file.write_text(sizes)
    assert main(["bench", "encoder", "--sizes", str(file), *TINY]) == 2
    assert "sizes.json" in capsys.readouterr().err.replace("\n", "")
