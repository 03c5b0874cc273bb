"""`vitgraph precompile`: fill Triton's cache without a GPU, so that a first start compiles nothing.

The forward itself is run, on CPU tensors, with launches that compile and do nothing else. Triton
finds the entries again on a GPU machine with the same Triton wheel, the same Python version and the
cache at the same path (TRITON_CACHE_DIR).
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from vitgraph.bench.offline import ARCHITECTURES, CompiledKernel, compiling_for
from vitgraph.bench.options import checked_geometry
from vitgraph.encoder import GEOMETRIES, VisionConfig
from vitgraph.encoder.attention.trial import TAIL
from vitgraph.encoder.model import Qwen3VLVisionEncoder
from vitgraph.encoder.operations import TRITON
from vitgraph.graphs.config import powers_of_two
from vitgraph.graphs.qwen3_vl import EAGER_SHAPES, Qwen3VLGraphModel
from vitgraph.kernels.isolate import isolate
from vitgraph.kernels.layout import Layout


def precompile(
    config: VisionConfig,
    arch: str,
    budgets: Sequence[int],
    *,
    max_items: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    pixel_dtype: torch.dtype | None = None,
    linear_dtype: str = "same",
) -> list[CompiledKernel]:
    """Compile every kernel that a manager with these budgets may capture, and those of eager
    forwards.

    Args:
        arch: one of `ARCHITECTURES`.
        budgets: capacities in tokens.
        max_items: item slots of a replay.
        linear_dtype: "fp8" for an encoder with FP8 layers in every block.

    Returns:
        The kernels with their registers, stack and shared memory.

    Raises:
        ValueError: no budgets, an architecture that is not known here, or one without FP8.
        RuntimeError: kernels are interpreted in this process (TRITON_INTERPRET).
    """
    if not budgets:
        raise ValueError("precompile: no budgets to compile for")
    encoder = Qwen3VLVisionEncoder(
        config, dtype=dtype, ops="torch", pixel_dtype=pixel_dtype, linear_dtype=linear_dtype
    )
    encoder.ops = TRITON
    encoder.plan = replace(encoder.plan, attention="triton")
    with compiling_for(arch) as compiled:
        for budget in budgets:
            patches = budget * config.spatial_merge_size**2
            pixels = torch.empty(patches, config.patch_width, dtype=encoder.pixel_dtype)
            grids = torch.zeros(max_items, 3, dtype=torch.int32)
            out = torch.empty(budget, config.output_width, dtype=dtype)
            layout = encoder.make_layout(grids, patches, budget)
            encoder.encode(pixels, layout, out)  # measured plans have cuBLAS and these kernels
        heads = torch.empty(16, 3, config.num_heads, config.head_dim, dtype=dtype)
        isolate(heads, layout.num_patches, TAIL)  # some attention libraries need it
        model = Qwen3VLGraphModel(encoder)
        for shape in EAGER_SHAPES:
            encoder(model.make_encoder_inputs(shape)["pixel_values"], shape)
        _norms_that_add(encoder, layout)
    return compiled


def _norms_that_add(encoder: Qwen3VLVisionEncoder, layout: Layout) -> None:
    """Those behind layers that cuBLAS computes, which is chosen on a GPU only."""
    width, dtype = encoder.config.hidden_size, encoder.dtype
    unit = encoder.config.spatial_merge_size**2
    for columns, rows in ((width, layout.num_patches), (unit * width, layout.num_tokens)):
        x, vector = torch.empty(16, columns, dtype=dtype), torch.empty(columns, dtype=dtype)
        TRITON.layer_norm(x, vector, vector, num_rows=rows, added=x)
    if encoder.fp8_blocks:
        x = torch.empty(16, width, dtype=dtype)
        TRITON.layer_norm_e4m3(x, num_rows=layout.num_patches, added=x)


def precompile_command(args: argparse.Namespace, console: Console) -> int:
    """Run the command; the exit status is 1 if a kernel spills registers."""
    import triton

    if args.arch not in ARCHITECTURES:
        raise ValueError(f"--arch {args.arch} is none of {', '.join(ARCHITECTURES)}")
    if args.linear_dtype == "fp8" and args.arch in ("sm_80", "sm_86"):
        raise ValueError(f"--linear-dtype fp8: --arch {args.arch} has no FP8, sm_89 is the first")
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
        kernels = precompile(
            config,
            args.arch,
            budgets,
            dtype=getattr(torch, args.dtype),
            linear_dtype=args.linear_dtype,
        )
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
