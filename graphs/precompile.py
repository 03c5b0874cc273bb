"""`vitgraph precompile`: compile for a GPU that is not here, and show what came out."""

import argparse

import torch
from rich.console import Console
from rich.table import Table

from vitgraph.encoder import GEOMETRIES, VisionConfig
from vitgraph.encoder.precompile import precompile
from vitgraph.graphs.config import powers_of_two
from vitgraph.graphs.encode import checked_geometry
from vitgraph.kernels.offline import ARCHITECTURES


def precompile_command(args: argparse.Namespace, console: Console) -> int:
    """Run the command; the exit status is 1 if a kernel spills registers."""
    import triton

    if args.arch not in ARCHITECTURES:
        raise ValueError(f"--arch {args.arch} is none of {', '.join(ARCHITECTURES)}")
    if triton.knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET is set: interpreted kernels do not compile")
    if args.budgets and min(args.budgets) < 1:
        raise ValueError(f"--budgets {min(args.budgets)} must be at least 1")
    if args.model:
        config = VisionConfig.from_pretrained(args.model)
    else:
        config = GEOMETRIES[checked_geometry(args.geometry)]
    budgets = args.budgets or powers_of_two(64, 8192)
    with console.status(f"compiling for {args.arch}"):
        kernels = precompile(config, args.arch, budgets, dtype=getattr(torch, args.dtype))
    view = Table("kernel", box=None, pad_edge=False)
    for name in ("registers", "stack bytes", "shared KiB"):
        view.add_column(name, justify="right")
    for kernel in sorted(kernels, key=lambda kernel: kernel.name):
        numbers = kernel.registers, kernel.stack_bytes, kernel.shared_bytes // 1024
        view.add_row(kernel.name, *map(str, numbers))
    console.print(view)
    tower = args.model or args.geometry
    sizes = " ".join(map(str, budgets))
    console.print(f"for {tower} in {args.dtype} on {args.arch}, budgets {sizes}", markup=False)
    console.print(f"{len(kernels)} kernels in {triton.knobs.cache.dir}", markup=False)
    return 1 if any(kernel.stack_bytes for kernel in kernels) else 0
