"""Command line: `vitgraph encode`, `demo`, `fidelity`, `stats`, `precompile`, `bench`, `doctor`.

torch is imported when a command needs it: help and mistakes answer at once.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vitgraph.bench.console import make_console
from vitgraph.graphs.cli.bench_arguments import add_bench
from vitgraph.graphs.cli.encode_arguments import add_encode

DTYPES = ("bfloat16", "float16", "float32")
console = make_console()
errors = make_console(stderr=True)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 all well, 1 some input failed, 2 nothing could be
    done.
    """
    try:
        args = _parser().parse_args(argv)
        return args.run(args)
    except KeyboardInterrupt:
        errors.print("interrupted", style="red")
        return 130
    except (ValueError, OSError) as error:  # OSError: a full disk, say
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2


def _version() -> str:
    try:
        return version("vitgraph")
    except PackageNotFoundError:
        return "(not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vitgraph", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    place = argparse.ArgumentParser(add_help=False)
    place.add_argument("--device", default=None, help="cuda or cpu; the GPU where there is one")
    place.add_argument(
        "--geometry",
        default=None,
        help="without a model: random weights of this tower, e.g. 4b (default: 8b, on a CPU 2b)",
    )
    tower = argparse.ArgumentParser(add_help=False, parents=[place])
    tower.add_argument("--dtype", choices=DTYPES, default=None)
    common = argparse.ArgumentParser(add_help=False, parents=[tower])
    common.add_argument("--attention", default="auto", help="attention backend (default: auto)")
    common.add_argument(
        "--max-pixels", type=int, default=None, help="largest area of an image or a video frame"
    )
    common.add_argument(
        "--linear-dtype",
        choices=["same", "fp8"],
        default="same",
        help="of the blocks' layers, fp8 in packs of over 2048 patches (default: same)",
    )
    common.add_argument(
        "--fp8-skip-blocks",
        type=int,
        default=0,
        metavar="N",
        help="with fp8: the first N blocks keep the encoder's dtype (default: 0)",
    )

    encode = add_encode(commands, common)
    encode.set_defaults(run=_encode)

    demo = commands.add_parser("demo", parents=[common], help="encode the shipped photographs")
    demo.set_defaults(run=_demo)

    fidelity = commands.add_parser(
        "fidelity", parents=[place], help="what a dtype or a backend costs in accuracy"
    )
    fidelity.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="images, videos and folders, as of encode (default: the shipped photographs)",
    )
    fidelity.add_argument("--recursive", action="store_true", help="search the folders of folders")
    fidelity.add_argument("--model", default=None, help="checkpoint directory or hub repository id")
    fidelity.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=DTYPES[:2],
        help="to compare with float32 (default: bfloat16 float16)",
    )
    fidelity.add_argument(
        "--attention", nargs="+", default=["auto"], help="backends to compare (default: auto)"
    )
    fidelity.add_argument(
        "--linear-dtypes",
        nargs="+",
        choices=["same", "fp8"],
        default=["same", "fp8"],
        help="of the blocks' layers; fp8 beside the first of --dtypes (default: same fp8)",
    )
    fidelity.add_argument(
        "--fp8-skip-blocks",
        nargs="+",
        type=int,
        default=[0],
        metavar="N",
        help="blocks that stay in that dtype, one variant each (default: 0)",
    )
    fidelity.add_argument(
        "--max-pixels", type=int, default=None, help="largest area of an image or a video frame"
    )
    fidelity.add_argument(
        "--at-least",
        type=float,
        default=None,
        metavar="COSINE",
        help="exit with status 1 where an item, in the mean over its tokens, is less alike",
    )
    words = "write FILE as .json and .png"
    fidelity.add_argument("--save", type=Path, default=None, metavar="FILE", help=words)
    fidelity.add_argument(
        "--keep-going", action="store_true", help="report unreadable files and go on"
    )
    fidelity.set_defaults(run=_fidelity)

    precompile = commands.add_parser(
        "precompile", help="fill Triton's cache for a GPU that is not here"
    )
    precompile.add_argument(
        "--arch", default="sm_90", help="sm_80, 86, 89, 90 (default), 100 or 120, e.g. sm_90"
    )
    source = precompile.add_mutually_exclusive_group()
    source.add_argument("--geometry", default="8b", help="of the tower (default: 8b)")
    source.add_argument("--model", default=None, help="checkpoint whose config.json to use")
    precompile.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    words = "fp8: of an encoder with FP8 layers in every block; if some are skipped, run both"
    precompile.add_argument("--linear-dtype", choices=["same", "fp8"], default="same", help=words)
    precompile.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=None,
        metavar="N",
        help="capacities in tokens (default: powers of two from 64 to 8192)",
    )
    precompile.set_defaults(run=_precompile)

    stats = commands.add_parser("stats", help="show a run recorded by `encode --record`")
    stats.add_argument("file", type=Path)
    stats.add_argument("--picture", type=Path, default=None, metavar="IMAGE")
    stats.set_defaults(run=_stats)

    encoder, serving = add_bench(commands, tower)
    encoder.set_defaults(run=_bench_encoder)
    serving.set_defaults(run=_bench_serving)

    doctor = commands.add_parser("doctor", help="what is installed and what works here")
    doctor.set_defaults(run=_doctor)
    return parser


@contextmanager
def _importing() -> Iterator[None]:
    """Ctrl-C while torch and others are imported ends the process at once: there is nothing to
    save, and a half-imported library would answer it with a traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _bench_encoder(args: argparse.Namespace) -> int:
    with _importing():
        from vitgraph.bench.encoder import bench_encoder

    return bench_encoder(args, console)


def _bench_serving(args: argparse.Namespace) -> int:
    with _importing():
        from vitgraph.bench.serving import bench_serving

    return bench_serving(args, console)


def _encode(args: argparse.Namespace) -> int:
    with _importing():
        from vitgraph.graphs.cli.jobs import encode_files

    return encode_files(args, console, errors)


def _demo(args: argparse.Namespace) -> int:
    with _importing():
        from vitgraph.graphs.cli.demo import demo

    return demo(args, console)


def _fidelity(args: argparse.Namespace) -> int:
    with _importing():
        from vitgraph.graphs.cli.fidelity import fidelity

    return fidelity(args, console, errors)


def _precompile(args: argparse.Namespace) -> int:
    with _importing():
        from vitgraph.graphs.cli.precompile import precompile_command

    return precompile_command(args, console)


def _doctor(args: argparse.Namespace) -> int:
    with _importing():
        from vitgraph.graphs.cli.doctor import doctor

    return doctor(console)


def _stats(args: argparse.Namespace) -> int:
    from vitgraph.bench.outputs import check_output
    from vitgraph.graphs.cli.stats import RunRecorder, picture, table

    check_output("--picture", args.picture, [args.file])
    run = RunRecorder.load(args.file)
    console.print(table(run))
    if args.picture:
        picture(run).savefig(args.picture, dpi=120)
        console.print(f"wrote {args.picture}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
