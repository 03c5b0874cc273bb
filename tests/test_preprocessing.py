"""Settings, sizes, sampling and pixels: transformers' own, for 200 random pictures and videos."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from vitgraph.graphs.media import patches
from vitgraph.graphs.media.clips import Clip
from vitgraph.graphs.media.loader import MediaLoader, Picture
from vitgraph.graphs.media.settings import VideoSettings

CASES = 200
TRUTH = Path(__file__).parent / "processor_truth.py"
IMAGE = {
    "patch_size": 16,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": {"shortest_edge": 4096, "longest_edge": 65536},
}
VIDEO = IMAGE | {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}
OTHER_COLOURS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.3, 0.4, 0.5]}
VARIANTS = [
    {},
    {"cap_pixels_per_frame": True, "max_video_tokens": 64},
    {"cap_pixels_per_frame": True, "size": {"shortest_edge": 131072, "longest_edge": 786432}},
    {"size": {"shortest_edge": 4096, "longest_edge": 200000}},
    OTHER_COLOURS,
    OTHER_COLOURS | {"do_rescale": False},
    {"do_normalize": False},
    {"resample": 2, "fps": 1.5, "min_frames": 7, "max_frames": 90},
    {"fps": None, "num_frames": None},
]


def _module():
    spec = importlib.util.spec_from_file_location("processor_truth", TRUTH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cases() -> list[dict]:
    rng, cases = random.Random(0), []
    for seed in range(CASES):
        small = rng.random() < 0.5
        side = lambda: rng.randint(9, 70) if small else rng.randint(32, 300)  # noqa: B023, E731
        video = {"cap_pixels_per_frame": False} | VIDEO | VARIANTS[seed % len(VARIANTS)]
        cases.append(
            {
                "seed": seed,
                "frames": rng.randint(2, 13),
                "height": side(),
                "width": side(),
                "image": IMAGE | (OTHER_COLOURS if seed % 3 == 0 else {}),
                "video": video,
                "total": rng.randint(1, 5000),
                "rate": rng.choice([0.5, 1, 12, 24, 25, 29.97, 30, 60]),
            }
        )
    return cases


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """Cases, and what transformers makes of them."""
    folder = tmp_path_factory.mktemp("truth")
    cases = _cases()
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, str(TRUTH), str(folder / "cases.json"), str(folder / "truth.npz")]
    subprocess.run(command, check=True, capture_output=True)
    return cases, np.load(folder / "truth.npz")


def _loader(case: dict) -> MediaLoader:
    return MediaLoader(image=case["image"], video=case["video"])


def test_videos_are_transformers_own(truth) -> None:
    """Odd counts, sides under 32 pixels, budgets reached and not: grids equal, and every bit."""
    cases, expected = truth
    frames_of = _module().frames_of
    odd = 0
    for number, case in enumerate(cases):
        loader, frames = _loader(case), frames_of(case)
        clip = Clip(len(frames), None, lambda indices, f=frames: (f[i] for i in indices), str)
        bytes_, grid = loader._pairs(Path("clip"), clip, range(len(frames)))
        odd += len(frames) % 2
        assert grid == tuple(expected[f"video grid {number}"]), case
        ours = patches.normalise(bytes_, loader.video_settings, torch.float32)
        assert torch.equal(ours, torch.from_numpy(expected[f"video {number}"]).float()), case
    assert odd > CASES / 3


def test_images_are_transformers_own(truth) -> None:
    cases, expected = truth
    frames_of = _module().frames_of
    for number, case in enumerate(cases):
        loader, pixels = _loader(case), frames_of(case)[0]
        media = loader.finish(Picture("x", torch.from_numpy(pixels)))
        assert media.grid == tuple(expected[f"image grid {number}"]), case
        assert torch.equal(media.pixel_values, torch.from_numpy(expected[f"image {number}"])), case
        # Its processor on Pillow resizes otherwise: two levels of 255, of random noise.
        pil = Qwen2VLImageProcessorPil(**case["image"])
        theirs = pil(images=[Image.fromarray(pixels)], return_tensors="pt")["pixel_values"]
        step = 2.01 / 255 / min(case["image"]["image_std"])
        assert (media.pixel_values - theirs).abs().max() <= step


def test_frames_are_sampled_as_transformers_does(truth) -> None:
    cases, expected = truth
    for number, case in enumerate(cases):
        sampled = _loader(case).video_settings.sample(case["total"], case["rate"])
        assert np.array_equal(sampled, expected[f"sampled {number}"]), case


@pytest.mark.parametrize("count", [4, 7])
def test_timestamps_are_those_of_the_prompt(count) -> None:
    settings = MediaLoader().video_settings
    indices = settings.sample(count * 15, 30.0)
    theirs = Qwen3VLProcessor._calculate_timestamps(None, indices.tolist(), 30.0, 2)
    assert settings.timestamps(indices, 30.0) == tuple(theirs)


def test_an_odd_count_at_the_pixel_limit() -> None:
    assert MediaLoader().video_settings.target(720, 1280, 31) == (42 * 16, 74 * 16)


def test_resizing_in_floats_differs_by_two_levels() -> None:
    """As on a GPU; random noise overshoots most."""
    rng = np.random.default_rng(0)
    for size in [(96, 64), (100, 300), (64, 96)]:
        noise = torch.from_numpy(rng.integers(0, 256, (3, 150, 200), dtype=np.uint8))
        for mode in ("bicubic", "bilinear"):
            exact = patches.resize(noise, size, mode)
            floats = patches.resize_in_floats(noise[None], size, mode)[0]
            assert (exact.int() - floats.int()).abs().max() <= 2
            assert floats.dtype == torch.uint8


@pytest.mark.gpu
def test_preprocessing_on_the_gpu() -> None:
    rng = np.random.default_rng(0)
    picture = Picture("x", torch.from_numpy(rng.integers(0, 256, (700, 900, 3), dtype=np.uint8)))
    cpu, gpu = (MediaLoader(device=device).finish(picture) for device in ("cpu", "cuda"))
    assert gpu.grid == cpu.grid and gpu.pixel_values.is_cuda
    assert (gpu.pixel_values.cpu() - cpu.pixel_values).abs().max() <= 2.01 / 127.5


def _write(folder: Path, **files: dict) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_video_settings_of_a_checkpoint(tmp_path) -> None:
    """As transformers reads them: 8 frames of 640x480 are (4,16,22), min_pixels being images'."""
    own = {"min_pixels": 4096, "max_pixels": 1 << 20, "fps": 4, "max_frames": 10,
           "image_mean": [0.0] * 3, "do_sample_frames": False}  # fmt: skip
    _write(tmp_path, preprocessor_config=IMAGE, video_preprocessor_config=own)
    settings = MediaLoader(tmp_path).video_settings
    assert settings.target(480, 640, 8) == (16 * 16, 22 * 16)
    assert (settings.fps, settings.max_frames, settings.image_mean) == (4, 10, (0.0,) * 3)
    assert settings.sample(50, 25.0).tolist() == list(range(50))


