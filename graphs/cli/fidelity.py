"""`vitgraph fidelity`: what a dtype, FP8 or an attention backend costs in accuracy, measured on a
checkpoint and on pictures of one's own, against the same weights in float32."""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch import Tensor

from vitgraph.bench.outputs import check_output
from vitgraph.bench.pictures import new_figure
from vitgraph.bench.report import header
from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.encoder.embeddings import split_embeddings
from vitgraph.graphs.cli.demo import PHOTOS
from vitgraph.graphs.cli.encode import build_encoder
from vitgraph.graphs.media.files import find, named
from vitgraph.graphs.media.loader import MediaLoader
from vitgraph.kernels.fp8.quantize import why_no_e4m3

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Distance:
    """How far one item's embeddings are from the truth, in one part of their columns.

    Attributes:
        item, tokens: which, and how many rows it has.
        variant: what was measured, "bfloat16 triton", say.
        part: "merged" or "deepstack N".
        cosine: mean over the tokens.
        worst_token: the least of them.
        error: relative, by Euclidean norms.
    """

    item: str
    tokens: int
    variant: str
    part: str
    cosine: float
    worst_token: float
    error: float


def fidelity(args: argparse.Namespace, console: Console, errors: Console) -> int:
    """Run the command; returns its exit status: 1 where an item is less alike than --at-least."""
    if args.at_least is not None and not 0 <= args.at_least <= 1:
        raise ValueError(f"--at-least {args.at_least} is no cosine from 0 to 1")
    found = find(named(args.paths or [str(PHOTOS)]), recursive=args.recursive)
    if args.save is not None:
        for suffix in (".json", ".png"):
            check_output("--save", args.save.with_suffix(suffix), found.files)
    loader = MediaLoader(args.model, args.max_pixels)
    truth, variants = _encoders(args, console)
    if "fp8" in args.linear_dtypes and (others := args.dtypes[1:]):
        console.print(f"FP8 beside {args.dtypes[0]} only, not beside {', '.join(others)}")
    if not args.model:
        console.print("random weights prove little about those of a checkpoint", style="yellow")
    levels = len(truth.config.deepstack_visual_indexes)
    distances: list[Distance] = []
    unreadable = 0
    with Progress(console=console, transient=True) as progress:
        for path in progress.track(found.files, description="encoding"):
            try:
                media = loader.load(path)
            except ValueError as error:
                if not args.keep_going:
                    raise
                errors.print(f"left out: {error}", style="red", markup=False)
                unreadable += 1
                continue
            batch = media.pixel_values.to(truth.device), [media.grid]
            expected = truth(*batch)
            for name, encoder in variants.items():
                for part in distances_of(encoder(*batch), expected, levels):
                    distances.append(Distance(media.name, len(expected), name, *part))
    if not distances:
        raise ValueError("no file could be read")
    console.print(table(distances))
    if args.save is not None:
        _save(args.save, distances, args, console)
    return max(_verdict(distances, args.at_least, console), int(unreadable > 0))


def _encoders(
    args: argparse.Namespace, console: Console
) -> tuple[Qwen3VLVisionEncoder, dict[str, Qwen3VLVisionEncoder]]:
    """The truth, torch's own operations in float32, and what is compared with it."""
    exact = argparse.Namespace(**vars(args) | {"dtype": "float32", "attention": "sdpa"})
    with console.status("loading the weights"):
        truth = build_encoder(exact, console, ops="torch")
        variants = {}
        for dtype, attention, linears in product(args.dtypes, args.attention, _linears(args)):
            if linears and dtype != args.dtypes[0]:
                continue
            on_gpu = truth.device.type == "cuda"
            unserved = linears and on_gpu and why_no_e4m3(truth.device)
            encoder = Qwen3VLVisionEncoder(
                truth.config,
                device=truth.device,
                dtype=getattr(torch, dtype),
                attention=attention,
                ops="torch" if unserved else "auto",
                **linears,
            )
            encoder.fp8_min_patches = 0  # what small images get in a pack
            encoder.load_state_dict(truth.state_dict())
            skipped = linears.get("fp8_skip_blocks")
            fp8 = "fp8 " * bool(linears) if not skipped else f"fp8-skip{skipped} "
            variants[f"{dtype} {fp8}{encoder.attention}"] = encoder
    return truth, variants


