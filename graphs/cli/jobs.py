"""`vitgraph encode`: files through loader, encoder and writer; what is finished is kept."""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from vitgraph.bench.options import choose
from vitgraph.bench.outputs import check_output
from vitgraph.encoder.embeddings import split_embeddings
from vitgraph.graphs.cli.encode import build_manager, summary, table
from vitgraph.graphs.cli.shards import EmbeddingWriter, unique_names
from vitgraph.graphs.cli.stats import RunRecorder
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.graphs.media.encoding import Result, run
from vitgraph.graphs.media.files import Found, find, named
from vitgraph.graphs.media.loader import Media, MediaLoader, Picture
from vitgraph.graphs.media.loading import Unreadable, default_workers, read_all

MOST_ROWS = 50  # of the printed table; a larger job is summed up
REPORT_SECONDS = 30  # between lines of progress, where there is no terminal for a bar


def encode_files(args: argparse.Namespace, console: Console, errors: Console) -> int:
    """Run the command; returns its exit status."""
    _check_numbers(args)
    found = find(named(args.paths), args.frames, recursive=args.recursive)
    if not found.files:
        raise ValueError("nothing to encode: name files or folders")
    _check_outputs(args, found.files)
    files = dict(zip(unique_names(map(str, found.files)), found.files, strict=True))
    device, dtype, geometry = choose(args)
    if args.preprocess == "gpu" and device.type == "cpu":
        raise ValueError("--preprocess gpu: the encoder runs on the CPU")
    loader = MediaLoader(
        args.model,
        args.max_pixels,
        image=_settings("--image-settings", args.image_settings),
        video=_settings("--video-settings", args.video_settings),
        device=device if args.preprocess == "gpu" else "cpu",
    )
    writer = None
    if args.output:
        made = _how(args, loader, geometry, dtype)
        size = args.shard_size * 2**20
        writer = EmbeddingWriter(
            args.output, made, files, overwrite=args.overwrite, shard_bytes=size
        )
        if done := writer.done:
            console.print(f"{len(done)} of {len(files)} are in {args.output} already", markup=False)
            files = {name: path for name, path in files.items() if name not in done}
    job = Job(args, loader, writer, files, console, errors)
    try:
        if files:
            job.run()
    finally:
        if writer is not None and (written := writer.close()):
            console.print(f"wrote {written}", markup=False)
        _tell_left_out(found, errors)
    if job.failed:
        errors.print(f"{job.failed} of {len(files)} files could not be read", style="yellow")
    return 1 if job.failed else 0


