"""The systems of `vitgraph bench`, by family: ours, vLLM's tower, transformers'."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from vitgraph.bench.limits import OutOfTime, time_limit
from vitgraph.bench.systems import (
    FP8_TOLERANCE,
    Setup,
    System,
    copy_weights,
    measure_capture,
    synchronize,
)
from vitgraph.bench.workloads import Batch, make_batch
from vitgraph.encoder import Qwen3VLVisionEncoder, VisionConfig
from vitgraph.graphs.config import CompilationConfig
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.graphs.parallel.data_parallel import DataParallelEncoder


def build(
    setup: Setup, families: Sequence[str], deadline: float = float("inf")
) -> tuple[list[System], dict[str, str]]:
    """Make and try what is asked for; families are keys of `FAMILIES`.

    Args:
        deadline: of `time.monotonic`; what is not there by then is missing.

    Returns:
        What works here, and why the rest does not, by name.
    """
    systems: list[System] = []
    missing: dict[str, str] = {}
    batch = make_batch(setup.encoder, [(1, 16, 16), (1, 20, 20)])
    for family in families:
        for name, make in FAMILIES[family](setup).items():
            try:
                with time_limit(deadline - time.monotonic()):
                    made = make()
                    for system in made:
                        if not system.compiles:
                            system.encode(batch)
                    synchronize(setup.encoder.device)
                systems += made
            except OutOfTime:
                missing[name] = "no time left to build it"
            except Exception as error:  # another project's: whatever it is, the others still run
                missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return systems, missing


Makers = dict[str, Callable[[], list[System]]]


def _vitgraph(setup: Setup) -> Makers:
    makers: Makers = {}
    # The reference of the others comes first.
    for linears, attention in product(sorted(setup.linear_dtypes, reverse=True), setup.attention):
        words = ["vitgraph", *[linears] * (linears != "same"), attention]
        name = " ".join(words).removesuffix(" auto")
        makers[name] = partial(_ours, setup, name, attention, linears)
    return makers


def _ours(setup: Setup, name: str, attention: str, linear_dtype: str = "same") -> list[System]:
    config, dtype = setup.encoder.config, setup.encoder.dtype
    encoder = Qwen3VLVisionEncoder(
        config, device="meta", dtype=dtype, attention=attention, linear_dtype=linear_dtype
    )
    encoder.share_weights(setup.encoder)
    encoder.fp8_min_patches = 0  # to see from where on it pays
    compilation = CompilationConfig(True, setup.budgets, setup.max_items)
    manager = EncoderCudaGraphManager(encoder, compilation, log_interval=0)
    captured = measure_capture(manager.capture, encoder.device)

    def replays(batch: Batch) -> list[tuple[int | None, Any]]:
        graphs, budgets = manager.budget_graphs, []
        manager.on_pack = lambda pack, _: budgets.append(pack.budget)
        graph.execute(batch.mm_kwargs)
        manager.on_pack = None
        return [(budget, graphs[budget].graph if budget else None) for budget in budgets]

    eager, graph = (lambda batch: encoder(batch.pixels, batch.grids)), manager
    if setup.ranks > 1:
        alone, graph = DataParallelEncoder(encoder), DataParallelEncoder(manager)
        eager = lambda batch: alone.execute(batch.mm_kwargs)  # noqa: E731
    tolerance = FP8_TOLERANCE if linear_dtype == "fp8" else None
    replay = lambda batch: graph.execute(batch.mm_kwargs)  # noqa: E731
    return [
        System(f"{name} eager", eager, tolerance=tolerance),
        System(f"{name} graph", replay, replays, tolerance=tolerance, **captured),
    ]


def _vllm(setup: Setup) -> Makers:
    from vitgraph.bench.vllm_tower import vllm_systems  # vLLM takes seconds to import

    return {f"vllm {backend}": partial(vllm_systems, setup, backend) for backend in setup.backends}


def _transformers(setup: Setup, name: str = "transformers eager") -> Makers:
    return {name: partial(_theirs, setup, name)}


def _theirs(setup: Setup, name: str) -> list[System]:
    encoder, compiles = setup.encoder, name.endswith("compile")
    tower = transformers_tower(encoder.config, encoder.device, encoder.dtype)
    copy_weights(encoder, tower)
    forward = torch.compile(tower, dynamic=True) if compiles else tower

    @torch.no_grad()
    def encode(batch: Batch) -> Tensor:
        output = forward(batch.pixels, batch.grid_tensor)
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)

    return [System(name, encode, compiles=compiles)]


def transformers_tower(config: VisionConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """transformers' tower of our geometry, its weights random."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3VLVisionModel(Qwen3VLVisionConfig(**config.to_dict())).to(dtype).eval()


FAMILIES: dict[str, Callable[[Setup], Makers]] = {
    "vitgraph": _vitgraph,
    "vllm": _vllm,
    "transformers": _transformers,
    "compile": partial(_transformers, name="transformers compile"),
}