def _linears(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Options of an encoder: none, and those of FP8 for every number of blocks left out."""
    if "same" in args.linear_dtypes:
        yield {}
    if "fp8" in args.linear_dtypes:
        for skip in args.fp8_skip_blocks:
            yield {"linear_dtype": "fp8", "fp8_skip_blocks": skip}


def distances_of(
    output: Tensor, truth: Tensor, levels: int
) -> Iterator[tuple[str, float, float, float]]:
    """Part, mean and least cosine, and relative error: of the merger's columns and each level's.

    Args:
        output, truth: [tokens, (1 + levels) * width], of any dtype, on one device.
    """
    named = zip(_parts(output, levels), _parts(truth, levels), strict=True)
    for (part, rows), (_, expected) in named:
        rows, expected = rows.double(), expected.double()
        cosines = F.cosine_similarity(rows, expected, dim=1)
        error = (rows - expected).norm() / expected.norm()
        yield part, cosines.mean().item(), cosines.amin().item(), error.item()


def _parts(embeddings: Tensor, levels: int) -> Iterator[tuple[str, Tensor]]:
    merged, deepstack = split_embeddings(embeddings, levels)
    yield "merged", merged
    yield from ((f"deepstack {index}", rows) for index, rows in enumerate(deepstack))


def _groups(distances: Sequence[Distance]) -> dict[tuple[str, str], list[Distance]]:
    groups: dict[tuple[str, str], list[Distance]] = {}
    for distance in distances:
        groups.setdefault((distance.variant, distance.part), []).append(distance)
    return groups


def worst(distances: Sequence[Distance]) -> Distance:
    """The item that is least alike; one with a NaN before all."""
    return min(distances, key=_likeness)


def _likeness(distance: Distance) -> float:
    """Its cosine, to sort by: NaN compares with nothing."""
    return float("-inf") if math.isnan(distance.cosine) else distance.cosine


def table(distances: Sequence[Distance]) -> Table:
    """One row a variant and part: over all items, and the worst item by name."""
    view = Table(box=None, pad_edge=False, header_style="bold")
    view.caption = "error, cosine: means over the items; worst: the item, and its worst token"
    for name in ("variant", "part"):
        view.add_column(name, no_wrap=True)
    for name in ("error", "cosine", "worst", "token"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("worst item", overflow="fold", min_width=12)
    names = _short({distance.item for distance in distances})
    for (variant, part), group in _groups(distances).items():
        least = worst(group)
        mean_error, mean_cosine = (
            sum(getattr(d, what) for d in group) / len(group) for what in ("error", "cosine")
        )
        numbers = (mean_cosine, least.cosine, least.worst_token)
        cells = (f"{mean_error:.2e}", *(f"{number:.6f}" for number in numbers))
        view.add_row(variant, part, *cells, Text(names[least.item]))
    return view


def _short(items: set[str]) -> dict[str, str]:
    """Names of files without their folders, where that tells them apart."""
    names = {item: Path(item).name for item in items}
    return names if len({*names.values()}) == len(items) else {item: item for item in items}


def picture(distances: Sequence[Distance]) -> "Figure | None":
    """Relative error of every item, a panel for each part; None without matplotlib."""
    parts = list(dict.fromkeys(distance.part for distance in distances))
    figure = new_figure(4.2 * len(parts) + 1, 4.5)
    if figure is None:
        return None
    panels = figure.subplots(1, len(parts), squeeze=False, sharey=True)[0]
    for (variant, part), group in _groups(distances).items():
        axes = panels[parts.index(part)]
        tokens, errors = [d.tokens for d in group], [d.error for d in group]
        axes.scatter(tokens, errors, s=18, alpha=0.7, label=variant)
        axes.set(title=part, xlabel="tokens of the item", yscale="log")
    panels[0].set_ylabel("relative error against float32")
    for axes in panels:
        axes.grid(True, which="both", alpha=0.2)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _save(
    path: Path, distances: Sequence[Distance], args: argparse.Namespace, console: Console
) -> None:
    about: dict[str, Any] = header() | {"model": args.model, "at_least": args.at_least}
    rows = [asdict(distance) for distance in distances]
    target = path.with_suffix(".json")
    target.write_text(json.dumps(about | {"distances": rows}, indent=1) + "\n")
    written = [str(target)]
    if (figure := picture(distances)) is not None:
        figure.savefig(path.with_suffix(".png"), dpi=120)
        written.append(str(path.with_suffix(".png")))
    else:
        console.print("no picture: pip install matplotlib")
    console.print(f"wrote {', '.join(written)}", markup=False)


def _verdict(distances: Sequence[Distance], at_least: float | None, console: Console) -> int:
    if at_least is None:
        return 0
    below = [distance for distance in distances if not distance.cosine >= at_least]
    for distance in sorted(below, key=_likeness)[:10]:
        line = f"{distance.item}: {distance.part} of {distance.variant} has cosine"
        console.print(f"{line} {distance.cosine:.6f}, below {at_least:g}", markup=False)
    items = len({distance.item for distance in below})
    every = len({distance.item for distance in distances})
    console.print(f"{every - items} of {every} items are at least {at_least:g} alike")
    return 1 if below else 0
