"""Pack items into captured budgets, replay, and run eagerly what no budget serves."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitgraph.graphs.budgets import BudgetGraphMetadata, resolve_budgets
from vitgraph.graphs.capture import BudgetGraphs
from vitgraph.graphs.config import CompilationConfig, infer_limits
from vitgraph.graphs.packing import Item, Pack, all_eager, greedy, why_eager
from vitgraph.graphs.protocol import SupportsEncoderCudaGraph, check_rows, look, require_protocol
from vitgraph.graphs.qwen3_vl import as_model
from vitgraph.graphs.statistics import Statistics, Stopwatch
from vitgraph.kernels.launch import on_device

logger = logging.getLogger(__name__)

Run = tuple[Pack, Stopwatch]
OnPack = Callable[[Pack, Stopwatch], None]


class EncoderCudaGraphManager:
    """Serve batches of an encoder, or of any model that implements `SupportsEncoderCudaGraph`.

    Args:
        model: a `Qwen3VLVisionEncoder`, or such a model; kept as `model`, an encoder inside its
            `Qwen3VLGraphModel`.
        config: see `CompilationConfig`; without `cudagraph_mm_encoder` everything runs eagerly.
        device, dtype: of the static buffers, of a model that does not say.
        log_interval: log the statistics every so many batches, 0 for never.
        on_pack: called as on_pack(pack, stopwatch) once a batch has been launched and counted, for
            each of its packs; `stopwatch.seconds()` waits for the pack and tells how long it took.

    Raises:
        ValueError: a model without the protocol's methods, a device or dtype that is not its own,
            or a configuration that cannot be captured.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph | torch.nn.Module,
        config: CompilationConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        log_interval: int = 100,
        on_pack: OnPack | None = None,
    ) -> None:
        self.model = as_model(model)
        require_protocol(self.model)
        if config is not None and not isinstance(config, CompilationConfig):
            raise ValueError(
                f"config is a {type(config).__name__}, no CompilationConfig; "
                f"CompilationConfig.from_json makes one of JSON or a dictionary"
            )
        if not isinstance(log_interval, int) or log_interval < 0:
            raise ValueError(f"log_interval {log_interval!r} is no integer of at least 0")
        self.on_pack = on_pack
        self.config = config or CompilationConfig()
        self._given = device, dtype
        self._settle()
        self._check_given()
        budget_range = self.model.get_encoder_cudagraph_budget_range()
        budgets = resolve_budgets(
            self.config.encoder_cudagraph_token_budgets,
            budget_range,
            max_items=self.config.encoder_cudagraph_max_images_per_batch,
        )
        self._requested = infer_limits(
            replace(self.config, encoder_cudagraph_token_budgets=budgets),
            budget_range,
            self.model.get_encoder_cudagraph_config().sequences_are_free,
        )
        self.limits = self._requested
        on_gpu = self.device.type == "cuda"
        self.statistics = Statistics(self.limits.budgets, log_interval, graphs=on_gpu)
        self._graphs = BudgetGraphs(self.model, self.limits, self.device, self.dtype)
        self._lock = threading.RLock()
        self._busy = False
        self._stream: torch.cuda.Stream | None = None

    def _settle(self) -> None:
        """Where and in which dtype the static buffers are: the model's, where it says."""
        device, dtype = self._given
        self.device = torch.device(getattr(self.model, "device", device or "cpu"))
        self.dtype = getattr(self.model, "dtype", dtype or torch.float32)

    def _check_given(self) -> None:
        device, dtype = self._given
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
        with self._lock:
            self.clear()
            before = self.device
            self._settle()
            self._check_given()
            if self.device != before:
                self._stream = None
            with on_device(self.device), torch.inference_mode(False), torch.no_grad():
                graphs = BudgetGraphs(self.model, self._requested, self.device, self.dtype)
                graphs.capture(self._requested.budgets, self._capturing_stream())
                captured = tuple(sorted(graphs.by_budget)) or self._requested.budgets
                self._graphs, self.limits = graphs, replace(self._requested, budgets=captured)
                self._warm_up()

    def _warm_up(self) -> None:
        """Let the model compile what a miss will need."""
        if (warm_up := getattr(self.model, "warm_up_encoder_eager", None)) is None:
            return
        try:
            warm_up()
        except torch.OutOfMemoryError as error:
            logger.warning("a miss may compile kernels: no memory to run them now (%s)", error)

    def _capturing_stream(self) -> torch.cuda.Stream | None:
        """This manager's own: cuBLAS has a workspace for every stream, which becomes part of the
        graphs, and those of two managers may run at the same time."""
        if self.device.type != "cuda":
            return None
        self._stream = self._stream or torch.cuda.Stream(self.device)
        return self._stream

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
            RuntimeError: weights moved since capture; no rows are handed out, and rows that were
                borrowed are overwritten.
        """
        rows, tokens = self.encode(mm_kwargs, borrow=borrow)
        return list(rows.split(tokens)) if tokens else []

    def encode(
        self, mm_kwargs: dict[str, Any], *, borrow: bool = False
    ) -> tuple[Tensor, list[int]]:
        """`execute`, with the rows of all items in one tensor and the tokens of each item."""
        mm_kwargs, items = look(self.model, mm_kwargs)
        with self._lock:
            if not self.is_captured():
                self._settle()  # it may have moved
            if not items:
                width = self.model.get_encoder_cudagraph_config().out_hidden_size
                return torch.empty(0, width, dtype=self.dtype, device=self.device), []
            if self._busy:
                raise RuntimeError("execute() was called from within the model's forward")
            self._busy, on_pack = True, self.on_pack
            try:
                with on_device(self.device), torch.no_grad():
                    served = self.is_captured() and self._graphs.serves(mm_kwargs)
                    plan = greedy(items, self.limits) if served else [all_eager(items)]
                    if len(plan) > 1:
                        self.statistics.say_split(items, self.limits, plan)
                    runs = [(pack, Stopwatch(self.device, on_pack is not None)) for pack in plan]
                    rows = self._encode(mm_kwargs, items, runs, borrow)
            finally:
                self._busy = False
            if on_pack is not None:  # it may encode, too
                for pack, watch in runs:
                    on_pack(pack, watch)
            return rows, [item.tokens for item in items]

    def _encode(
        self, mm_kwargs: dict[str, Any], items: list[Item], runs: list[Run], borrow: bool
    ) -> Tensor:
        replays = any(pack.budget is not None for pack, _ in runs)
        eager = not self._graphs.on_gpu or any(pack.budget is None for pack, _ in runs)
        if eager:  # the forward runs, on what the modules are now
            self._check_modules(replays)
        if len(runs) == 1:
            pack, watch = runs[0]
            with watch:  # all of the batch
                rows = self._run(mm_kwargs, pack, borrow)
            check_rows(self.model, rows, pack.tokens)
        else:
            rows = self._run_apart(mm_kwargs, items, runs)
        if not eager:  # in the time that the GPU takes
            self._check_modules(replays)
        # Counted when all of it was launched: a batch that raises leaves the numbers as they were.
        for pack, _ in runs:
            if pack.budget is not None:
                self.statistics.record_replay(pack)
            else:
                self.statistics.record_misses(self._miss_reason(items[i]) for i in pack.indices)
        self.statistics.finish_batch()
        return rows

    def _check_modules(self, replays: bool) -> None:
        """Before rows are handed out."""
        if replays:
            self._graphs.check_module()

    def _run_apart(self, mm_kwargs: dict[str, Any], items: list[Item], runs: list[Run]) -> Tensor:
        """Several packs, each item's rows put where they belong."""
        tokens = [item.tokens for item in items]
        rows: Tensor | None = None
        for pack, watch in runs:
            with watch:
                selected = self.model.select_encoder_cudagraph_items(mm_kwargs, list(pack.indices))
                part = self._run(selected, pack, True)
                check_rows(self.model, part, pack.tokens, None if rows is None else rows.shape[1:])
                if rows is None:
                    rows = part.new_empty(sum(tokens), *part.shape[1:])
                    places = rows.split(tokens)
                parts = part.split([tokens[index] for index in pack.indices])
                torch._foreach_copy_([places[index] for index in pack.indices], list(parts))
        assert rows is not None  # there are several packs
        return rows

    def _run(self, mm_kwargs: dict[str, Any], pack: Pack, borrow: bool) -> Tensor:
        if pack.budget is None:
            return self.model.encoder_eager_forward(mm_kwargs)
        return self._graphs.replay(mm_kwargs, pack.budget, pack.tokens, borrow=borrow)

    def get_cumulative_stats(self) -> dict[str, Any]:
        """Hits and misses (items), replays and fill per budget since the manager was made."""
        return self.statistics.as_dict()

    def _miss_reason(self, item: Item) -> str:
        """Why an item that ran eagerly was in no replay."""
        if not self.is_captured():
            return "not_captured" if self.config.cudagraph_mm_encoder else "graphs_off"
        return why_eager(item, self.limits)
