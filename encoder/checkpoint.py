"""Checkpoint files, local or on the hub, and the vision tower's tensors inside them.

Naming is kept out of the model: checkpoints prefix the tower (one that was saved alone has no
prefix), store the patch embedding as a Conv3d kernel, and Qwen3-Omni's name the parts of mergers
otherwise.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import get_session
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitgraph.encoder.quantized import (
    SUPPORTED,
    Stored,
    companions,
    dequantize,
    scale_name,
    why_not_read,
)

# Qwen3-VL's and Qwen3.5's, those that were saved without the outermost model, Qwen3-Omni's, and
# those of retrieval models with a model inside.
PREFIXES = ("model.visual.", "visual.", "thinker.visual.", "vlm.model.visual.", "")
# What Qwen3-Omni calls the parts of a merger.
_OMNI_MERGER = re.compile(r"^(merger|merger_list\.\d+)\.(ln_q|mlp\.0|mlp\.1|mlp\.2)(?=\.|$)")
_PARTS = {"ln_q": "norm", "mlp.0": "linear_fc1", "mlp.1": "act_fn", "mlp.2": "linear_fc2"}
# Stored as a [C, 3, 2, 16, 16] kernel, used as [C, 1536].
PATCH_EMBED = "patch_embed.proj.weight"
HUB_SECONDS = 5
DTYPES = ("BF16", "F16", "F32", "F64")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A named set of files; `fetch` returns a local path or raises FileNotFoundError."""

    name: str
    fetch: Callable[[str], Path]

    def file(self, filename: str) -> Path:
        """Local path of a file that must exist."""
        try:
            return self.fetch(filename)
        except FileNotFoundError:
            raise ValueError(f"{self.name} is no checkpoint: it has no {filename}") from None

    def open(self, filename: str) -> Any:
        """A safetensors file, opened."""
        path = self.file(filename)
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{self.name}: {filename} is no safetensors file: {error}") from None

    def json(self, filename: str) -> dict[str, Any] | None:
        """The object in a JSON file; None where there is no such file."""
        try:
            text = self.fetch(filename).read_bytes()
        except FileNotFoundError:
            return None
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.name}: {filename} is no JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{self.name}: {filename} is no JSON object but {content!r:.50}")
        return content

    def processor_settings(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Settings of the image and of the video processor, where there are any."""

        # transformers 5 writes one file for all processors, and prefers it
        together = self.json("processor_config.json") or {}
        image = together.get("image_processor") or self.json("preprocessor_config.json")
        video = together.get("video_processor") or self.json("video_preprocessor_config.json")
        image, video = (one if isinstance(one, dict) else None for one in (image, video))
        return image, video

    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file name, of every tensor of the checkpoint."""
        if (index := self.json(INDEX)) is not None:
            weight_map = index.get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{self.name}: {INDEX} has no weight_map")
            if not all(map(_is_plain, weight_map.values())):
                raise ValueError(f"{self.name}: {INDEX} names a file outside the checkpoint")
            return weight_map
        try:
            self.fetch(SINGLE)
        except FileNotFoundError:
            raise ValueError(
                f"{self.name} has no weights: neither {INDEX} nor {SINGLE} is there"
            ) from None
        with self.open(SINGLE) as tensors:
            return dict.fromkeys(tensors.keys(), SINGLE)


def our_name(name: str) -> str:
    """What our modules call a tensor or module of a tower; only Qwen3-Omni's mergers have other
    names, and the fused product in SGLang."""
    name = _OMNI_MERGER.sub(lambda found: f"{found[1]}.{_PARTS[found[2]]}", name)
    name = re.sub(r"\battn\.qkv_proj\b", "attn.qkv", name)
    return re.sub(r"^merger_list\b", "deepstack_merger_list", name)


def open_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Find a checkpoint: a local directory if `model` names one, a hub repository otherwise.

    Raises:
        ValueError: `model` is neither an existing directory nor a repository id.
    """
    directory = Path(model)
    if directory.is_dir():

        def local(filename: str) -> Path:
            if not (directory / filename).is_file():
                raise FileNotFoundError(filename)
            return directory / filename

        return Checkpoint(str(directory), local)
    if directory.exists():
        raise ValueError(f"{model} is a file; a checkpoint is a directory or a hub repository id")

    answers = cache(_hub_answers)  # asked once, when the first file is wanted

    def hub(filename: str) -> Path:
        try:
            path = hf_hub_download(
                str(model), filename, revision=revision, local_files_only=not answers()
            )
            return Path(path)
        except LocalEntryNotFoundError:
            raise ValueError(
                f"{model} is no directory here, the hub cannot be reached, and {filename} is not "
                f"cached"
            ) from None
        except EntryNotFoundError as error:
            raise FileNotFoundError(filename) from error
        except RepositoryNotFoundError:
            raise ValueError(
                f"{model} is no directory here, and no repository on the hub"
            ) from None
        except HFValidationError:
            raise ValueError(f"{model} is neither a directory nor a hub repository id") from None

    return Checkpoint(str(model), hub)


def _hub_answers() -> bool:
    """Whether anything does; a download would try for half a minute before it gives up."""
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except (httpx.HTTPError, OfflineModeIsEnabled):
        return False
    return True


def load_vision_weights(
    module: nn.Module, checkpoint: Checkpoint, kernel: tuple[int, int] = (3, 2)
) -> None:
    """Copy the tower's tensors into `module`, opening only the shards that hold them; weights in
    e4m3 are multiplied by their scales (encoder/quantized.py).

    Everything is compared before anything is copied.

    Args:
        kernel: channels and frames of the patch embedding's kernel.

    Raises:
        ValueError: one message that lists missing, unexpected and mis-shaped tensors.
    """
    parameters = dict(module.named_parameters())
    weight_map = checkpoint.weight_map()
    prefixes = [p for p in PREFIXES if f"{p}patch_embed.proj.weight" in weight_map]
    if not prefixes:
        raise ValueError(
            f"{checkpoint.name} holds no vision tower: none of its {len(weight_map)} tensors is "
            f"{' or '.join(f'{p}patch_embed.proj.weight' for p in PREFIXES)}"
        )
    if len(prefixes) > 1:
        raise ValueError(
            f"{checkpoint.name} holds {len(prefixes)} vision towers, and nothing says which to "
            f"take: {' and '.join(f'{p}patch_embed.proj.weight' for p in prefixes)}"
        )
    (prefix,), twice = prefixes, []
    stored_names: dict[str, str] = {}
    for name in filter(lambda name: name.startswith(prefix), weight_map):
        other = stored_names.setdefault(our_name(name.removeprefix(prefix)), name)
        if other != name:
            twice.append(f"{other} and {name} are the same tensor under two names")
    files = {name: weight_map[stored] for name, stored in stored_names.items()}
    quantized = companions(files, parameters)
    beside = {name for names in quantized.values() for name in names.values()}
    missing = parameters.keys() - files.keys() - quantized.keys()
    problems = twice + [f"missing {name}" for name in sorted(missing)]
    problems += [f"unexpected {name}" for name in sorted(files.keys() - parameters.keys() - beside)]
    common = sorted(parameters.keys() & files.keys())
    with ExitStack() as stack:
        shards = {
            file: stack.enter_context(checkpoint.open(file))
            for file in sorted({files[name] for name in [*common, *beside]})
        }
        found: dict[str, Stored] = {}
        for name in [*common, *sorted(beside)]:
            if stored_names[name] not in shards[files[name]].keys():  # noqa: SIM118 - not a dict
                problems.append(f"missing {name} (the index names {files[name]})")
                continue
            stored = shards[files[name]].get_slice(stored_names[name])
            found[name] = Stored(stored.get_dtype(), tuple(stored.get_shape()))
        problems += _misfits(parameters, found, quantized, kernel)
        if problems:
            raise ValueError(
                f"{checkpoint.name} does not fit the vision config: {'; '.join(problems)}"
            )

        def read(name: str) -> Tensor:
            return shards[files[name]].get_tensor(stored_names[name])

        with torch.no_grad():
            for name in common:
                tensor = read(name)
                if name in quantized:
                    tensor = dequantize(tensor, read(scale_name(quantized[name])))
                parameters[name].copy_(tensor.reshape(parameters[name].shape))


def _misfits(
    parameters: dict[str, nn.Parameter],
    found: dict[str, Stored],
    quantized: dict[str, dict[str, str]],
    kernel: tuple[int, int],
) -> Iterator[str]:
    """What is wrong with the tensors that are there; of quantised weights the first is named."""
    unread = []
    for name in sorted(parameters.keys() & (found.keys() | quantized.keys())):
        beside = quantized.get(name, {})
        float8 = name in found and found[name].dtype.startswith("F8")
        if beside or (float8 and name.endswith(".weight")):
            if reason := why_not_read(name, beside, found, DTYPES):
                unread.append(reason)
                continue
        elif found[name].dtype not in DTYPES:
            yield f"{name} has dtype {found[name].dtype}, not {' or '.join(DTYPES)}"
        shape, wanted = found[name].shape, tuple(parameters[name].shape)
        if name == PATCH_EMBED and len(shape) == 5 and shape[1:3] == kernel:
            shape = (shape[0], math.prod(shape[1:]))
        if shape != wanted:
            yield f"{name} has shape {shape}, the config wants {wanted}"
    if unread:
        others = f" (and {len(unread) - 1} more like it)" if len(unread) > 1 else ""
        yield f"{unread[0]}{others}: {SUPPORTED}"


def _is_plain(file: object) -> bool:
    """Whether an index's file name stays inside the checkpoint."""
    return isinstance(file, str) and not {"..", "/"} & set(PurePosixPath(file).parts)
