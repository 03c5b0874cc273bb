"""Fill Triton's cache for a geometry without a GPU, so that a first start compiles nothing.

The forward itself is run, on CPU tensors, with launches that compile and do nothing else. Triton
finds the entries again on a GPU machine with the same Triton wheel, the same Python version and the
cache at the same path (TRITON_CACHE_DIR).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from vitgraph.encoder.config import VisionConfig
from vitgraph.encoder.model import Qwen3VLVisionEncoder
from vitgraph.encoder.operations import LAYERS, TRITON
from vitgraph.kernels.offline import CompiledKernel, compiling_for


def precompile(
    config: VisionConfig,
    arch: str,
    budgets: Sequence[int],
    *,
    max_items: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    pixel_dtype: torch.dtype | None = None,
) -> list[CompiledKernel]:
    """Compile every kernel that a manager with these budgets may capture.

    Eager forwards of other sizes share most of them; one with many short sequences or with more
    than `max_items` items may still compile a kernel of its own.

    Args:
        arch: "sm_80", "sm_90", "sm_100".
        budgets: capacities in tokens.
        max_items: item slots of a replay.

    Returns:
        The kernels with their registers, stack and shared memory.

    Raises:
        RuntimeError: kernels are interpreted in this process (TRITON_INTERPRET).
    """
    encoder = Qwen3VLVisionEncoder(config, dtype=dtype, ops="torch", pixel_dtype=pixel_dtype)
    encoder.ops = TRITON
    default = replace(encoder.plan, attention="triton")
    plans = [default, replace(default, providers=dict.fromkeys(LAYERS, "triton"))]
    with compiling_for(arch) as compiled:
        for budget in budgets:
            patches = budget * config.spatial_merge_size**2
            for plan in plans:
                pixels = torch.empty(patches, config.patch_width, dtype=encoder.pixel_dtype)
                grids = torch.zeros(max_items, 3, dtype=torch.int32)
                layout = encoder.make_layout(grids, patches, budget)
                out = torch.empty(budget, config.output_width, dtype=dtype)
                encoder.encode(pixels, layout, out, plan)
    return compiled
