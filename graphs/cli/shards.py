"""Embeddings on disk: safetensors shards in a folder with an index, or one file.

A shard describes itself, in its metadata: a run that was killed goes on after the last one, without
an index. A single file is made of such shards when the work ends, well or not.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 256 << 20
INDEX = "index.json"
# Holds what is being written, safetensors' own temporary files too: a killed run leaves it behind.
UNFINISHED = ".vitgraph-unfinished"
SETTINGS = "vitgraph"  # key of the metadata that says how all of it was made
RESERVED = {"__metadata__", SETTINGS}  # the former is safetensors' own


def unique_names(names: Iterable[str]) -> list[str]:
    """Each name once: a repeated one, or one that means something else in a file, gets a number."""
    taken, found = set(RESERVED), []
    copies: dict[str, int] = {}
    for name in names:
        own = unique = name.encode(errors="replace").decode()
        while unique in taken:
            copies[own] = copies.get(own, 1) + 1
            unique = f"{own}#{copies[own]}"
        taken.add(unique)
        found.append(unique)
    return found


class EmbeddingWriter:
    """Write items as they are finished; go on where an earlier run with the same settings ended.

    A thread writes one shard while the next is filled.

    Args:
        path: a folder, or a file that ends in .safetensors.
        settings: how the embeddings are made; an output that was made otherwise is refused.
        names: the items of this run; an output that holds others is refused.
        overwrite: replace what an earlier run wrote, from the first shard on.
        shard_bytes: size from which a shard is written.

    Attributes:
        done: items that are on disk, with their facts.

    Raises:
        ValueError: an output that may not be changed, naming it and what it holds.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        names: Iterable[str],
        *,
        overwrite: bool = False,
        shard_bytes: float = SHARD_BYTES,
    ) -> None:
        self.path = path
        self.single = path.suffix == ".safetensors"
        self.folder = path.with_name(path.name + ".partial") if self.single else path
        self.settings = dict(settings)
        self.shard_bytes = shard_bytes
        self.done: dict[str, dict[str, Any]] = {}
        self._shard_of: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._size = 0
        self._stale = overwrite
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._check_folder()
        if not overwrite:
            self._resume(set(names))

    def add(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Keep an item's tensors, on the CPU, and facts; hand on a shard when there is enough.

        Raises:
            ValueError: a full disk, say, perhaps of the shard before; what was written stays.
        """
        self._tensors |= {key: tensor.contiguous() for key, tensor in tensors.items()}
        self._facts[name] = dict(facts)
        self._size += sum(tensor.nbytes for tensor in tensors.values())
        if self._size >= self.shard_bytes:
            self._flush()

    def close(self) -> Path | None:
        """Write the rest, then the index or the one file; None where nothing is new.

        Raises:
            ValueError: as `add`.
        """
        try:
            if self._facts:
                self._flush()
            self._wait()
            if not self.done:
                return None
            new = self._merge() if self.single else self._write_index()
            return self.path if new else None
        except (OSError, SafetensorError) as error:
            raise self._refused(error) from None
        finally:
            self._thread.shutdown()

    def _flush(self) -> None:
        self._wait()
        tensors, facts = self._tensors, self._facts
        self._tensors, self._facts, self._size = {}, {}, 0
        self._writing = self._thread.submit(self._write_shard, tensors, facts)

    def _wait(self) -> None:
        if (writing := self._writing) is not None:
            self._writing = None
            try:
                writing.result()
            except (OSError, SafetensorError) as error:
                raise self._refused(error) from None

    def _refused(self, error: Exception) -> ValueError:
        reason = getattr(error, "strerror", None) or error
        return ValueError(f"--output {self.path}: {reason}; {len(self.done)} items are written")

    def _write_shard(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        shards = self._shards()
        if self._stale:
            for file in (*shards, self.folder / INDEX):
                file.unlink(missing_ok=True)
            shards, self._stale = [], False
        number = int(shards[-1].stem) + 1 if shards else 1
        shard = self.folder / f"{number:06}.safetensors"
        self._save(shard, tensors, facts)
        self.done |= facts
        self._shard_of |= dict.fromkeys(facts, shard.name)

    def _save(self, path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        metadata = {name: json.dumps(about) for name, about in facts.items()}
        metadata[SETTINGS] = json.dumps(self.settings)
        with self._replacing(path) as partial:
            partial.touch()  # with the permissions that files get here; safetensors' own are 0600
            mode = partial.stat().st_mode
            save_file(tensors, partial, metadata=metadata)
            partial.chmod(mode)

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[Path]:
        """A whole file or none: what was written to the yielded path is renamed at the end."""
        folder = self.folder / UNFINISHED
        folder.mkdir(exist_ok=True)
        try:
            yield folder / path.name
            os.replace(folder / path.name, path)
        finally:
            shutil.rmtree(folder)

    def _write_index(self) -> bool:
        """False where it is there, and as it should be."""
        items = {name: {"shard": self._shard_of[name]} | facts for name, facts in self.done.items()}
        content = {"settings": self.settings, "items": items}
        text = json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"
        index = self.folder / INDEX
        if index.exists() and index.read_bytes() == text:
            return False
        with self._replacing(index) as partial:
            partial.write_bytes(text)
        return True

    def _merge(self) -> bool:
        """One file of the shards, and of the file itself where this run goes on from it; False
        where there are none."""
        if not (shards := self._shards()):
            return False
        earlier = [self.path] if self.path.name in self._shard_of.values() else []
        tensors: dict[str, Tensor] = {}
        for file in (*earlier, *shards):
            with safe_open(file, "pt") as opened:
                tensors |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        self._save(self.path, tensors, self.done)
        for file in shards:
            file.unlink()
        self.folder.rmdir()
        return True

    def _shards(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.safetensors"))

    def _check_folder(self) -> None:
        """A folder with something else in it is no output, and stays as it is; of an output, what
        a killed run left goes. A link of that name leads to what is not ours."""
        files = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        unfinished = self.folder / UNFINISHED
        others = [
            file.name
            for file in files
            if not re.fullmatch(rf"{re.escape(INDEX)}|\d{{6}}\.safetensors", file.name)
            and (file != unfinished or file.is_symlink() or not file.is_dir())
        ]
        if others:
            raise ValueError(f"--output {self.folder} holds {others[0]}; name a new folder")
        shutil.rmtree(unfinished, ignore_errors=True)

    def _resume(self, names: set[str]) -> None:
        for file in (*self._shards(), self.path):
            if file.is_file():
                self._take_in(file)
        if others := [name for name in self.done if name not in names]:
            raise ValueError(
                f"--output {self.path} holds {len(others)} items that are not asked for "
                f"({others[0]}); --overwrite replaces it"
            )

    def _take_in(self, file: Path) -> None:
        try:
            with safe_open(file, "pt") as opened:
                facts = {name: json.loads(text) for name, text in opened.metadata().items()}
            settings = facts.pop(SETTINGS)
            if not all(isinstance(about, dict) for about in (settings, *facts.values())):
                raise ValueError("facts are objects")
        except (OSError, SafetensorError, AttributeError, ValueError, KeyError, RecursionError):
            raise ValueError(
                f"--output {file} exists and is none of vitgraph's; --overwrite replaces it"
            ) from None
        for name in {**self.settings, **settings}:
            old, new = settings.get(name), self.settings.get(name)
            if old != new:
                raise ValueError(
                    f"--output {self.path} was made with {name} {old}, not {new}; --overwrite "
                    f"replaces it"
                )
        self.done |= facts
        self._shard_of |= dict.fromkeys(facts, file.name)
