"""Command line: `vitgraph encode`, `demo`, `stats`, `precompile`, `doctor`."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

console = Console()
errors = Console(stderr=True)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 all well, 1 some input failed, 2 nothing could be
    done.
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        errors.print("interrupted", style="red")
        return 130
    except ValueError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2


def _parser() -> argparse.ArgumentParser:
    from vitgraph.encoder import GEOMETRIES

    parser = argparse.ArgumentParser(prog="vitgraph", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", default=None, help="cuda or cpu; the GPU where there is one")
    common.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default=None)
    common.add_argument("--attention", default="auto", help="attention backend (default: auto)")
    common.add_argument(
        "--geometry",
        choices=sorted(GEOMETRIES),
        default=None,
        help="without a model: random weights of this tower (default: 8b on a GPU, 2b on a CPU)",
    )
    common.add_argument(
        "--max-pixels", type=int, default=None, help="largest area of an image or frame"
    )

    encode = commands.add_parser("encode", parents=[common], help="encode images and videos")
    encode.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files or folders")
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
    encode.add_argument("--output", type=Path, default=None, help="write a .safetensors file")
    encode.add_argument(
        "--record", type=Path, default=None, metavar="FILE", help="write the run for `stats`"
    )
    encode.add_argument("--batch-size", type=int, default=8, help="items a batch (default: 8)")
    encode.add_argument(
        "--keep-going", action="store_true", help="report unreadable files and encode the others"
    )
    encode.set_defaults(run=_encode)

    demo = commands.add_parser("demo", parents=[common], help="encode the shipped photographs")
    demo.set_defaults(run=_demo)

    precompile = commands.add_parser(
        "precompile", help="fill Triton's cache for a GPU that is not here"
    )
    precompile.add_argument(
        "--arch", default="sm_90", help="sm_80, sm_86, sm_89, sm_90 (default) or sm_100"
    )
    tower = precompile.add_mutually_exclusive_group()
    tower.add_argument("--geometry", choices=sorted(GEOMETRIES), default="8b")
    tower.add_argument("--model", default=None, help="checkpoint whose config.json to use")
    precompile.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16"
    )
    precompile.add_argument(
        "--budgets", type=int, nargs="+", default=None, metavar="N", help="capacities in tokens"
    )
    precompile.set_defaults(run=_precompile)

    stats = commands.add_parser("stats", help="show a run recorded by `encode --record`")
    stats.add_argument("file", type=Path)
    stats.add_argument("--picture", type=Path, default=None, metavar="IMAGE")
    stats.set_defaults(run=_stats)

    doctor = commands.add_parser("doctor", help="what is installed and what works here")
    doctor.set_defaults(run=_doctor)
    return parser


def _encode(args: argparse.Namespace) -> int:
    from vitgraph.graphs.encode import encode_files

    return encode_files(args, console, errors)


def _demo(args: argparse.Namespace) -> int:
    from vitgraph.graphs.demo import demo

    return demo(args, console)


def _precompile(args: argparse.Namespace) -> int:
    from vitgraph.graphs.precompile import precompile_command

    return precompile_command(args, console)


def _stats(args: argparse.Namespace) -> int:
    from vitgraph.graphs.recording import RunRecorder, picture, table

    run = RunRecorder.load(args.file)
    console.print(table(run))
    if args.picture:
        if not args.picture.parent.is_dir():
            raise ValueError(f"--picture {args.picture}: there is no folder {args.picture.parent}")
        picture(run).savefig(args.picture, dpi=120)
        console.print(f"wrote {args.picture}", markup=False)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from vitgraph.graphs.doctor import doctor

    return doctor(console)


if __name__ == "__main__":
    sys.exit(main())
