"""Arguments of `vitgraph bench`."""

import argparse
from pathlib import Path

Parser = argparse.ArgumentParser


def add_bench(commands: argparse._SubParsersAction, tower: Parser) -> tuple[Parser, Parser]:
    """Add the command with its two kinds, and return their parsers."""
    bench = commands.add_parser("bench", help="times against vLLM's tower and transformers'")
    kinds = bench.add_subparsers(required=True, metavar="KIND")

    encoder = kinds.add_parser("encoder", parents=[tower], help="named batches, every system")
    _add_options(encoder, ["vitgraph", "vllm", "transformers", "compile"])
    encoder.add_argument("--workloads", nargs="+", default=None, metavar="NAME", help="only these")
    encoder.add_argument("--repeats", type=int, default=100, help="at most, of each (default: 100)")
    encoder.add_argument(
        "--workload-seconds", type=float, default=8, help="at most, for each (default: 8)"
    )

    serving = kinds.add_parser("serving", parents=[tower], help="streams of requests")
    _add_options(serving, ["vitgraph", "vllm"])
    serving.add_argument(
        "--experiments",
        nargs="+",
        choices=["images", "parallel"],
        default=["images", "parallel"],
        help="one image a request; 20 images a request over --ranks (default: both)",
    )
    serving.add_argument(
        "--ranks", type=int, nargs="+", default=[1], help="processes, e.g. 1 2 4 (default: 1)"
    )
    serving.add_argument("--requests", type=int, default=None, help="default: 3000 and 1000")
    serving.add_argument("--warm-up", type=int, default=None, help="default: 300 and 200")
    return encoder, serving


def _add_options(parser: argparse.ArgumentParser, systems: list[str]) -> None:
    every = ["vitgraph", "vllm", "transformers", "compile"]
    parser.add_argument("--systems", nargs="+", choices=every, default=systems)
    parser.add_argument(
        "--attention", nargs="+", default=["auto"], help="of ours, one system each (default: auto)"
    )
    parser.add_argument(
        "--linear-dtype",
        nargs="+",
        choices=["same", "fp8"],
        default=["same"],
        help="of the blocks' layers in ours, one system each (default: same)",
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        default=["FLASH_ATTN", "FLASHINFER"],
        help="attention of vLLM's tower (default: FLASH_ATTN FLASHINFER)",
    )
    parser.add_argument(
        "--sizes",
        type=Path,
        default=None,
        metavar="FILE",
        help="JSON or CSV list of (t, h, w) in patches or (width, height) in pixels, or a folder "
        "of images",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=None,
        help="for everything (default: 440, on a CPU 120; with --requests as long as they take)",
    )
    parser.add_argument(
        "--save", type=Path, default=None, metavar="FILE", help="write FILE as .json, .md and .png"
    )
