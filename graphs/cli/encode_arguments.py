"""Arguments of `vitgraph encode`."""

import argparse
from pathlib import Path


def add_encode(
    commands: argparse._SubParsersAction, common: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """Add the command, and return its parser."""
    encode = commands.add_parser("encode", parents=[common], help="encode images and videos")
    encode.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="files or folders; @FILE takes the names in a file, - those on standard input",
    )
    encode.add_argument(
        "--recursive", action="store_true", help="search the folders of folders, too"
    )
    encode.add_argument(
        "--frames", nargs="+", type=Path, default=[], metavar="DIR", help="folders of video frames"
    )
    encode.add_argument("--model", default=None, help="checkpoint directory or hub repository id")
    encode.add_argument(
        "--compilation-config",
        default='{"cudagraph_mm_encoder": true}',
        metavar="JSON",
        help='e.g. \'{"cudagraph_mm_encoder": true, "encoder_cudagraph_token_budgets": [512]}\'',
    )
    for kind, example in (("image", '"image_mean": [0, 0, 0]'), ("video", '"fps": 1')):
        encode.add_argument(
            f"--{kind}-settings",
            default=None,
            metavar="JSON",
            help=f"of the {kind} processor, instead of the checkpoint's, e.g. '{{{example}}}'",
        )
    encode.add_argument(
        "--preprocess",
        choices=["cpu", "gpu"],
        default="cpu",
        help="where images are resized (default: cpu; gpu: off by two levels of 255 at most)",
    )
    encode.add_argument(
        "--workers", type=int, default=None, help="processes that read files (default: up to 16)"
    )
    encode.add_argument(
        "--output",
        type=Path,
        default=None,
        help="write a .safetensors file, or a folder of shards for large jobs; what an earlier "
        "run wrote there is not encoded again",
    )
    encode.add_argument(
        "--shard-size", type=float, default=256, metavar="MIB", help="of a shard (default: 256)"
    )
    encode.add_argument(
        "--overwrite", action="store_true", help="replace what --output already holds"
    )
    encode.add_argument(
        "--tensors",
        choices=["joined", "split", "merged"],
        default="joined",
        help="of an item: all columns, one tensor for each deepstack level, or none of those",
    )
    encode.add_argument(
        "--record", type=Path, default=None, metavar="FILE", help="write the run for `stats`"
    )
    encode.add_argument("--batch-size", type=int, default=8, help="items a batch (default: 8)")
    encode.add_argument(
        "--keep-going", action="store_true", help="report unreadable files and encode the others"
    )
    return encode
