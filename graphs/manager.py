"""Capture one CUDA graph a token budget, pack items into them, replay."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from vitgraph.graphs.budgets import TrafficRecorder, resolve_budgets
from vitgraph.graphs.config import CompilationConfig, infer_limits
from vitgraph.graphs.cost import CostModel
from vitgraph.graphs.measure import Grid, measure_costs
from vitgraph.graphs.packing import Item, Pack, greedy, minimise_cost
from vitgraph.graphs.protocol import SupportsEncoderCudaGraph
from vitgraph.graphs.statistics import Statistics

logger = logging.getLogger(__name__)


@dataclass
class BudgetGraphMetadata:
    """One captured budget.

    Attributes:
        token_budget: capacity in tokens.
        max_batch_size: capacity in items.
        graph: the CUDA graph; None on the CPU, where a replay runs the captured forward instead.
        input_buffer: static rows of the items' patches.
        metadata_buffers: other static tensors of the forward, by name.
        output_buffer: where a replay leaves its rows; None on the CPU.
        mm_kwargs: the keyword inputs that were captured.
    """

    token_budget: int
    max_batch_size: int
    graph: torch.cuda.CUDAGraph | None
    input_buffer: Tensor
    metadata_buffers: dict[str, Tensor]
    output_buffer: Tensor | None
    mm_kwargs: dict[str, Any]


class EncoderCudaGraphManager:
    """Serve batches of any model that implements `SupportsEncoderCudaGraph`.

    Args:
        model: the encoder.
        config: see `CompilationConfig`; without `cudagraph_mm_encoder` everything runs eagerly.
        device, dtype: of the static buffers; the model's own where it says.
        log_interval: log the statistics every so many batches, 0 for never.
        profile: measure each pack into `last_seconds`, at the price of a synchronisation a pack.
        packing: "greedy", or "cost" for the least predicted time; the costs are measured at
            capture, or given here (for the same budgets).

    Raises:
        ValueError: a model without the protocol's methods, or a configuration that cannot be
            captured.
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
        packing: Literal["greedy", "cost"] | CostModel = "greedy",
    ) -> None:
        missing = [name for name in _protocol_methods() if not hasattr(model, name)]
        if missing:
            raise ValueError(f"{type(model).__name__} lacks {', '.join(missing)}")
        if packing == "cost" and not hasattr(model, "make_encoder_inputs"):
            raise ValueError(
                f"packing 'cost' measures the model, and {type(model).__name__} lacks "
                f"make_encoder_inputs"
            )
        if packing not in ("greedy", "cost") and not isinstance(packing, CostModel):
            raise ValueError(f"packing {packing!r} is 'greedy', 'cost' or a CostModel")
        self.model = model
        self.packing = packing
        self.cost_model = packing if isinstance(packing, CostModel) else None
        self.traffic: TrafficRecorder | None = None
        self.config = config or CompilationConfig()
        self.device = torch.device(device or getattr(model, "device", "cpu"))
        self.dtype = dtype or getattr(model, "dtype", torch.float32)
        self.graph_config = model.get_encoder_cudagraph_config()
        budget_range = model.get_encoder_cudagraph_budget_range()
        budgets = resolve_budgets(
            self.config.encoder_cudagraph_token_budgets,
            budget_range,
            max_items=self.config.encoder_cudagraph_max_images_per_batch,
        )
        self.limits = infer_limits(
            replace(self.config, encoder_cudagraph_token_budgets=budgets),
            budget_range,
            self.graph_config.sequences_are_free,
        )
        self.statistics = Statistics(self.limits.budgets, log_interval)
        self.profile = profile
        self.last_plan: list[Pack] = []
        self.last_seconds: list[float] = []
        self._graphs: dict[int, BudgetGraphMetadata] = {}
        self._lock = threading.RLock()
        self._last_use: torch.cuda.Event | None = None

    @property
    def budgets(self) -> tuple[int, ...]:
        """Capacities in tokens, ascending."""
        return self.limits.budgets

    def is_captured(self) -> bool:
        """Whether replays can be served."""
        return bool(self._graphs)

    def capture(self) -> None:
        """Capture every budget, largest first, into one memory pool and one set of static buffers.

        Does nothing when graphs are off. May be called again: it starts afresh.
        """
        if not self.config.cudagraph_mm_encoder:
            logger.info("encoder graphs are off (cudagraph_mm_encoder=False)")
            return
        with self._lock, torch.no_grad():
            self.clear()
            captured: dict[int, BudgetGraphMetadata] = {}
            pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
            stream = torch.cuda.Stream(self.device) if pool is not None else None
            largest = None
            for budget in reversed(self.limits.budgets):
                captured[budget] = self._capture(budget, largest, pool, stream)
                largest = largest or captured[budget]
            self._graphs = captured
            if self.packing == "cost":
                self.cost_model = measure_costs(self._time, self.limits)

    def clear(self) -> None:
        """Release all graphs and static buffers; batches run eagerly until the next `capture`."""
        with self._lock:
            if self._graphs and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._graphs = {}
            self._last_use = None

    def record_traffic(self) -> TrafficRecorder:
        """Count from now on what shares a replay, for budgets that fit (`budgets.traffic`)."""
        self.traffic = self.traffic or TrafficRecorder()
        return self.traffic

    def execute(self, mm_kwargs: dict[str, Any], *, borrow: bool = False) -> list[Tensor]:
        """Encode a batch.

        Args:
            mm_kwargs: keyword inputs, e.g. {"pixel_values": [patches, 1536], "image_grid_thw":
                [items, 3]} or {"pixel_values_videos": ..., "video_grid_thw": ...}.
            borrow: return views of the static output buffer where one replay serves the whole
                batch; they hold until the next `execute`. Otherwise outputs are the caller's own.

        Returns:
            One tensor [tokens, width] an item, in the order of the items.

        Raises:
            ValueError: the batch does not fit together; nothing has run and the manager stays
                usable.
        """
        if (check := getattr(self.model, "check_encoder_inputs", None)) is not None:
            mm_kwargs = check(mm_kwargs)
        items = self._items(mm_kwargs)
        if not items:
            self.last_plan = []
            return []
        with self._lock, torch.no_grad():
            plan = self._plan(items)
            outputs: list[Tensor | None] = [None] * len(items)
            self.last_seconds = []
            for pack in plan:
                started = time.perf_counter()
                rows = self._run(mm_kwargs, pack, borrow and len(plan) == 1)
                self.statistics.record(pack)
                sizes = [items[index].tokens for index in pack.indices]
                for index, output in zip(pack.indices, rows.split(sizes), strict=True):
                    outputs[index] = output
                if self.profile:
                    if self.device.type == "cuda":
                        torch.cuda.synchronize(self.device)
                    self.last_seconds.append(time.perf_counter() - started)
            self.last_plan = plan
            self.statistics.finish_batch()
        return outputs

    def get_cumulative_stats(self) -> dict[str, Any]:
        """Hits and misses (items), replays and fill per budget since the manager was made."""
        return self.statistics.as_dict()

    def _plan(self, items: list[Item]) -> list[Pack]:
        if self.traffic is not None:
            self.traffic.record(p.tokens for p in greedy(items, self.limits) if p.budget)
        if not self._graphs:
            return [self._eager_pack(items)]
        if self.cost_model is not None:
            return minimise_cost(items, self.limits, self.cost_model)
        return greedy(items, self.limits)

    def _time(self, grids: list[Grid], budget: int | None) -> float:
        """Seconds of one batch of random pixels from the device, to the synchronised result."""
        mm_kwargs = self.model.check_encoder_inputs(self.model.make_encoder_inputs(grids))
        tokens = sum(self.model.get_encoder_cudagraph_per_item_output_tokens(mm_kwargs))
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        synchronize()
        started = time.perf_counter()
        self._run(mm_kwargs, Pack(tuple(range(len(grids))), tokens, budget), False)
        synchronize()
        return time.perf_counter() - started

    def _items(self, mm_kwargs: dict[str, Any]) -> list[Item]:
        tokens = self.model.get_encoder_cudagraph_per_item_output_tokens(mm_kwargs)
        sequences, squares = [1] * len(tokens), [0] * len(tokens)
        if hasattr(self.model, "get_encoder_cudagraph_per_item_sequences"):
            sequences = self.model.get_encoder_cudagraph_per_item_sequences(mm_kwargs)
        if hasattr(self.model, "get_encoder_cudagraph_per_item_squares"):
            squares = self.model.get_encoder_cudagraph_per_item_squares(mm_kwargs)
        return list(map(Item, tokens, sequences, squares))

    @staticmethod
    def _eager_pack(items: list[Item]) -> Pack:
        return Pack(tuple(range(len(items))), sum(item.tokens for item in items), None)

    def _run(self, mm_kwargs: dict[str, Any], pack: Pack, borrow: bool) -> Tensor:
        selected = self.model.select_encoder_cudagraph_items(mm_kwargs, list(pack.indices))
        if pack.budget is None:
            return self.model.encoder_eager_forward(selected)
        graph = self._graphs[pack.budget]
        with self._static_buffers_in_use():
            self._fill(graph, selected)
            if graph.graph is None:
                output = self.model.encoder_cudagraph_forward(
                    graph.mm_kwargs, graph.metadata_buffers
                )
            else:
                graph.graph.replay()
                output = graph.output_buffer
            rows = output[: pack.tokens]
            return rows if borrow else rows.clone()

    def _fill(self, graph: BudgetGraphMetadata, selected: dict[str, Any]) -> None:
        """Copy one batch into the static buffers, zeroing what it leaves where the model needs
        that.
        """
        replay = self.model.prepare_encoder_cudagraph_replay_buffers(
            selected, self.limits.max_items, self.limits.max_sequences
        )
        copies = [(graph.input_buffer, selected[self._input_key(selected)])]
        copies += [
            (graph.metadata_buffers[key], replay.buffers[key])
            for key in self.graph_config.buffer_keys
            if key in replay.buffers
        ]
        for buffer, source in copies:
            if self.graph_config.zero_buffers:
                buffer[len(source) :].zero_()
            _copy_rows(buffer, source)

    def _input_key(self, mm_kwargs: dict[str, Any]) -> str:
        return next(
            key for key in self.graph_config.input_key_by_modality.values() if key in mm_kwargs
        )

    @contextmanager
    def _static_buffers_in_use(self) -> Iterator[None]:
        """Order this use of the static buffers after the last one, whatever streams the two are
        on.
        """
        if self.device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last_use is None:
            self._last_use = torch.cuda.Event()
        else:
            stream.wait_event(self._last_use)
        yield
        self._last_use.record(stream)

    def _capture(
        self,
        budget: int,
        largest: BudgetGraphMetadata | None,
        pool: Any,
        stream: torch.cuda.Stream | None,
    ) -> BudgetGraphMetadata:
        inputs = self.model.prepare_encoder_cudagraph_capture_inputs(
            budget, self.limits.max_items, self.limits.max_sequences, self.device, self.dtype
        )
        mm_kwargs, buffers = dict(inputs.mm_kwargs), dict(inputs.buffers)
        input_key = self._input_key(mm_kwargs)
        if largest is not None:
            mm_kwargs[input_key] = _prefix(largest.input_buffer, mm_kwargs[input_key])
            for key, buffer in buffers.items():
                buffers[key] = _prefix(largest.metadata_buffers[key], buffer)
        metadata = BudgetGraphMetadata(
            token_budget=budget,
            max_batch_size=self.limits.max_items,
            graph=None,
            input_buffer=mm_kwargs[input_key],
            metadata_buffers=buffers,
            output_buffer=None,
            mm_kwargs=mm_kwargs,
        )
        if stream is not None:
            self._record(metadata, largest, pool, stream)
        logger.info("captured encoder budget %d", budget)
        return metadata

    def _record(
        self,
        metadata: BudgetGraphMetadata,
        largest: BudgetGraphMetadata | None,
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        """Run the forward once on the capturing stream, then capture it."""

        def forward() -> Tensor:
            return self.model.encoder_cudagraph_forward(
                metadata.mm_kwargs, metadata.metadata_buffers
            )

        statics = [metadata.input_buffer, *metadata.metadata_buffers.values()]
        metadata.graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            output = forward()
            in_place = any(_same_storage(output, static) for static in statics)
            if not in_place:
                output = torch.zeros_like(output)
                output = output if largest is None else _prefix(largest.output_buffer, output)
            metadata.output_buffer = output
            with torch.cuda.graph(
                metadata.graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                captured = forward()
                if not in_place:
                    metadata.output_buffer.copy_(captured)
        torch.cuda.current_stream(self.device).wait_stream(stream)


def _protocol_methods() -> list[str]:
    return [name for name in vars(SupportsEncoderCudaGraph) if "encoder" in name]


def _prefix(large: Tensor, small: Tensor) -> Tensor:
    """The first rows of `large` holding the values of `small`; `small` itself where it does not
    fit.
    """
    if large.dtype != small.dtype or large.shape[1:] != small.shape[1:] or len(small) > len(large):
        return small
    prefix = large[: len(small)]
    return prefix.copy_(small)


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _copy_rows(buffer: Tensor, source: Tensor) -> None:
    """Copy into the first rows. Values of another dtype are converted on the device, not on the
    host.
    """
    if source.dtype != buffer.dtype and source.device != buffer.device:
        source = source.to(buffer.device, non_blocking=True)
    buffer[: len(source)].copy_(source, non_blocking=True)
