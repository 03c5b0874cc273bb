"""An encoder as the command line asks for it, and a table of what happened."""

import argparse
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitgraph.bench.options import choose
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.graphs.config import CompilationConfig
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.graphs.media.encoding import Result


def build_encoder(
    args: argparse.Namespace, console: Console, **options: Any
) -> Qwen3VLVisionEncoder:
    """The checkpoint's encoder, or one with random weights that says so; `options` are the
    encoder's."""
    device, dtype, geometry = choose(args)
    options |= {"device": device, "dtype": dtype, "attention": args.attention}
    if args.model:
        if args.geometry:
            raise ValueError(f"--model {args.model} brings its own geometry; drop --geometry")
        return Qwen3VLVisionEncoder.from_pretrained(args.model, **options)
    console.print(f"no --model: random weights in the geometry of {geometry}", style="yellow")
    return Qwen3VLVisionEncoder.random(GEOMETRIES[geometry], **options)


def build_manager(args: argparse.Namespace, console: Console) -> EncoderCudaGraphManager:
    """An encoder and its captured manager."""
    config = CompilationConfig.from_json(args.compilation_config)
    options = {"linear_dtype": args.linear_dtype, "fp8_skip_blocks": args.fp8_skip_blocks}
    encoder = build_encoder(args, console, **options)
    manager = EncoderCudaGraphManager(encoder, config)
    with console.status("capturing graphs"):
        manager.capture()
    return manager


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
            str(result.pack.budget or "-"),
            f"{result.fill:.0%}" if result.pack.budget else "-",
            replayed if result.pack.budget else "eager",
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
