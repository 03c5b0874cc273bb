"""Engines of a real SGLang release, on the CPU: the answers with our tower and with SGLang's own.
sglang_releases.py runs it."""

import os
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import sglang
from PIL import Image

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny Qwen3-VL, written where SGLang, which changes transformers, has not been imported."""
    folder = tmp_path_factory.mktemp("model")
    script = Path(__file__).with_name("sglang_checkpoint.py")
    subprocess.run([sys.executable, str(script), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> list[dict]:
    random = np.random.default_rng(0)

    def pixels(width: int, height: int) -> np.ndarray:
        return random.integers(0, 256, (height, width, 3), dtype=np.uint8)

    clip = tmp_path_factory.mktemp("clip") / "clip.mp4"
    with av.open(str(clip), "w") as file:
        stream = file.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for _ in range(8):
            frame = av.VideoFrame.from_ndarray(pixels(96, 64), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    one, two, three = (Image.fromarray(pixels(*s)) for s in ((96, 64), (128, 96), (64, 256)))
    return [
        {"prompt": f"{IMAGE}what", "image_data": [one]},
        {"prompt": f"{IMAGE * 3}what", "image_data": [one, two, three]},
        {"prompt": f"{VIDEO}what", "video_data": [str(clip)]},
    ]


def answers(folder: Path, prompts: list[dict]) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities; the scheduler is a process of its own."""
    engine = sglang.Engine(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        max_total_tokens=2048,
        mem_fraction_static=0.1,
        disable_cuda_graph=True,
        attention_backend="torch_native",
        grammar_backend="none",
        log_level="info",
        disable_fast_image_processor=True,  # which wants a GPU, as long as SGLang has no AMX
    )
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    found = []
    for prompt in prompts:
        said = engine.generate(sampling_params=sampling, return_logprob=True, **prompt)
        logprobs = [step[0] for step in said["meta_info"]["output_token_logprobs"]]
        found.append((said["output_ids"], logprobs))
    engine.shutdown()
    return found


def test_same_answers_as_sglangs_own_tower(folder, prompts, monkeypatch, capfd) -> None:
    monkeypatch.setitem(os.environ, "VITGRAPH_SGLANG_BUDGETS", "64,512")
    monkeypatch.delenv("VITGRAPH_DISABLE", raising=False)
    ours = answers(folder, prompts)
    log = "".join(capfd.readouterr())
    served = "vitgraph serves the vision tower of Qwen3VLForConditionalGeneration: attention sdpa"
    assert served in log and "graphs on: 64, 512 tokens" in log
    monkeypatch.setenv("VITGRAPH_DISABLE", "1")
    theirs = answers(folder, prompts)
    assert "vitgraph serves" not in "".join(capfd.readouterr())
    assert len({round(sum(logprobs), 2) for _, logprobs in theirs}) == len(prompts)
    for (tokens, logprobs), (own_tokens, own_logprobs) in zip(ours, theirs, strict=True):
        assert tokens == own_tokens
        np.testing.assert_allclose(logprobs, own_logprobs, atol=1e-3)
