"""`vitgraph demo`: the shipped photographs and a short clip, checked against transformers."""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from rich.console import Console
from torch import nn

from vitgraph.bench.families import transformers_tower
from vitgraph.bench.options import choose
from vitgraph.bench.systems import FP8_TOLERANCE
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.graphs.cli.encode import summary, table
from vitgraph.graphs.config import CompilationConfig
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.graphs.media.encoding import Result, run
from vitgraph.graphs.media.loader import MediaLoader

PHOTOS = Path(__file__).parent / "photos"
# Errors against the same weights in the same dtype; float32 differs by rounding order alone.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def demo(args: argparse.Namespace, console: Console) -> int:
    """Encode real pictures through the manager, compare with transformers."""
    device, dtype, geometry = choose(args)
    on_gpu = device.type == "cuda"
    console.print(
        f"vision tower of {geometry}, random weights, {dtype} on {_name(device)}; "
        f"attention {args.attention}",
        highlight=False,
    )
    with console.status("building the tower"):
        reference = transformers_tower(GEOMETRIES[geometry], device, dtype)
        encoder = Qwen3VLVisionEncoder.from_transformers(
            reference,
            attention=args.attention,
            linear_dtype=args.linear_dtype,
            fp8_skip_blocks=args.fp8_skip_blocks,
        )
        encoder.fp8_min_patches = 0  # the pictures are small
    manager = EncoderCudaGraphManager(
        encoder,
        CompilationConfig(True, encoder_cudagraph_token_budgets=(128, 256, 512, 1024)),
    )
    with console.status("capturing graphs"):
        started = time.perf_counter()
        manager.capture()
        captured = time.perf_counter() - started

    loader = MediaLoader(max_pixels=args.max_pixels or (512 if on_gpu else 320) ** 2)
    media = [loader.image(path) for path in sorted(PHOTOS.glob("*.jpg"))]
    with tempfile.TemporaryDirectory() as folder:
        media.append(loader.video(_clip(Path(folder) / "pan over coffee.jpg")))
    media = [replace(item, name=Path(item.name).name) for item in media]
    with console.status("encoding"):
        results = run(manager, media)
    console.print(table(results, graphs=on_gpu))
    console.print(summary(manager), f"; captured in {captured:.1f} s", sep="", highlight=False)
    with console.status("encoding with transformers"):
        allowed = FP8_TOLERANCE if encoder.fp8_blocks else TOLERANCE[dtype]
        return _compare(reference, results, dtype, allowed, console)


def _compare(
    reference: nn.Module,
    results: list[Result],
    dtype: torch.dtype,
    allowed: float,
    console: Console,
) -> int:
    device = next(reference.parameters()).device
    worst = 0.0
    for result in results:
        pixels = result.media.pixel_values.to(device, dtype)
        with torch.no_grad():
            output = reference(pixels, torch.tensor([result.media.grid], device=device))
        expected = torch.cat([output.pooler_output, *output.deepstack_features], dim=1).double()
        error = (result.embeddings.double() - expected).norm() / expected.norm()
        worst = max(worst, error.item())
    verdict = "equal" if worst <= allowed else "DIFFERENT"
    console.print(
        f"against transformers, same weights: {verdict} (largest relative error {worst:.1e}, "
        f"allowed {allowed:.0e} in {dtype})",
        highlight=False,
    )
    return 0 if verdict == "equal" else 1


def _clip(folder: Path) -> Path:
    """Eight video frames that pan over a photograph."""
    folder.mkdir()
    with Image.open(PHOTOS / "coffee.jpg") as photo:
        for frame in range(8):
            left = 40 * frame
            photo.crop((left, 80, left + 320, 320)).save(folder / f"{frame:02}.png")
    return folder


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
