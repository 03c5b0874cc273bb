"""An encoder as the command line asks for it, batches through it, and a table of what happened."""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.encoder.cudagraph import KEYS
from vitgraph.graphs.config import CompilationConfig
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.graphs.media import Media


@dataclass(frozen=True)
class Result:
    """One encoded item and how it was served; `seconds` is the time of the whole pack it was in."""

    media: Media
    embeddings: Tensor  # [tokens, output_width]
    budget: int | None
    fill: float
    seconds: float


def choose(args: argparse.Namespace) -> tuple[torch.device, torch.dtype, str]:
    """Device, dtype and geometry: as asked for, or what suits the machine."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", device):
        raise ValueError(f"--device {device} is neither cpu, cuda nor, say, cuda:0")
    on_gpu = device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no CUDA GPU")
    if on_gpu and (torch.device(device).index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"--device {device}: torch sees {count} GPUs")
    dtype = getattr(torch, args.dtype or ("bfloat16" if on_gpu else "float32"))
    return (
        torch.device(device),
        dtype,
        checked_geometry(args.geometry or ("8b" if on_gpu else "2b")),
    )


def checked_geometry(name: str) -> str:
    """The name of a published geometry, or a ValueError."""
    if name not in GEOMETRIES:
        raise ValueError(f"--geometry {name} is none of {', '.join(GEOMETRIES)}")
    return name


def build_encoder(args: argparse.Namespace, console: Console) -> Qwen3VLVisionEncoder:
    """The checkpoint's encoder, or one with random weights that says so."""
    device, dtype, geometry = choose(args)
    options = {"device": device, "dtype": dtype, "attention": args.attention}
    if args.model:
        if args.geometry:
            raise ValueError(f"--model {args.model} brings its own geometry; drop --geometry")
        return Qwen3VLVisionEncoder.from_pretrained(args.model, **options)
    console.print(f"no --model: random weights in the geometry of {geometry}", style="yellow")
    return Qwen3VLVisionEncoder.random(GEOMETRIES[geometry], **options)


def build_manager(
    args: argparse.Namespace, console: Console, *, profile: bool = True
) -> EncoderCudaGraphManager:
    """An encoder and its captured manager."""
    config = CompilationConfig.from_json(args.compilation_config)
    encoder = build_encoder(args, console)
    manager = EncoderCudaGraphManager(encoder, config, profile=profile)
    with console.status("capturing graphs"):
        manager.capture()
    return manager


def run(manager: EncoderCudaGraphManager, batch: Sequence[Media]) -> list[Result]:
    """Encode images together and videos together; results in the order of `batch`."""
    results: dict[int, Result] = {}
    for modality, (pixel_key, grid_key) in KEYS.items():
        chosen = [i for i, media in enumerate(batch) if media.modality == modality]
        if not chosen:
            continue
        outputs = manager.execute(
            {
                pixel_key: torch.cat([batch[i].pixel_values for i in chosen]),
                grid_key: [batch[i].grid for i in chosen],
            }
        )
        times = manager.last_seconds or [0.0] * len(manager.last_plan)
        for pack, seconds in zip(manager.last_plan, times, strict=True):
            fill = pack.tokens / pack.budget if pack.budget else 0.0
            for position in pack.indices:
                index = chosen[position]
                results[index] = Result(batch[index], outputs[position], pack.budget, fill, seconds)
    return [results[i] for i in range(len(batch))]


def table(results: Iterable[Result], *, graphs: bool) -> Table:
    """One row an item."""
    view = Table(box=None, pad_edge=False, header_style="bold")
    view.add_column("item", overflow="fold", min_width=20)
    for name in ("grid", "tokens", "budget", "fill", "served", "pack ms"):
        view.add_column(name, justify="right", no_wrap=True)
    for result in results:
        replayed = "graph" if graphs else "pack"
        view.add_row(
            Text(result.media.name),
            "x".join(map(str, result.media.grid)),
            str(len(result.embeddings)),
            str(result.budget or "-"),
            f"{result.fill:.0%}" if result.budget else "-",
            replayed if result.budget else "eager",
            f"{1000 * result.seconds:.1f}",
        )
    return view


def summary(manager: EncoderCudaGraphManager) -> str:
    """Hits and misses in one line."""
    stats = manager.get_cumulative_stats()
    if not manager.config.cudagraph_mm_encoder:
        return f"{_items(stats['graph_misses'])} run eagerly: cudagraph_mm_encoder is false"
    how = "replayed as graphs" if manager.device.type == "cuda" else "packed (no graph on a CPU)"
    return (
        f"{_items(stats['graph_hits'])} {how}, {stats['graph_misses']} run eagerly; "
        f"budgets {' '.join(map(str, stats['token_budgets']))}"
    )


def _items(count: int) -> str:
    return f"{count} item{'s' * (count != 1)}"
