"""What transformers' own processors make of random pictures and videos, for test_preprocessing.py.

`python processor_truth.py CASES.json OUT` runs in a process of its own: the processors want
torchvision. Where that is not installed three of its functions stand in, written on the torch
operations that they are in torchvision, too; sampling, sizes, normalising and patches are all
transformers'.
"""

import enum
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate


def stand_in() -> None:
    """Put as much of torchvision into sys.modules as transformers' processors use."""

    class InterpolationMode(enum.Enum):
        NEAREST, NEAREST_EXACT, BILINEAR = "nearest", "nearest-exact", "bilinear"
        BICUBIC, BOX, HAMMING, LANCZOS = "bicubic", "box", "hamming", "lanczos"

    def resize(image, size, interpolation, antialias=True):
        flat = image.reshape(-1, *image.shape[-3:])
        flat = interpolate(flat, tuple(size), mode=interpolation.value, antialias=antialias)
        return flat.reshape(*image.shape[:-2], *size)

    def normalize(image, mean, std, inplace=False):
        mean, std = (torch.as_tensor(values).view(-1, 1, 1) for values in (mean, std))
        return image.sub(mean).div_(std)

    def pil_to_tensor(image):
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    functional = {
        "InterpolationMode": InterpolationMode,
        "resize": resize,
        "normalize": normalize,
        "pil_to_tensor": pil_to_tensor,
        "grayscale_to_rgb": lambda image: image,
    }
    modules = {
        "torchvision": {"__version__": "0.28.0"},
        "torchvision.io": {"ImageReadMode": None, "decode_image": None},
        "torchvision.transforms": {"InterpolationMode": InterpolationMode},
        "torchvision.transforms.functional": functional,
        "torchvision.transforms.v2": {},
        "torchvision.transforms.v2.functional": functional,
    }
    for name, content in modules.items():
        module = sys.modules[name] = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        vars(module).update(content)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def frames_of(case: dict) -> np.ndarray:
    """The random pixels of a case, uint8 [T, H, W, 3]."""
    shape = (case["frames"], case["height"], case["width"], 3)
    return np.random.default_rng(case["seed"]).integers(0, 256, shape, dtype=np.uint8)


def main() -> None:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # the latter where it was built for another torch
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        stand_in()
    from transformers import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    cases, out = json.loads(Path(sys.argv[1]).read_text()), {}
    for number, case in enumerate(cases):
        frames = frames_of(case)
        video = Qwen3VLVideoProcessor(**case["video"])
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
        made = video(videos=[pixels], do_sample_frames=False, return_tensors="pt")
        out[f"video {number}"] = made["pixel_values_videos"].numpy()
        out[f"video grid {number}"] = made["video_grid_thw"].numpy()[0]
        image = Qwen2VLImageProcessor(**case["image"])
        made = image(images=[Image.fromarray(frames[0])], return_tensors="pt")
        out[f"image {number}"] = made["pixel_values"].numpy()
        out[f"image grid {number}"] = made["image_grid_thw"].numpy()[0]
        told = VideoMetadata(total_num_frames=case["total"], fps=case["rate"])
        out[f"sampled {number}"] = video.sample_frames(told)
    np.savez(sys.argv[2], **out)


if __name__ == "__main__":
    main()