class Job:
    """Files on their way through loader, encoder and writer."""

    def __init__(
        self,
        args: argparse.Namespace,
        loader: MediaLoader,
        writer: EmbeddingWriter | None,
        files: dict[str, Path],
        console: Console,
        errors: Console,
    ) -> None:
        self.args, self.loader, self.writer, self.files = args, loader, writer, files
        self.console, self.errors = console, errors
        self.failed = self.encoded = 0
        self.recorder = RunRecorder() if args.record else None
        self.rows: list[Result] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def run(self) -> None:
        """Encode everything and say how it went.

        Raises:
            ValueError: the first unreadable file, unless --keep-going, once those before it are
                encoded.
        """
        args, few = self.args, len(self.files) <= MOST_ROWS
        device, dtype, _ = choose(args)
        workers = default_workers(len(self.files), device) if args.workers is None else args.workers
        paths, pin = list(self.files.values()), device.type == "cuda"
        if not args.keep_going and (gone := [path for path in paths if not path.exists()]):
            raise ValueError(f"{gone[0]}: no such file")  # told before weights are loaded
        items = read_all(self.loader, paths, workers, pin=pin)
        manager = build_manager(args, self.console)
        started = time.perf_counter()
        try:
            with self._progress() as advance:
                pairs = zip(self.files, self._timed("waiting for files", items), strict=True)
                while batch := list(islice(pairs, args.batch_size)):
                    self._encode(manager, dtype, batch)
                    advance(len(batch))
        finally:
            if few:
                self.console.print(table(self.rows, graphs=manager.device.type == "cuda"))
            self.console.print(summary(manager))
            self._say_where_time_went(time.perf_counter() - started)
            if self.recorder is not None:
                _save(args.record, self.recorder)

    def _encode(
        self,
        manager: EncoderCudaGraphManager,
        dtype: torch.dtype,
        batch: list[tuple[str, Media | Picture | Unreadable]],
    ) -> None:
        names: list[str] = []
        media: list[Media] = []
        unreadable: Unreadable | None = None
        with self._clock("encoding"):
            for name, item in batch:
                if not isinstance(item, Unreadable):
                    try:
                        media.append(self.loader.finish(item, dtype, manager.device))
                        names.append(name)
                        continue
                    except ValueError as error:
                        item = Unreadable(self.files[name], str(error))
                unreadable = item
                if not self.args.keep_going:
                    break
                self.failed += 1
                text = f"skipped {item.reason}"
                self.errors.print(text, style="yellow", markup=False, soft_wrap=True)
            results = [_on_the_host(result) for result in run(manager, media, self.recorder)]
        with self._clock("writing"):
            for name, result in zip(names, results, strict=True):
                self._keep(manager, name, result)
        if unreadable is not None and not self.args.keep_going:
            raise ValueError(unreadable.reason)

    def _keep(self, manager: EncoderCudaGraphManager, name: str, result: Result) -> None:
        self.encoded += 1
        if self.writer is not None:
            levels = len(manager.model.module.config.deepstack_visual_indexes)
            tensors = _tensors(name, result.embeddings, levels, self.args.tensors)
            self.writer.add(name, tensors, _facts(result.media))
        if len(self.files) <= MOST_ROWS:
            self.rows.append(result)

    def _timed(self, what: str, items: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._clock(what):
                item = next(items, self)
            if item is self:
                return
            yield item

    @contextmanager
    def _clock(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - started

    def _say_where_time_went(self, seconds: float) -> None:
        parts = ", ".join(f"{what} {took / seconds:.0%}" for what, took in self.seconds.items())
        rate = f"{self.encoded / seconds:.1f} a second"
        self.console.print(f"{self.encoded} in {seconds:.1f} s, {rate}: {parts}", highlight=False)

    @contextmanager
    def _progress(self) -> Iterator[Any]:
        """A bar with rate and time left; lines of them where there is no terminal."""
        total, started = len(self.files), time.monotonic()
        columns = (
            TextColumn("encoding"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.1f}/s"),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=self.console, transient=True)
        task = bar.add_task("encoding", total=total, rate=0.0)
        told, done = started, 0

        def advance(count: int) -> None:
            nonlocal told, done
            now = time.monotonic()
            done += count
            rate = done / max(now - started, 1e-9)
            bar.update(task, advance=count, rate=rate)
            if not self.console.is_terminal and now - told > REPORT_SECONDS and done < total:
                told = now
                left = (total - done) / rate
                self.console.print(f"{done} of {total}, {rate:.1f} a second, {left:.0f} s left")

        with bar:
            yield advance


def _check_numbers(args: argparse.Namespace) -> None:
    for option, least in (("batch_size", 1), ("workers", 0), ("shard_size", 0)):
        value = getattr(args, option)
        if value is not None and not value >= least:
            raise ValueError(f"--{option.replace('_', '-')} {value} must be at least {least}")


def _check_outputs(args: argparse.Namespace, files: Iterable[Path]) -> None:
    if args.output and args.output.suffix not in ("", ".safetensors"):
        raise ValueError(f"--output {args.output} is neither a .safetensors file nor a folder")
    if args.output and args.output.suffix:
        check_output("--output", args.output, files)
    elif args.output and not args.output.is_dir():
        check_output("--output", args.output)
        if args.output.exists():
            raise ValueError(f"--output {args.output} is a file, name a folder or a .safetensors")
    check_output("--record", args.record, [*files, *filter(None, [args.output])])


def _settings(option: str, text: str | None) -> dict[str, Any]:
    try:
        settings = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{option} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{option} must be a JSON object, got {settings!r:.80}")
    return settings


def _how(
    args: argparse.Namespace, loader: MediaLoader, geometry: str, dtype: torch.dtype
) -> dict[str, Any]:
    """What makes embeddings what they are, as JSON gives it back."""
    made = {
        "model": args.model or f"random weights, {geometry}",
        "dtype": str(dtype).removeprefix("torch."),
        "tensors": args.tensors,
        "preprocess": args.preprocess,
        "max_pixels": args.max_pixels,
        "image": asdict(loader.image_settings),
        "video": asdict(loader.video_settings),
        "linear_dtype": args.linear_dtype,
        "fp8_skip_blocks": args.fp8_skip_blocks,
    }
    return json.loads(json.dumps(made))


def _on_the_host(result: Result) -> Result:
    """Only what is shown and written, and that not on the GPU."""
    media = replace(result.media, pixel_values=torch.empty(0))
    return replace(result, media=media, embeddings=result.embeddings.cpu())


def _tensors(name: str, embeddings: Tensor, levels: int, choice: str) -> dict[str, Tensor]:
    if choice == "joined":
        return {name: embeddings}
    merged, deepstack = split_embeddings(embeddings, levels)
    if choice == "merged":
        deepstack = ()
    return {name: merged} | {f"{name}#deepstack{i}": level for i, level in enumerate(deepstack)}


def _facts(media: Media) -> dict[str, Any]:
    facts = {"modality": media.modality, "grid": list(media.grid)}
    return facts | ({"timestamps": list(media.timestamps)} if media.timestamps else {})


def _save(path: Path, recorder: RunRecorder) -> None:
    try:
        recorder.save(path)
    except OSError as error:
        raise ValueError(f"--record {path}: {error.strerror}") from None


def _tell_left_out(found: Found, errors: Console) -> None:
    for files, what in (
        (found.left_out, "left out, no image or video by name"),
        (found.folders, "left out, folders in folders (--recursive takes them)"),
        (found.loops, "left out, links in a circle"),
    ):
        if files:
            names = ", ".join(str(file) for file in files[:10])
            more = f" and {len(files) - 10} more" if len(files) > 10 else ""
            text = f"{what}: {names}{more}"
            errors.print(text, style="yellow", markup=False, soft_wrap=True)
