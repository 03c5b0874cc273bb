"""What is compared: ways to encode a batch, all on copies of one encoder's weights."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.graphs.benchmark.limits import OutOfTime, time_limit
from vitgraph.graphs.benchmark.workloads import BUDGETS, MAX_ITEMS, Batch, make_batch
from vitgraph.graphs.config import CompilationConfig
from vitgraph.graphs.data_parallel import DataParallelEncoder
from vitgraph.graphs.manager import EncoderCudaGraphManager

# Two evaluations of 27 layers that round in different places differ by about 1 % in bf16.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass
class System:
    """One way to encode.

    Attributes:
        name: "vitgraph graph", say.
        encode: from a batch to its rows, whole or by item; this is what is timed.
        replays: budget and graph of every replay of the last call. A budget of None stands for what
            ran eagerly; the graph is None then, and on a CPU.
        capture_s, memory_mib: what it took to capture.
        compiles: the first call of every shape may take a minute.
    """

    name: str
    encode: Callable[[Batch], Tensor | Sequence[Tensor]]
    replays: Callable[[], list[tuple[int | None, Any]]] = list
    capture_s: float = 0.0
    memory_mib: float = 0.0
    compiles: bool = False


@dataclass(frozen=True)
class Setup:
    """What all systems are built for.

    Attributes:
        encoder: whose weights, device and dtype are used.
        budgets, max_items: of every graph manager.
        attention: backends of ours to try.
        backends: attention backends of vLLM's to try.
        ranks: of the default process group that a batch is spread over.
    """

    encoder: Qwen3VLVisionEncoder
    budgets: tuple[int, ...] = BUDGETS
    max_items: int = MAX_ITEMS
    attention: tuple[str, ...] = ("auto",)
    backends: tuple[str, ...] = ("FLASH_ATTN", "FLASHINFER")
    ranks: int = 1


def rows(output: Tensor | Sequence[Tensor]) -> Tensor:
    """The rows of a batch as one tensor."""
    return output if isinstance(output, Tensor) else torch.cat(list(output))


def baseline_of(systems: Sequence[System]) -> str:
    """What ratios are against: our graphs, or whatever comes first without them."""
    ours = [system.name for system in systems if re.fullmatch("vitgraph.* graph", system.name)]
    return (ours or [systems[0].name])[0]


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, if it is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def require(systems: Sequence[System], missing: dict[str, str]) -> None:
    """Refuse to measure nothing.

    Raises:
        ValueError: no system, with every reason.
    """
    if not systems:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise ValueError(f"none of the systems works here ({reasons})")


def measure_capture(capture: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Seconds that a capture takes and MiB by which it fills the GPU, as fields of `System`."""

    def free() -> int:
        synchronize(device)
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0

    before, started = free(), time.perf_counter()
    capture()
    after = free()
    return {"capture_s": time.perf_counter() - started, "memory_mib": (before - after) / 2**20}


Makers = dict[str, Callable[[], list[System]]]


def _vitgraph(setup: Setup) -> Makers:
    names = {name: f"vitgraph {name}".removesuffix(" auto") for name in setup.attention}
    return {names[name]: partial(_ours, setup, names[name], name) for name in names}


def _ours(setup: Setup, name: str, attention: str) -> list[System]:
    config, dtype = setup.encoder.config, setup.encoder.dtype
    encoder = Qwen3VLVisionEncoder(config, device="meta", dtype=dtype, attention=attention)
    encoder.share_weights(setup.encoder)
    compilation = CompilationConfig(True, setup.budgets, setup.max_items)
    manager = EncoderCudaGraphManager(encoder, compilation, log_interval=0)
    captured = measure_capture(manager.capture, encoder.device)

    def replays() -> list[tuple[int | None, Any]]:
        graphs = manager.budget_graphs
        budgets = [pack.budget for pack in manager.last_plan]
        return [(budget, graphs[budget].graph if budget else None) for budget in budgets]

    eager, graph = (lambda batch: encoder(batch.pixels, batch.grids)), manager
    if setup.ranks > 1:
        alone, graph = DataParallelEncoder(encoder), DataParallelEncoder(manager)
        eager = lambda batch: alone.execute(batch.mm_kwargs)  # noqa: E731
    return [
        System(f"{name} eager", eager),
        System(f"{name} graph", lambda batch: graph.execute(batch.mm_kwargs), replays, **captured),
    ]


def _vllm(setup: Setup) -> Makers:
    from vitgraph.graphs.benchmark.vllm_tower import vllm_systems

    return {f"vllm {backend}": partial(vllm_systems, setup, backend) for backend in setup.backends}


def _transformers(setup: Setup, name: str = "transformers eager") -> Makers:
    return {name: partial(_theirs, setup, name)}


def _theirs(setup: Setup, name: str) -> list[System]:
    from vitgraph.graphs.demo import transformers_tower

    encoder, compiles = setup.encoder, name.endswith("compile")
    tower = transformers_tower(encoder.config, encoder.device, encoder.dtype)
    copy_weights(encoder, tower)
    forward = torch.compile(tower, dynamic=True) if compiles else tower

    @torch.no_grad()
    def encode(batch: Batch) -> Tensor:
        output = forward(batch.pixels, batch.grid_tensor)
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)

    return [System(name, encode, compiles=compiles)]


@torch.no_grad()
def copy_weights(encoder: Qwen3VLVisionEncoder, tower: nn.Module) -> None:
    """Give another project's tower our weights; the names are the same.

    Raises:
        ValueError: they are not, or not in the same sizes.
    """
    ours, theirs = dict(encoder.named_parameters()), dict(tower.named_parameters())
    if different := sorted(ours.keys() ^ theirs.keys()):
        raise ValueError(f"the tower's parameters differ in {', '.join(different[:3])}")
    for name, parameter in theirs.items():
        if parameter.numel() != ours[name].numel():
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}, ours {tuple(ours[name].shape)}"
            )
        parameter.copy_(ours[name].view_as(parameter))


FAMILIES: dict[str, Callable[[Setup], Makers]] = {
    "vitgraph": _vitgraph,
    "vllm": _vllm,
    "transformers": _transformers,
    "compile": partial(_transformers, name="transformers compile"),
}
