"""All ranks on the rows of every item: graphs that they capture and replay together, or eagerly."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitgraph.encoder.inputs import Grid
from vitgraph.encoder.sequence_parallel import SequenceParallel
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.graphs.parallel.assignment import Rates, measure, together_pays
from vitgraph.graphs.qwen3_vl import Qwen3VLGraphModel
from vitgraph.kernels.launch import on_device

logger = logging.getLogger(__name__)


def why_not_by_rows(model: Any) -> str | None:
    """What keeps ranks from sharing the rows of an item, or None."""
    if not isinstance(model, Qwen3VLGraphModel):
        return f"the rows of a {type(model).__name__} cannot be shared over ranks"
    if model.module.batch_invariant:
        return "a batch-invariant encoder's sequences are not cut"
    return None


class RowParallelEncoder:
    """One encoder on every rank of a group; all methods but `pays` are collective operations.

    Args:
        encoder: each rank's own, or its manager, whose configuration graphs are captured by.
        parallel: the ranks.

    Attributes:
        manager: of the graphs; None where there are none, or none that all ranks have.
        rates: what `capture` measured.
    """

    def __init__(
        self, encoder: Qwen3VLGraphModel | EncoderCudaGraphManager, parallel: SequenceParallel
    ) -> None:
        self.alone, self.parallel = encoder, parallel
        model = encoder.model if isinstance(encoder, EncoderCudaGraphManager) else encoder
        assert isinstance(model, Qwen3VLGraphModel)
        self.model = Qwen3VLGraphModel(model.module, parallel)
        self.manager: EncoderCudaGraphManager | None = None
        self.rates: Rates | None = None

    def capture(self, *, rates: bool) -> None:
        """Capture every budget that is large enough to be shared and small enough for the memory of
        all ranks, for one that drops a budget leaves the others waiting; measure, if asked."""
        if rates:
            self.rates = measure(self.model, self.parallel)
            logger.info("data parallel: %s", self.rates)
        self.manager = None
        if not isinstance(self.alone, EncoderCudaGraphManager):
            return
        unit, free = self.model.config.spatial_merge_size**2, self._free_memory()
        large = [b for b in self.alone.budgets if self.parallel.shares(b * unit)]
        budgets = tuple(b for b in large if self.model.estimate_encoder_memory(b) < free)
        if not budgets:
            return
        config = replace(self.alone.config, encoder_cudagraph_token_budgets=budgets)
        manager = EncoderCudaGraphManager(self.model, config, log_interval=0)
        manager.capture()
        every: list[Any] = [None] * self.parallel.ranks
        with on_device(self.model.device):  # NCCL sends objects through the current GPU
            dist.all_gather_object(every, manager.budgets, group=self.parallel.group)
        if all(captured == every[0] for captured in every):
            self.manager = manager
        else:
            logger.warning("data parallel: no graphs by rows, ranks captured others: %s", every)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Those that are replayed now."""
        manager = self.manager
        return manager.budgets if manager is not None and manager.is_captured() else ()

    def pays(self, grids: Sequence[Grid], ranks: list[list[int]]) -> bool:
        """Whether it is estimated to be faster than each rank on the items of `ranks`."""
        rows = sum(t * h * w for t, h, w in grids)
        if self.rates is None or not self.parallel.shares(rows):
            return False
        return together_pays(self.model, grids, ranks, self.rates)

    def encode(self, mm_kwargs: dict[str, Any]) -> Tensor:
        """The rows of all items."""
        if self.manager is not None:
            return self.manager.encode(mm_kwargs)[0]
        return self.model.encoder_eager_forward(mm_kwargs)

    def _free_memory(self) -> float:
        """Bytes that every rank has left; no end of them on the CPU."""
        device = self.model.device
        if device.type != "cuda":
            return float("inf")
        free = torch.tensor([torch.cuda.mem_get_info(device)[0]], device=device)
        dist.all_reduce(free, dist.ReduceOp.MIN, group=self.parallel.group)
        return 0.9 * int(free)
