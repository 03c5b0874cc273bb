"""Files to patches: what transformers' processor gives, frames paired, mistakes by name."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from vitgraph.graphs.media import pictures
from vitgraph.graphs.media.loader import Media, MediaLoader

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


def test_two_video_frames_make_one_of_the_grid(loader, tmp_path) -> None:
    folder = frames(tmp_path / "moving", 3, (256, 256))
    video = loader.video(folder)
    assert video.grid == (2, 16, 16)
    slots = video.pixel_values.view(2, 256, 3, 2, 256)
    for index, (frame, slot) in enumerate([(0, 0), (0, 1), (1, 0)]):
        image = loader.image(folder / f"{index:03}.png").pixel_values.view(256, 3, 2, 256)
        assert torch.equal(slots[frame, :, :, slot], image[:, :, 0])
    assert torch.equal(slots[1, :, :, 1], slots[1, :, :, 0]), "an odd last frame is repeated"


def write_video(path: Path, images: list[np.ndarray], *, rate: int = 8, codec="mpeg4") -> Path:
    av = pytest.importorskip("av", reason="PyAV is not installed")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return path


def brighter(count: int, size=(128, 96)) -> list[np.ndarray]:
    """Frames of one grey each, from black to white."""
    return [
        np.full((size[1], size[0], 3), round(level), np.uint8)
        for level in np.linspace(0, 255, count)
    ]


def rising(media: Media) -> bool:
    """Whether each frame of the grid is brighter than the one before."""
    return bool((media.pixel_values.view(media.grid[0], -1).mean(1).diff() > 0.1).all())


def test_video_file(loader, tmp_path) -> None:
    media = loader.load(write_video(tmp_path / "clip.mp4", brighter(32)))
    # 32 frames at 8 a second are 4 seconds: 8 video frames, 4 of the grid.
    assert media.grid == (4, 6, 8)
    assert rising(media), "frames must keep their order"
    taken = np.linspace(0, 31, 8).round() / 8
    assert media.timestamps == tuple(taken.reshape(4, 2).mean(1))


@pytest.mark.parametrize("suffix", [".ts", ".mkv", ".avi", ".mpg"])
def test_other_containers(suffix, loader, tmp_path) -> None:
    codec = "mpeg2video" if suffix in (".ts", ".mpg") else "mpeg4"
    images = brighter(50)
    media = loader.load(write_video(tmp_path / f"clip{suffix}", images, rate=25, codec=codec))
    assert media.modality == "video" and media.grid == (2, 6, 8) and rising(media)


TURNS = {  # of a player's display matrix, a b c d, and the same in numpy
    "upright": ((1, 0, 0, 1), lambda x: x),
    "clockwise": ((0, 1, -1, 0), lambda x: np.rot90(x, -1)),
    "counterclockwise": ((0, -1, 1, 0), lambda x: np.rot90(x, 1)),
    "half": ((-1, 0, 0, -1), lambda x: np.rot90(x, 2)),
    "mirrored": ((-1, 0, 0, 1), lambda x: x[:, ::-1]),
    "transposed": ((0, 1, 1, 0), lambda x: x.swapaxes(0, 1)),
}


@pytest.mark.parametrize("turn", TURNS)
def test_videos_are_turned_upright(turn, tmp_path) -> None:
    """As phones tell it: by a matrix in the header; a video beside it that was turned itself."""
    (a, b, c, d), turned = TURNS[turn]
    picture = np.zeros((192, 320, 3), np.uint8)
    picture[:96, :160], picture[96:, 160:] = (250, 20, 20), (20, 20, 250)
    path = write_video(tmp_path / "phone.mp4", [picture] * 8)
    header = bytearray(path.read_bytes())
    at = header.find(b"tkhd") + 44
    numbers = (a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    header[at : at + 36] = struct.pack(">9i", *numbers)
    path.write_bytes(header)
    upright = write_video(tmp_path / "upright.mp4", [np.ascontiguousarray(turned(picture))] * 8)
    ours, expected = (MediaLoader().video(file) for file in (path, upright))
    assert ours.grid == expected.grid
    assert (ours.pixel_values - expected.pixel_values).abs().mean() < 0.02


def test_a_video_whose_frames_change_their_size(loader, tmp_path) -> None:
    """As a call does whose camera is turned: two streams, one after the other."""
    parts = [
        write_video(tmp_path / f"{size}.ts", brighter(25, size), rate=25, codec="mpeg2video")
        for size in ((96, 64), (64, 96))
    ]
    path = tmp_path / "turned.ts"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    with pytest.raises(ValueError) as error:
        loader.load(path)
    assert f"{path}: frame" in str(error.value)
    assert "a frame of (64, 96), the first one has (96, 64)" in str(error.value)


def test_a_header_that_promises_more_frames(loader, tmp_path, monkeypatch) -> None:
    """A recording that was cut off: what is there is sampled, evenly."""
    from vitgraph.graphs.media import clips

    path = write_video(tmp_path / "clip.avi", brighter(32))
    data = bytearray(path.read_bytes())
    for name, offset in ((b"avih", 24), (b"strh", 40)):
        at = data.find(name) + offset
        assert struct.unpack_from("<I", data, at)[0] == 32, name
        struct.pack_into("<I", data, at, 64)
    path.write_bytes(data)
    assert clips.video_file(path).total == 64
    media = loader.load(path)
    assert media.grid[0] == 4 and rising(media)


def test_one_frame_is_a_video_of_two(loader, tmp_path) -> None:
    assert loader.load(write_video(tmp_path / "one.mp4", brighter(1))).grid == (1, 6, 8)


def test_settings_of_the_video_processor_reach_the_frames(tmp_path) -> None:
    path = write_video(tmp_path / "clip.mp4", brighter(48))
    grids = {
        rate: MediaLoader(video=settings).video(path).grid[0]
        for rate, settings in {
            "fps": {"fps": 4},
            "num_frames": {"num_frames": 10},
            "max_frames": {"max_frames": 6},
            "all": {"do_sample_frames": False},
        }.items()
    }
    assert grids == {"fps": 12, "num_frames": 5, "max_frames": 3, "all": 24}
    capped = MediaLoader(video={"cap_pixels_per_frame": True, "max_video_tokens": 4}).video(path)
    assert capped.grid == (6, 2, 4)
    dark = MediaLoader(video={"image_mean": [1.0] * 3}).video(path)
    assert dark.pixel_values.max() <= 0.0


def test_memory_does_not_grow_with_the_video(tmp_path) -> None:
    """200 frames of 640x480 are 184 MB, their patches 6 MB."""
    path = write_video(tmp_path / "long.mp4", brighter(200, (640, 480)), rate=30)
    code = (
        "import resource, sys; from pathlib import Path; import av; "
        "from vitgraph.graphs.media.loader import MediaLoader; "
        "load = MediaLoader(max_pixels=4096, video={'do_sample_frames': False}).load; "
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "load(Path(sys.argv[2])); before = peak(); "
        "assert load(Path(sys.argv[1])).grid[0] == 100; print(peak() - before)"
    )
    short = write_video(tmp_path / "short.mp4", brighter(8, (640, 480)), rate=30)
    command = [sys.executable, "-c", code, str(path), str(short)]
    grown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(grown) < 40_000, f"{grown} KiB"


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png"])
def test_animations_are_videos(suffix, loader, tmp_path) -> None:
    """16 frames of a quarter of a second: two a second are taken, 8; one frame stays an image."""
    images = [Image.fromarray(frame) for frame in brighter(16)]
    path = tmp_path / f"moving{suffix}"
    images[0].save(path, save_all=True, append_images=images[1:], duration=250, lossless=True)
    media = loader.load(path)
    assert media.modality == "video" and media.grid == (4, 6, 8) and rising(media)
    assert media.timestamps[0] == pytest.approx(0.25) and len(media.timestamps) == 4
    images[5].save(tmp_path / f"still{suffix}", lossless=True)
    assert loader.load(tmp_path / f"still{suffix}").modality == "image"
    assert loader.image(path).modality == "image"


def test_pages_are_no_animation(loader, tmp_path) -> None:
    images = [Image.fromarray(frame) for frame in brighter(3)]
    images[0].save(tmp_path / "pages.tif", save_all=True, append_images=images[1:])
    assert loader.load(tmp_path / "pages.tif").modality == "image"


def test_heic(loader, tmp_path, monkeypatch) -> None:
    """By content, whatever the name; without pillow-heif the message says what to install."""
    heif = pytest.importorskip("pillow_heif", reason="the extra `heic` is not installed")
    image = Image.open(PHOTOS / "cat.jpg")
    for name in ("photo.heic", "named.jpg"):
        heif.from_pillow(image).save(tmp_path / name, quality=95)
        media = loader.load(tmp_path / name)
        original = loader.image(PHOTOS / "cat.jpg")
        assert media.grid == original.grid
        assert (media.pixel_values - original.pixel_values).abs().mean() < 0.1
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
    with pytest.raises(ValueError, match=r"photo\.heic: .*pip install pillow-heif"):
        loader.load(tmp_path / "photo.heic")


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


def test_a_path_may_be_a_string() -> None:
    path = Path(__file__).parents[1] / "graphs/cli/photos/cat.jpg"
    loader = MediaLoader(max_pixels=64 * 64)
    assert loader.load(str(path)).grid == loader.load(path).grid