def test_one_file_for_all_processors_comes_first(tmp_path) -> None:
    together = {"image_processor": IMAGE, "video_processor": VIDEO | {"num_frames": 6, "fps": None}}
    _write(
        tmp_path, processor_config=together, preprocessor_config={}, video_preprocessor_config={}
    )
    loader = MediaLoader(tmp_path)
    assert loader.image_settings.patch_size == 16
    assert len(loader.video_settings.sample(100, 25.0)) == 6


def test_a_checkpoint_without_a_video_file_uses_the_image_processors(tmp_path) -> None:
    _write(tmp_path, preprocessor_config=IMAGE | OTHER_COLOURS)
    settings = MediaLoader(tmp_path).video_settings
    assert settings.image_mean == (0.1, 0.2, 0.3)
    assert settings.max_pixels == IMAGE["size"]["longest_edge"]


def test_settings_given_to_the_loader(tmp_path) -> None:
    """They replace single ones; a number of frames replaces the rate, and the other way round."""
    _write(tmp_path, video_preprocessor_config=VIDEO | {"num_frames": 6, "fps": None})
    settings = MediaLoader(tmp_path, video={"fps": 1, "min_pixels": 5000}).video_settings
    assert len(settings.sample(100, 10.0)) == 10 and settings.min_pixels == 5000
    assert settings.max_pixels == VIDEO["size"]["longest_edge"]
    assert len(MediaLoader(video={"num_frames": 9}).video_settings.sample(4, 10.0)) == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsp": 1}, "video settings: no setting 'fsp'; there are patch_size"),
        ({"fps": 0}, "fps 0 is no positive number"),
        ({"fps": "2"}, "fps '2' is no positive number"),
        ({"fps": 1, "num_frames": 2}, "fps 1 and num_frames 2: one only"),
        ({"num_frames": 0}, "num_frames 0 is no positive integer"),
        ({"min_frames": 9, "max_frames": 8}, "min_frames 9 is above max_frames 8"),
        ({"min_pixels": 9000, "max_pixels": 8000}, "min_pixels 9000 is above max_pixels 8000"),
        ({"size": 224}, "size 224 has no shortest_edge"),
        ({"image_std": [0, 1, 1]}, "image_std [0.0, 1.0, 1.0] are not three numbers above 0"),
        ({"image_mean": 0.5}, "video settings: "),
        ({"resample": 1}, "resample 1 is none of"),
        ({"do_resize": "false"}, "do_resize 'false' is neither true nor false"),
        ({"do_sample_frames": "no"}, "do_sample_frames 'no' is neither true nor false"),
        ({"rescale_factor": float("nan")}, "rescale_factor nan is no positive number"),
        ({"rescale_factor": 0}, "rescale_factor 0 is no positive number"),
        ({"rescale_factor": "x"}, "rescale_factor 'x' is no positive number"),
        ({"temporal_patch_size": 1}, "temporal_patch_size 1 is not 2"),
    ],
)
def test_settings_that_cannot_be(settings, message) -> None:
    with pytest.raises(ValueError) as error:
        MediaLoader(video=settings)
    assert message in str(error.value)


def test_without_resizing_sides_must_fit() -> None:
    settings = MediaLoader(video={"do_resize": False}).video_settings
    assert isinstance(settings, VideoSettings) and settings.target(64, 96, 2) == (64, 96)
    with pytest.raises(ValueError, match="96x70 are no multiples of 32; do_resize is off"):
        settings.target(70, 96, 2)
