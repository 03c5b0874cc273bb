"""The command line as a user meets it."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from vitgraph.bench.exactness import relative_error
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.graphs.cli.main import main
from vitgraph.graphs.media import MediaLoader

PHOTOS = Path(__file__).parents[1] / "graphs" / "cli" / "photos"
CAT = str(PHOTOS / "cat.jpg")
TINY = ["--geometry", "tiny", "--device", "cpu"]
PUBLISHED = {
    "patch_size": 16,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": {"shortest_edge": 4096, "longest_edge": 16777216},
}


def test_encode_writes_what_the_encoder_gives(tmp_path, capsys) -> None:
    output = tmp_path / "embeddings.safetensors"
    assert main(["encode", str(PHOTOS), "--batch-size", "3", "--output", str(output), *TINY]) == 0
    tensors = load_file(output)
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
    loader = MediaLoader()
    assert sorted(tensors) == sorted(str(path) for path in PHOTOS.glob("*.jpg"))
    for name, tensor in tensors.items():
        media = loader.image(Path(name))
        expected = encoder(media.pixel_values, [media.grid])
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-4)
    with safe_open(output, "pt") as file:
        assert json.loads(file.metadata()[CAT]) == {"modality": "image", "grid": [1, 18, 28]}
    printed = capsys.readouterr().out
    assert "random weights in the geometry of tiny" in printed
    assert "4 items packed (no graph on a CPU), 0 run eagerly" in printed


def test_encode_in_fp8(tmp_path, capsys) -> None:
    """What the option gives, and that an output holds one kind."""
    files, fp8 = {}, ["--linear-dtype", "fp8"]
    options = {"same": [], "fp8": fp8, "few": [*fp8, "--fp8-skip-blocks", "3"]}
    command = ["encode", CAT, "--max-pixels", "65536", *TINY, "--output"]
    for name, chosen in options.items():
        files[name] = str(tmp_path / f"{name}.safetensors")
        assert main([*command, files[name], *chosen]) == 0
    same, every, few = (load_file(file)[CAT] for file in files.values())
    errors = relative_error(few, same), relative_error(every, same)
    print(f"one block: {errors[0]:.4f}, all: {errors[1]:.4f}")
    assert 1e-4 < errors[0] < 0.8 * errors[1] and errors[1] < 0.1
    assert main([*command, files["same"]]) == 0
    assert main([*command, files["fp8"]]) == 2
    assert "was made with linear_dtype fp8, not same" in " ".join(capsys.readouterr().err.split())
    assert main([*command, files["same"], *fp8]) == 2
    assert main([*command, files["few"], *options["fp8"]]) == 2
    assert "linear_dtype" in capsys.readouterr().err


@pytest.mark.parametrize(("skip", "problem"), [("4", "from 0 to 3"), ("1", "goes with")])
def test_encode_with_blocks_that_are_not_there(skip, problem, capsys) -> None:
    dtype = "fp8" if skip == "4" else "same"
    options = ["--linear-dtype", dtype, "--fp8-skip-blocks", skip]
    assert main(["encode", CAT, *options, *TINY]) == 2
    assert f"fp8_skip_blocks {skip}" in (said := capsys.readouterr().err) and problem in said


def test_encode_reports_each_item(capsys) -> None:
    config = '{"cudagraph_mm_encoder": true, "encoder_cudagraph_token_budgets": [128, 200]}'
    files = [CAT, str(PHOTOS / "coffee.jpg")]
    assert main(["encode", *files, "--compilation-config", config, *TINY]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if ".jpg" in line]
    assert [row[-6:-1] for row in rows] == [
        ["1x18x28", "126", "128", "98%", "pack"],
        ["1x24x38", "228", "-", "-", "eager"],
    ]


def test_the_same_file_twice_keeps_both(tmp_path) -> None:
    output = tmp_path / "twice.safetensors"
    assert main(["encode", CAT, CAT, "--output", str(output), *TINY]) == 0
    assert sorted(load_file(output)) == [CAT, f"{CAT}#2"]


def test_a_name_that_safetensors_keeps_for_itself(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "__metadata__").write_bytes((PHOTOS / "cat.jpg").read_bytes())
    assert main(["encode", "__metadata__", "--output", "out.safetensors", *TINY]) == 0
    assert sorted(load_file("out.safetensors")) == ["__metadata__#2"]


def test_keep_going(tmp_path, capsys) -> None:
    bad = tmp_path / "bad.jpg"
    bad.write_bytes((PHOTOS / "cat.jpg").read_bytes()[:1000])
    output = tmp_path / "out.safetensors"
    assert main(["encode", str(bad), CAT, *TINY, "--output", str(output)]) == 2
    assert f"error: {bad}: " in capsys.readouterr().err.replace("\n", "")
    assert not output.exists()
    command = ["encode", str(bad), CAT, "--keep-going", "--output", str(output), *TINY]
    assert main(command) == 1
    captured = capsys.readouterr()
    assert f"skipped {bad}: " in captured.err
    assert "1 of 2 files could not be read" in captured.err
    assert list(load_file(output)) == [CAT]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to encode"),
        ([CAT, "--model", "/no/such"], "/no/such is neither a directory nor a hub repository id"),
        ([CAT, "--compilation-config", "{"], "not JSON"),
        ([CAT, "--attention", "magic"], "attention backend 'magic' is none of"),
        ([CAT, "--attention", "flash_attn", "--geometry", "tiny"], "needs CUDA, not cpu"),
        ([CAT, "--output", "/no/such/file"], "there is no folder /no/such"),
        ([CAT, "--output", "/etc"], "name a new folder"),
        ([CAT, "--output", "out.txt"], "out.txt is neither a .safetensors file nor a folder"),
        ([CAT, "--batch-size", "0"], "--batch-size 0 must be at least 1"),
        ([CAT, "--workers", "-1"], "--workers -1 must be at least 0"),
        ([CAT, "--geometry", "9b"], "--geometry 9b is none of 2b, 4b, 8b"),
        ([CAT, "--video-settings", "[" * 100_000], "--video-settings is not JSON"),
        ([CAT, "--image-settings", "3"], "--image-settings must be a JSON object, got 3"),
        ([CAT, "--image-settings", '{"fps": 1}'], "image settings: no setting 'fps'"),
        ([CAT, "--compilation-config", "[" * 100_000], "compilation config is not JSON"),
        ([CAT, "--preprocess", "gpu"], "--preprocess gpu: the encoder runs on the CPU"),
        (["@gone.txt"], "@gone.txt: No such file"),
    ],
)
def test_mistakes_exit_with_2(arguments, message, capsys) -> None:
    assert main(["encode", *arguments, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu(capsys) -> None:
    for device in ("cpux", "cpu:x", "cuda:", "tpu"):
        assert main(["encode", CAT, "--device", device]) == 2
        assert f"--device {device} is neither cpu, cuda" in capsys.readouterr().err
    assert main(["encode", CAT, "--device", "cuda"]) == 2
    assert "torch sees no CUDA GPU" in capsys.readouterr().err


def test_encode_a_checkpoint_and_frames(tmp_path, reference, tools, capsys) -> None:
    reference.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(PUBLISHED))
    frames = tmp_path / "frames"
    frames.mkdir()
    for index in range(4):
        Image.new("RGB", (64, 64), (60 * index, 0, 0)).save(frames / f"{index}.png")
    output = tmp_path / "out.safetensors"
    command = ["encode", "--frames", str(frames), "--model", str(tmp_path / "model")]
    assert main([*command, "--output", str(output), "--device", "cpu"]) == 0
    assert "random weights" not in capsys.readouterr().out
    with safe_open(output, "pt") as file:
        about = json.loads(file.metadata()[str(frames)])
    assert about == {"modality": "video", "grid": [2, 4, 4], "timestamps": [0.25, 1.25]}
    (embeddings,) = load_file(output).values()
    media = MediaLoader(tmp_path / "model").video(frames)
    truth = tools.reference_rows(reference, media.pixel_values, [media.grid])
    assert relative_error(embeddings, truth) < 1e-4


def test_demo(capsys) -> None:
    assert main(["demo", "--geometry", "tiny", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "equal" in printed
    assert "5 items packed" in printed


def test_demo_in_fp8(capsys, monkeypatch) -> None:
    """Its pictures are small."""
    monkeypatch.setattr(Qwen3VLVisionEncoder, "fp8_min_patches", 2049)
    assert main(["demo", "--geometry", "tiny", "--device", "cpu", "--linear-dtype", "fp8"]) == 0
    found = re.search(r"largest relative error (\S+), allowed", capsys.readouterr().out)
    assert 1e-2 < float(found[1]) < 0.15


def test_demo_fails_when_the_outputs_differ(capsys, monkeypatch) -> None:
    from vitgraph.graphs.cli import demo

    monkeypatch.setitem(demo.TOLERANCE, torch.float32, 0.0)
    assert main(["demo", "--geometry", "tiny", "--device", "cpu"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_doctor(capsys) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for word in ("torch", "transformers", "attention", "sdpa", "flash_attn", "vLLM"):
        assert word in printed


def test_names_that_look_like_markup_and_missing_folders(tmp_path, capsys) -> None:
    odd = tmp_path / "[" / "foo][red]cat.jpg"
    odd.parent.mkdir()
    odd.write_bytes((PHOTOS / "cat.jpg").read_bytes())
    assert main(["encode", str(odd), *TINY]) == 0
    assert "[/foo][red]cat.jpg" in capsys.readouterr().out.replace("\n", "").replace(" ", "")
    for option in ("--output", "--record"):
        assert main(["encode", CAT, option, "/no/such/file", *TINY]) == 2
        assert main(["encode", CAT, option, str(tmp_path), *TINY]) == 2
    same = str(tmp_path / "x")
    assert main(["encode", CAT, "--output", same, "--record", same, *TINY]) == 2


def test_help_answers_without_torch() -> None:
    code = (
        "import sys; from vitgraph.graphs.cli.main import main\n"
        "try: main(['encode', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    took = []
    for _ in range(3):  # the machine may be busy
        started = time.perf_counter()
        command = [sys.executable, "-m", "vitgraph", "--help"]
        subprocess.run(command, check=True, capture_output=True)
        took.append(time.perf_counter() - started)
    assert min(took) < 1
