"""Pack items into captured budgets, replay, and run eagerly what no budget serves."""

import logging
import threading
import time
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from vitgraph.encoder.inputs import Grid
from vitgraph.graphs.borrow import BorrowedTensor
from vitgraph.graphs.budgets import TrafficRecorder, resolve_budgets
from vitgraph.graphs.capture import BudgetGraphMetadata, BudgetGraphs
from vitgraph.graphs.config import CompilationConfig, infer_limits
from vitgraph.graphs.cost import CostModel
from vitgraph.graphs.measure import measure_costs
from vitgraph.graphs.packing import Item, Pack, greedy, minimise_cost, split_eager
from vitgraph.graphs.protocol import (
    SupportsEncoderCudaGraph,
    checked,
    items_of,
    require_protocol,
)
from vitgraph.graphs.recording import RunRecorder
from vitgraph.graphs.statistics import Statistics
from vitgraph.kernels.launch import on_device

logger = logging.getLogger(__name__)


class EncoderCudaGraphManager:
    """Serve batches of any model that implements `SupportsEncoderCudaGraph`.

    Args:
        model: the encoder.
        config: see `CompilationConfig`; without `cudagraph_mm_encoder` everything runs eagerly.
        device, dtype: of the static buffers, of a model that does not say.
        log_interval: log the statistics every so many batches, 0 for never.
        profile: measure each pack into `last_seconds`, at the price of a synchronisation a pack.
        debug: borrowed outputs raise when they are used after they were overwritten.
        packing: "greedy", or "cost" for the least predicted time; the costs are measured at
            capture, or given here (for the same budgets). On a CPU "cost" is greedy, too.

    Raises:
        ValueError: a model without the protocol's methods, a device or dtype that is not its own,
            or a configuration that cannot be captured.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        config: CompilationConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        log_interval: int = 100,
        profile: bool = False,
        debug: bool = False,
        packing: Literal["greedy", "cost"] | CostModel = "greedy",
    ) -> None:
        require_protocol(model, for_packing=packing == "cost")
        if config is not None and not isinstance(config, CompilationConfig):
            raise ValueError(
                f"config is a {type(config).__name__}, no CompilationConfig; "
                f"CompilationConfig.from_json makes one of JSON or a dictionary"
            )
        if not isinstance(log_interval, int) or log_interval < 0:
            raise ValueError(f"log_interval {log_interval!r} is no integer of at least 0")
        if packing not in ("greedy", "cost") and not isinstance(packing, CostModel):
            raise ValueError(f"packing {packing!r} is 'greedy', 'cost' or a CostModel")
        self.model = model
        self.packing = packing
        self.cost_model = packing if isinstance(packing, CostModel) else None
        self.traffic: TrafficRecorder | None = None
        self.run: RunRecorder | None = None
        self.config = config or CompilationConfig()
        self._given = device, dtype
        self._settle()
        budget_range = model.get_encoder_cudagraph_budget_range()
        budgets = resolve_budgets(
            self.config.encoder_cudagraph_token_budgets,
            budget_range,
            max_items=self.config.encoder_cudagraph_max_images_per_batch,
        )
        self._requested = infer_limits(
            replace(self.config, encoder_cudagraph_token_budgets=budgets),
            budget_range,
            model.get_encoder_cudagraph_config().sequences_are_free,
        )
        if self.cost_model is not None and self.cost_model.budgets != self._requested.budgets:
            raise ValueError(
                f"the cost model has budgets {list(self.cost_model.budgets)}, the configuration "
                f"{list(self._requested.budgets)}"
            )
        self.limits = self._requested
        on_gpu = self.device.type == "cuda"
        self.statistics = Statistics(self.limits.budgets, log_interval, graphs=on_gpu)
        self.profile = profile
        self.debug = debug
        self.last_plan: list[Pack] = []
        self.last_seconds: list[float] = []
        self._graphs = BudgetGraphs(model, self.limits, self.device, self.dtype)
        self._lock = threading.RLock()
        self._generation = 0
        self._busy = False
        self._stream: torch.cuda.Stream | None = None

    def _settle(self) -> None:
        """Where and in which dtype the static buffers are: the model's, where it says."""
        device, dtype = self._given
        self.device = torch.device(getattr(self.model, "device", device or "cpu"))
        self.dtype = getattr(self.model, "dtype", dtype or torch.float32)
        if dtype not in (None, self.dtype):
            raise ValueError(f"dtype {dtype} is not the model's, {self.dtype}")
        asked = torch.device(device or self.device)
        if asked.type != self.device.type or asked.index not in (None, self.device.index):
            raise ValueError(f"device {device} is not the model's, {self.device}")

    @property
    def budgets(self) -> tuple[int, ...]:
        """Capacities in tokens, ascending."""
        return self.limits.budgets

    @property
    def budget_graphs(self) -> dict[int, BudgetGraphMetadata]:
        """The captured budgets."""
        return self._graphs.by_budget

    def is_captured(self) -> bool:
        """Whether replays can be served."""
        return bool(self._graphs.by_budget)

    def capture(self) -> None:
        """Capture every budget, largest first, into one memory pool and one set of static buffers.

        Does nothing when graphs are off. May be called again: it starts afresh. Budgets that do
        not fit the memory are dropped with a warning; `memory_report` names them.
        """
        if not self.config.cudagraph_mm_encoder:
            logger.info("encoder graphs are off (cudagraph_mm_encoder=False)")
            return
        with self._lock, on_device(self.device), torch.inference_mode(False), torch.no_grad():
            self.clear()
            self._settle()
            graphs = BudgetGraphs(self.model, self._requested, self.device, self.dtype)
            graphs.capture(self._requested.budgets, self._capturing_stream())
            self._graphs = graphs
            self._warm_up()
            captured = tuple(sorted(graphs.by_budget))
            self.limits = replace(self._requested, budgets=captured or self._requested.budgets)
            if captured:
                self._settle_costs()

    def _warm_up(self) -> None:
        """Let the model compile what a miss will need."""
        if (warm_up := getattr(self.model, "warm_up_encoder_eager", None)) is None:
            return
        try:
            warm_up()
        except torch.OutOfMemoryError as error:
            logger.warning("a miss may compile kernels: no memory to run them now (%s)", error)

    def _capturing_stream(self) -> torch.cuda.Stream | None:
        """The calling stream, unless that is the default one, which cannot be captured; then one of
        this manager's own. cuBLAS has a workspace for every stream: it is part of the graphs, and
        those of two managers may run at the same time."""
        if self.device.type != "cuda":
            return None
        current = torch.cuda.current_stream(self.device)
        if current != torch.cuda.default_stream(self.device):
            return current
        self._stream = self._stream or torch.cuda.Stream(self.device)
        return self._stream

    def _settle_costs(self) -> None:
        """Measure the cost model, or keep of a given one what was captured."""
        self.cost_model = None
        if isinstance(self.packing, CostModel):
            self.cost_model = self.packing.restricted_to(self.limits.budgets)
        elif self.packing == "cost" and self.device.type != "cuda":
            logger.info("packing is greedy: nothing is captured on a CPU, so no costs to measure")
        elif self.packing == "cost":
            merge_size = getattr(getattr(self.model, "config", None), "spatial_merge_size", 2)
            try:
                self.cost_model = measure_costs(self._time, self.limits, merge_size=merge_size)
            except torch.OutOfMemoryError as error:
                logger.warning("packing is greedy: no memory to measure the costs (%s)", error)

    def clear(self) -> None:
        """Release all graphs and static buffers; batches run eagerly until the next `capture`."""
        with self._lock:
            if self.is_captured() and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._graphs = BudgetGraphs(self.model, self._requested, self.device, self.dtype)
            self.limits = self._requested
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def estimate_memory(self) -> dict[int, int]:
        """Bytes that a capture of each budget alone would take; all of them together take what
        the largest takes, for the buffers and the pool are shared.

        Raises:
            ValueError: the model cannot tell (it lacks `estimate_encoder_memory`).
        """
        estimate = getattr(self.model, "estimate_encoder_memory", None)
        if estimate is None:
            raise ValueError(f"{type(self.model).__name__} lacks estimate_encoder_memory")
        return {budget: estimate(budget) for budget in self._requested.budgets}

    def memory_report(self) -> dict[str, Any]:
        """What capture took: bytes added by each budget (largest first), their sum, and the
        budgets that did not fit."""
        added = {b: graph.memory_bytes for b, graph in self._graphs.by_budget.items()}
        return {
            "budgets": added,
            "total": sum(added.values()),
            "dropped": list(self._graphs.dropped),
        }

    def record_traffic(self) -> TrafficRecorder:
        """Count from now on what shares a replay, for budgets that fit (`budgets.traffic`)."""
        self.traffic = self.traffic or TrafficRecorder()
        return self.traffic

    def record_run(self) -> RunRecorder:
        """Keep every pack and its time from now on, for `vitgraph stats`; costs what `profile`
        does."""
        self.run = self.run or RunRecorder()
        return self.run

    def execute(self, mm_kwargs: dict[str, Any], *, borrow: bool = False) -> list[Tensor]:
        """Encode a batch.

        Args:
            mm_kwargs: keyword inputs, e.g. {"pixel_values": [patches, 1536], "image_grid_thw":
                [items, 3]}, {"pixel_values_videos": ..., "video_grid_thw": ...}, or both: then the
                images come first. Pinned host memory must stay as it is until the outputs are
                there.
            borrow: return views of the static output buffer where one replay serves the whole
                batch; they hold until the next `execute`. Otherwise outputs are the caller's own.

        Returns:
            One tensor [tokens, width] an item, in the order of the items.

        Raises:
            ValueError: the batch does not fit together; nothing has run and the manager stays
                usable.
            RuntimeError: weights moved since capture; nothing has run.
        """
        mm_kwargs = checked(self.model, mm_kwargs)
        items = items_of(self.model, mm_kwargs)
        if not items:
            self.last_plan, self.last_seconds = [], []
            return []
        with self._lock, on_device(self.device), torch.no_grad():
            if self._busy:
                raise RuntimeError("execute() was called from within the model's forward")
            self._busy = True
            try:
                return self._execute(mm_kwargs, items, borrow)
            finally:
                self._busy = False

    def _execute(self, mm_kwargs: dict[str, Any], items: list[Item], borrow: bool) -> list[Tensor]:
        plan, seconds = self._plan(items), []
        outputs: list[Tensor | None] = [None] * len(items)
        profile = self.profile or self.run is not None
        if any(pack.budget is not None for pack in plan):
            self._graphs.check_addresses()
        for pack in plan:
            started = time.perf_counter()
            lent = borrow and len(plan) == 1 and pack.budget is not None
            rows = self._run(mm_kwargs, pack, lent)
            sizes = [items[index].tokens for index in pack.indices]
            for index, output in zip(pack.indices, rows.split(sizes), strict=True):
                outputs[index] = self._lend(output) if lent and self.debug else output
            if profile and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - started if profile else 0.0)
        # Counted when all of it has run: a batch that raises leaves the numbers as they were.
        for pack, took in zip(plan, seconds, strict=True):
            if pack.budget is not None:
                self.statistics.record_replay(pack, took)
            else:
                reasons = (self._miss_reason(items[index]) for index in pack.indices)
                self.statistics.record_misses(reasons, took)
            if self.run is not None:
                self.run.record(pack, took)
        self.last_plan, self.last_seconds = plan, seconds if profile else []
        self.statistics.finish_batch()
        return outputs

    def get_cumulative_stats(self) -> dict[str, Any]:
        """Hits and misses (items), replays and fill per budget since the manager was made."""
        return self.statistics.as_dict()

    def _plan(self, items: list[Item]) -> list[Pack]:
        if self.traffic is not None:
            self.traffic.record(p.tokens for p in greedy(items, self.limits) if p.budget)
        if not self.is_captured():
            return [self._eager_pack(items)]
        if self.cost_model is not None:
            plan = minimise_cost(items, self.limits, self.cost_model)
            return split_eager(plan, items, self.limits.budgets[-1])
        return greedy(items, self.limits)

    def _time(self, grids: list[Grid], budget: int | None) -> float:
        """Seconds of one batch of random pixels from the device, to the synchronised result."""
        mm_kwargs = checked(self.model, self.model.make_encoder_inputs(grids))
        tokens = sum(self.model.get_encoder_cudagraph_per_item_output_tokens(mm_kwargs))
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        synchronize()
        started = time.perf_counter()
        self._run(mm_kwargs, Pack(tuple(range(len(grids))), tokens, budget), False)
        synchronize()
        return time.perf_counter() - started

    @staticmethod
    def _eager_pack(items: list[Item]) -> Pack:
        return Pack(tuple(range(len(items))), sum(item.tokens for item in items), None)

    def _run(self, mm_kwargs: dict[str, Any], pack: Pack, borrow: bool) -> Tensor:
        selected = self.model.select_encoder_cudagraph_items(mm_kwargs, list(pack.indices))
        if pack.budget is None:
            return self.model.encoder_eager_forward(selected)
        self._generation += 1
        return self._graphs.replay(selected, pack.budget, pack.tokens, borrow=borrow)

    def _lend(self, rows: Tensor) -> Tensor:
        generation = self._generation
        return BorrowedTensor.lend(rows, lambda: self._generation == generation)

    def _miss_reason(self, item: Item) -> str:
        """Why an item that ran eagerly was in no replay."""
        if not self.is_captured():
            return "not_captured" if self.config.cudagraph_mm_encoder else "graphs_off"
        if item.tokens > self.limits.budgets[-1]:
            return "too_large"
        if item.sequences > self.limits.max_sequences:
            return "too_many_sequences"
        return "declined"
