"""What commands and scripts are told, checked before anything is built."""

import argparse
import math
import re
import sys
from pathlib import Path

import torch

from vitgraph.bench.outputs import check_output
from vitgraph.encoder import GEOMETRIES


def check_options(args: argparse.Namespace) -> None:
    """Refuse what could only fail, or be lost, at the end.

    Raises:
        ValueError: naming the option and what it was given.
    """
    for name, least in (
        ("seconds", 1),
        ("workload_seconds", 0),
        ("repeats", 2),
        ("requests", 1),
        ("warm_up", 0),
    ):
        value = getattr(args, name, None)
        if value is not None and (not math.isfinite(value) or value < least):
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {least}")
    if args.save is None:
        return
    if args.save.is_dir():
        raise ValueError(f"--save {args.save} is a folder, name a file")
    if args.save.suffix not in ("", ".json"):
        raise ValueError(
            f"--save {args.save}: the files end in .json, .md and .png, not {args.save.suffix}"
        )
    try:
        args.save.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--save {args.save}: {error}") from None
    for suffix in (".json", ".md", ".png"):
        check_output("--save", args.save.with_suffix(suffix), filter(None, [args.sizes]))


def require(found: object, what: str) -> None:
    """End a script that cannot work here, before it starts anything.

    Raises:
        SystemExit: with what it needs.
    """
    if not found:
        raise SystemExit(f"error: {Path(sys.argv[0]).name} needs {what}")


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
    geometry = args.geometry or ("8b" if on_gpu else "2b")
    return torch.device(device), dtype, checked_geometry(geometry)


def checked_geometry(name: str) -> str:
    """The name of a published geometry.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in GEOMETRIES:
        raise ValueError(f"--geometry {name} is none of {', '.join(GEOMETRIES)}")
    return name


def use(device: torch.device) -> None:
    """Make a GPU the current one: events and graphs are timed there."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
