"""`vitgraph encode`: files in, a table and a safetensors file out."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch import Tensor

from vitgraph.bench.options import choose
from vitgraph.bench.outputs import check_output
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.graphs.cli.stats import RunRecorder
from vitgraph.graphs.config import CompilationConfig
from vitgraph.graphs.manager import EncoderCudaGraphManager, OnPack
from vitgraph.graphs.media import Media, MediaLoader, expand
from vitgraph.graphs.packing import Pack
from vitgraph.graphs.qwen3_vl import KEYS
from vitgraph.graphs.statistics import Stopwatch


@dataclass(frozen=True)
class Result:
    """One encoded item and how it was served; `seconds` is the time of the whole pack it was in."""

    media: Media
    embeddings: Tensor  # [tokens, output_width]
    budget: int | None
    fill: float
    seconds: float


def encode_files(args: argparse.Namespace, console: Console, errors: Console) -> int:
    """Run the command; returns its exit status."""
    if args.batch_size < 1:
        raise ValueError(f"--batch-size {args.batch_size} must be at least 1")
    paths = list(expand(args.paths, args.frames))
    if not paths:
        raise ValueError("nothing to encode: name files or folders")
    check_output("--output", args.output, paths)
    if args.output and args.output.suffix != ".safetensors":
        raise ValueError(f"--output {args.output}: the file ends in .safetensors")
    check_output("--record", args.record, [*paths, *filter(None, [args.output])])
    manager = build_manager(args, console)
    recorder = RunRecorder()
    loader = MediaLoader(args.model, args.max_pixels)
    results: list[Result] = []
    failed = 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("encoding", total=len(paths))
        for start in range(0, len(paths), args.batch_size):
            batch: list[Media] = []
            for path in paths[start : start + args.batch_size]:
                try:
                    batch.append(loader.load(path))
                except ValueError as error:
                    if not args.keep_going:
                        raise
                    failed += 1
                    errors.print(f"skipped {error}", style="yellow", markup=False, soft_wrap=True)
            for result in run(manager, batch, recorder):
                # Only what is shown and written is kept, and that not on the GPU.
                media = replace(result.media, pixel_values=torch.empty(0))
                results.append(replace(result, media=media, embeddings=result.embeddings.cpu()))
            progress.advance(task, min(args.batch_size, len(paths) - start))
    console.print(table(results, graphs=manager.device.type == "cuda"))
    console.print(summary(manager))
    if args.output and results:
        write(args.output, results)
        console.print(f"wrote {args.output}", markup=False)
    if args.record:
        recorder.save(args.record)
    if failed:
        errors.print(f"{failed} of {len(paths)} files could not be read", style="yellow")
    return 1 if failed else 0


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


def build_manager(args: argparse.Namespace, console: Console) -> EncoderCudaGraphManager:
    """An encoder and its captured manager."""
    config = CompilationConfig.from_json(args.compilation_config)
    encoder = build_encoder(args, console)
    manager = EncoderCudaGraphManager(encoder, config)
    with console.status("capturing graphs"):
        manager.capture()
    return manager


def run(
    manager: EncoderCudaGraphManager, batch: Sequence[Media], recorder: OnPack | None = None
) -> list[Result]:
    """Encode images together and videos together; results in the order of `batch`."""
    results: dict[int, Result] = {}
    packs: list[tuple[Pack, Stopwatch]] = []
    manager.on_pack = lambda pack, watch: packs.append((pack, watch))
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
        for pack, watch in packs:
            fill = pack.tokens / pack.budget if pack.budget else 0.0
            if recorder is not None:
                recorder(pack, watch)
            for position in pack.indices:
                index = chosen[position]
                results[index] = Result(
                    batch[index], outputs[position], pack.budget, fill, watch.seconds()
                )
        packs.clear()
    manager.on_pack = None
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


def write(path: Path, results: Sequence[Result]) -> None:
    """Write one tensor an item, named after its file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    grids: dict[str, str] = {}
    for result in results:
        own = result.media.name.encode(errors="replace").decode()
        name, copies = own, 1
        while name in tensors or name == "__metadata__":  # which safetensors keeps for itself
            copies += 1
            name = f"{own}#{copies}"
        tensors[name] = result.embeddings.contiguous()
        grids[name] = "x".join(map(str, result.media.grid))
    path.touch()  # with the permissions that files get here; safetensors' own are 0600
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata=grids)
    except SafetensorError as error:  # a full disk, say
        raise ValueError(f"--output {path}: {error}") from None
    path.chmod(mode)
