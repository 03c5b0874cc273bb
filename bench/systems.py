"""What is compared: a way to encode a batch, and what all are built for."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitgraph.bench.workloads import BUDGETS, MAX_ITEMS, Batch
from vitgraph.encoder import Qwen3VLVisionEncoder

# Two evaluations of 27 layers that round in different places differ by about 1 % in bf16.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
FP8_TOLERANCE = 0.15  # on the random weights of a benchmark; simulated: 0.08


@dataclass
class System:
    """One way to encode.

    Attributes:
        name: "vitgraph graph", say.
        encode: from a batch to its rows, whole or by item; this is what is timed.
        replays: budget and graph of every replay that a batch takes. A budget of None stands for
            what runs eagerly; the graph is None then, and on a CPU.
        capture_s, memory_mib: what it took to capture.
        compiles: the first call of every shape may take a minute.
        tolerance: instead of the dtype's, where it computes in less.
    """

    name: str
    encode: Callable[[Batch], Tensor | Sequence[Tensor]]
    replays: Callable[[Batch], list[tuple[int | None, Any]]] = lambda batch: []
    capture_s: float = 0.0
    memory_mib: float = 0.0
    compiles: bool = False
    tolerance: float | None = None


@dataclass(frozen=True)
class Setup:
    """What all systems are built for.

    Attributes:
        encoder: whose weights, device and dtype are used.
        budgets, max_items: of every graph manager.
        attention: backends of ours to try.
        backends: attention backends of vLLM's to try.
        ranks: of the default process group that a batch is spread over.
        linear_dtypes: of ours to try.
    """

    encoder: Qwen3VLVisionEncoder
    budgets: tuple[int, ...] = BUDGETS
    max_items: int = MAX_ITEMS
    attention: tuple[str, ...] = ("auto",)
    backends: tuple[str, ...] = ("FLASH_ATTN", "FLASHINFER")
    ranks: int = 1
    linear_dtypes: tuple[str, ...] = ("same",)


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
