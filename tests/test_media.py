"""Files to patches: what transformers' processor gives, frames paired, mistakes by name."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from vitgraph.graphs.media import MediaLoader, expand

PHOTOS = Path(__file__).parents[1] / "graphs" / "cli" / "photos"


@pytest.fixture(scope="module")
def loader() -> MediaLoader:
    return MediaLoader(max_pixels=256 * 256)


def frames(folder: Path, count: int, size=(96, 64)) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(count):
        pixels = rng.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:03}.png")
    return folder


def test_grids_follow_the_size() -> None:
    media = MediaLoader().image(PHOTOS / "rocket.jpg")
    assert media.grid == (1, 26, 40)
    assert media.pixel_values.shape == (26 * 40, 1536)
    assert media.pixel_values.abs().max() <= 1


def test_max_pixels(loader) -> None:
    t, h, w = loader.image(PHOTOS / "astronaut.jpg").grid
    assert t * h * w * 256 <= 256 * 256


def test_sixteen_bits_a_pixel(tmp_path) -> None:
    grey = np.linspace(0, 255, 64 * 64).astype(np.uint8).reshape(64, 64)
    Image.fromarray(grey).save(tmp_path / "8.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "16.png")
    wide = grey.astype(np.uint16) * 257
    header = b"MM\0*\0\0\0\x08"  # a big-endian TIFF, written by hand: PIL writes none
    entries = [(256, 4, 64), (257, 4, 64), (258, 3, 16 << 16), (259, 3, 1 << 16), (262, 3, 1 << 16),
               (273, 4, 8 + 2 + 12 * 8 + 4), (278, 4, 64), (279, 4, 2 * 64 * 64)]  # fmt: skip
    directory = b"".join(struct.pack(">HHII", tag, kind, 1, value) for tag, kind, value in entries)
    directory = struct.pack(">H", len(entries)) + directory + bytes(4)
    (tmp_path / "big.tif").write_bytes(header + directory + wide.astype(">u2").tobytes())
    Image.fromarray(wide.astype(np.int32), "I").save(tmp_path / "32.tif")
    few = MediaLoader().image(tmp_path / "8.png").pixel_values
    for name in ("16.png", "big.tif", "32.tif"):
        assert torch.equal(MediaLoader().image(tmp_path / name).pixel_values, few), name


def test_processor_of_a_checkpoint(tmp_path) -> None:
    Qwen2VLImageProcessorPil(
        patch_size=16, image_mean=[0.0] * 3, image_std=[1.0] * 3
    ).save_pretrained(tmp_path)
    media = MediaLoader(tmp_path).image(PHOTOS / "cat.jpg")
    assert media.pixel_values.min() >= 0


def test_a_still_video_is_its_image_repeated(loader, tmp_path) -> None:
    folder = frames(tmp_path / "still", 1, (256, 256))
    image = loader.image(folder / "000.png")
    for index in range(1, 4):
        (folder / f"{index:03}.png").write_bytes((folder / "000.png").read_bytes())
    video = loader.video(folder)
    assert video.modality == "video"
    assert video.grid == (2, *image.grid[1:])
    assert torch.equal(video.pixel_values, image.pixel_values.repeat(2, 1))


def test_two_frames_share_a_temporal_patch(loader, tmp_path) -> None:
    folder = frames(tmp_path / "moving", 3, (256, 256))
    video = loader.video(folder)
    assert video.grid == (2, 16, 16)
    slots = video.pixel_values.view(2, 256, 3, 2, 256)
    for index, (frame, slot) in enumerate([(0, 0), (0, 1), (1, 0)]):
        image = loader.image(folder / f"{index:03}.png").pixel_values.view(256, 3, 2, 256)
        assert torch.equal(slots[frame, :, :, slot], image[:, :, 0])
    assert torch.equal(slots[1, :, :, 1], slots[1, :, :, 0]), "an odd last frame is repeated"


def test_video_file(loader, tmp_path) -> None:
    av = pytest.importorskip("av", reason="PyAV is not installed")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for level in np.linspace(0, 255, 32):
            image = np.full((96, 128, 3), round(level), dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    media = loader.load(path)
    # 32 frames at 8 a second are 4 seconds: 8 frames, 4 temporal patches.
    assert media.grid == (4, 6, 8)
    brightness = media.pixel_values.view(4, -1).mean(1)
    assert (brightness.diff() > 0.2).all(), "frames must keep their order"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("truncated.jpg", (PHOTOS / "cat.jpg").read_bytes()[:2000], "truncated"),
        ("text.png", b"hello", "not an image"),
        ("empty.jpg", b"", "not an image"),
        ("broken.mp4", b"not a video", "broken.mp4"),
    ],
)
def test_unreadable_files_are_named(name, content, message, loader, tmp_path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        loader.load(tmp_path / name)
    assert name in str(error.value) and message in str(error.value)


def test_missing_files_are_named(loader, tmp_path) -> None:
    for name in ("no.jpg", "no.mp4"):
        with pytest.raises(ValueError, match=f"{name}: no such file"):
            loader.load(tmp_path / name)


def test_frames_of_other_sizes_are_refused(loader, tmp_path) -> None:
    folder = frames(tmp_path / "mixed", 2)
    Image.new("RGB", (32, 32)).save(folder / "009.png")
    with pytest.raises(ValueError, match=r"009\.png: a frame of \(32, 32\)"):
        loader.video(folder)


def test_expand_folders(tmp_path) -> None:
    folder = frames(tmp_path / "some", 2)
    (folder / "notes.txt").write_text("no image")
    assert [path.name for path in expand([folder])] == ["000.png", "001.png"]
    assert list(expand([], [folder])) == [folder]
    with pytest.raises(ValueError, match="holds no image or video"):
        list(expand([tmp_path]))


def test_photographs_are_turned_upright(loader, tmp_path) -> None:
    path = tmp_path / "phone.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by a quarter
    Image.new("RGB", (320, 128)).save(path, exif=exif)
    _, height, width = loader.image(path).grid
    assert height > width


def test_frames_come_by_number(loader, tmp_path) -> None:
    for index in (1, 2, 9, 10, 11, 12):
        Image.new("RGB", (64, 64), (20 * index,) * 3).save(tmp_path / f"frame{index}.png")
    video = loader.video(tmp_path)
    slots = video.pixel_values.view(3, -1, 3, 2, 256).mean(dim=(1, 2, 4)).flatten()
    assert (slots.diff() > 0).all()


def test_max_pixels_limits_frames_too(tmp_path) -> None:
    folder = frames(tmp_path / "large", 4, (640, 640))
    assert MediaLoader().video(folder).grid == (2, 40, 40)
    assert MediaLoader(max_pixels=128 * 128).video(folder).grid == (2, 8, 8)
    with pytest.raises(ValueError, match="max_pixels 1000 is below one token, 1024 pixels"):
        MediaLoader(max_pixels=1000)


def test_settings_of_a_checkpoint_saved_by_transformers_5(tmp_path) -> None:
    settings = {
        "image_processor": {"patch_size": 16, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    assert MediaLoader(tmp_path).image(PHOTOS / "cat.jpg").pixel_values.min() >= 0
    (tmp_path / "processor_config.json").unlink()
    assert MediaLoader(tmp_path).image(PHOTOS / "cat.jpg").pixel_values.min() < 0


def test_too_thin_an_image_is_named(loader, tmp_path) -> None:
    Image.new("RGB", (4010, 20)).save(tmp_path / "thin.png")
    with pytest.raises(ValueError, match=r"thin\.png: absolute aspect ratio"):
        loader.image(tmp_path / "thin.png")
