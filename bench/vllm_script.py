"""What the scripts that run engines of vLLM have in common: options, the engine's own process, a
model."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from vitgraph.bench.options import require

MODES = ("graph", "eager")


def parse_arguments(
    parser: argparse.ArgumentParser,
    run_engine: Callable[[dict], None],
    *,
    backends: Sequence[str],
    seconds: float,
    engine_seconds: float = 240,
    modes: Sequence[str] = MODES,
) -> argparse.Namespace:
    """Add the options that all have and read them; with `--engine` this process is an engine, and
    ends here."""
    parser.add_argument("--model", type=Path, default=None, help="default: a dummy checkpoint")
    parser.add_argument("--geometry", default="8b", help="of the dummy's tower")
    parser.add_argument(
        "--family",
        default="Qwen3VLForConditionalGeneration",
        help="class of the dummy; Qwen3_5ForConditionalGeneration with --geometry qwen3.5-9b",
    )
    parser.add_argument("--backends", nargs="+", default=list(backends))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(modes))
    parser.add_argument("--gpus", type=int, default=1, help="used by engines side by side")
    parser.add_argument("--at-once", type=int, default=3, help="engines that share a GPU")
    parser.add_argument("--seconds", type=float, default=seconds, help="for everything")
    parser.add_argument(
        "--engine-seconds", type=float, default=engine_seconds, help="for one engine"
    )
    parser.add_argument(
        "--only", nargs="+", default=None, help='engines by name: "FLASH_ATTN graph vllm"'
    )
    parser.add_argument("--save", type=Path, default=None, help="JSON, written as it grows")
    parser.add_argument("--engine", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        run_engine(json.loads(args.engine))
        sys.stdout.flush()
        os._exit(0)  # vLLM's own ending takes seconds
    require(find_spec("vllm"), "vLLM, and it is not installed")
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
    return args


@contextlib.contextmanager
def work_folder(args: argparse.Namespace) -> Iterator[tuple[Path, str]]:
    """A folder for the time of the run, and the model: the one named, or a dummy in there."""
    with tempfile.TemporaryDirectory() as folder:
        work, model = Path(folder), args.model
        if model is None:
            from vitgraph.bench.dummy_model import write_model

            model = write_model(work / "model", args.geometry, args.family)
        yield work, str(model)
