"""Capture and replay: one graph a budget, over one memory pool and one set of static buffers."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitgraph.encoder.inputs import outlives
from vitgraph.encoder.structure import Structure
from vitgraph.graphs.addresses import Addresses
from vitgraph.graphs.budgets import BudgetGraphMetadata
from vitgraph.graphs.config import Limits
from vitgraph.graphs.protocol import SupportsEncoderCudaGraph

logger = logging.getLogger(__name__)

MAX_BUDGET = 2**29  # rows of patches are counted in int32


class BudgetGraphs:
    """The captured budgets of a model. Its owner lets one thread at a time in; replays may come
    from any stream.

    Args:
        model: the encoder.
        limits: budgets to capture, and what a replay may hold.
        device, dtype: of the static buffers.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        limits: Limits,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.limits, self.device, self.dtype = model, limits, device, dtype
        self.config = model.get_encoder_cudagraph_config()
        keys = self.config.input_key_by_modality
        if missing := [name for name in self.config.modalities if name not in keys]:
            raise ValueError(
                f"{type(model).__name__} has graphs for {', '.join(missing)}, but an input only "
                f"for {', '.join(keys)} (input_key_by_modality)"
            )
        self.on_gpu = device.type == "cuda"
        self.by_budget: dict[int, BudgetGraphMetadata] = {}
        self.dropped: tuple[int, ...] = ()
        self._module: nn.Module | None = None
        self._addresses: Addresses | None = None
        self._structure: Structure | None = None
        self._last_stream: torch.cuda.Stream | None = None

    def capture(self, budgets: Sequence[int], stream: torch.cuda.Stream | None) -> None:
        """Capture `budgets` on `stream` (None on the CPU), largest first. One that does not fit the
        memory is dropped."""
        pool = torch.cuda.graph_pool_handle() if stream is not None else None
        dropped = []
        for budget in sorted(budgets, reverse=True):
            before = self._memory_in_use()
            try:
                if budget > MAX_BUDGET:
                    raise MemoryError(f"more than {MAX_BUDGET} tokens")
                metadata = self._capture(budget, pool, stream)
            except (RuntimeError, MemoryError) as error:
                if not _lacks_memory(error):
                    raise
                dropped.append(budget)
                logger.warning("encoder budget %d does not fit the memory: %.200s", budget, error)
                continue
            self.by_budget[budget] = metadata
            metadata.memory_bytes = self._memory_in_use() - before
        self.dropped = tuple(sorted(dropped))
        module = getattr(self.model, "module", self.model)
        if isinstance(module, nn.Module):
            self._module, self._addresses = module, Addresses(module, keep=True)
            self._structure = Structure(module)

    def replay(
        self, selected: dict[str, Any], budget: int, tokens: int, *, borrow: bool = False
    ) -> Tensor:
        """Copy a batch in, replay, and return its `tokens` rows: a copy, or with `borrow` a view
        of the static output. No rows may be handed out without `check_module`, once a batch:
        before a replay on the CPU, where the modules run; behind it on a GPU, where memory that the
        graphs read stays allocated, so that looking costs no time.
        """
        graph = self.by_budget[budget]
        with self._after_last_use():
            self._fill(graph, selected)
            if graph.graph is None:
                output = self.model.encoder_cudagraph_forward(
                    graph.mm_kwargs, graph.metadata_buffers
                )
            else:
                assert graph.output_buffer is not None
                graph.graph.replay()
                output = graph.output_buffer
            return output[:tokens] if borrow else output[:tokens].clone()

    def check_module(self) -> None:
        """Graphs hold addresses: a weight that moved would be read as whatever is there now. They
        also hold what the modules were.

        Raises:
            ValueError: naming what is on a module now that would be left out.
            RuntimeError: naming what changed since capture, and what to do.
        """
        if self._module is None:
            return
        assert self._structure is not None and self._addresses is not None
        if not self._structure.unchanged():
            if (check := getattr(self._module, "check_modules", None)) is not None:
                check()
            changed = self._structure.changed(self._module) or ["a module"]
            what = f"{changed[0]} was changed since capture"
        elif not self._addresses.unchanged():
            moved = self._addresses.changed()
            what = (
                f"{len(moved)} of {len(self._addresses)} weights moved since capture, {moved[0]} "
                f"among them"
            )
        else:
            return
        raise RuntimeError(f"{what}: call capture() again, or clear() to run eagerly")

    def _fill(self, graph: BudgetGraphMetadata, selected: dict[str, Any]) -> None:
        """Copy into the static buffers, zeroing what is left where the model needs that."""
        replay = self.model.prepare_encoder_cudagraph_replay_buffers(
            selected, self.limits.max_items, self.limits.max_sequences
        )
        missing = [key for key in self.config.buffer_keys if replay.buffers.get(key) is None]
        if missing:
            raise ValueError(
                f"{type(self.model).__name__} prepared a replay without {', '.join(missing)}: the "
                f"graph would read what the last batch left there"
            )
        copies = [(graph.input_buffer, selected[self._input_key(selected)])]
        copies += [
            (graph.metadata_buffers[key], replay.buffers[key]) for key in self.config.buffer_keys
        ]
        for buffer, source in copies:
            _check_fits(buffer, source)
        for buffer, source in copies:
            if self.config.zero_buffers and buffer.ndim:
                buffer[len(source) :].zero_()
            _copy_rows(buffer, source)

    def serves(self, mm_kwargs: dict[str, Any]) -> bool:
        """Whether a batch is of a modality that the graphs are for."""
        return any(mm_kwargs.get(key) is not None for key in self._input_keys())

    def _input_key(self, mm_kwargs: dict[str, Any]) -> str:
        for key in self._input_keys():
            if mm_kwargs.get(key) is not None:
                return key
        raise ValueError(
            f"{type(self.model).__name__} captures {', '.join(mm_kwargs)}, but its input is "
            f"{' or '.join(self._input_keys())} (input_key_by_modality)"
        )

    def _input_keys(self) -> list[str]:
        return [self.config.input_key_by_modality[name] for name in self.config.modalities]

    @contextmanager
    def _after_last_use(self) -> Iterator[None]:
        """Order this use of the static buffers after the last one, whatever stream that was on,
        and after what was queued there since: reads of a borrowed output, say."""
        if self.device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last_stream not in (None, stream):
            stream.wait_stream(self._last_stream)
        try:
            yield
        finally:
            self._last_stream = stream

    def _capture(
        self, budget: int, pool: Any, stream: torch.cuda.Stream | None
    ) -> BudgetGraphMetadata:
        inputs = self.model.prepare_encoder_cudagraph_capture_inputs(
            budget, self.limits.max_items, self.limits.max_sequences, self.device, self.dtype
        )
        mm_kwargs, buffers = dict(inputs.mm_kwargs), dict(inputs.buffers)
        input_key = self._input_key(mm_kwargs)
        largest = self.by_budget[max(self.by_budget)] if self.by_budget else None
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
        try:
            with torch.cuda.stream(stream):
                output = forward()
                in_place = any(_same_storage(output, static) for static in statics)
                if not in_place:
                    output = torch.zeros_like(output)
                    if largest is not None and largest.output_buffer is not None:
                        output = _prefix(largest.output_buffer, output)
                metadata.output_buffer = output
                # thread_local: work of other threads does not invalidate the capture, nor it theirs
                with torch.cuda.graph(
                    metadata.graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ):
                    captured = forward()
                    if not in_place:
                        metadata.output_buffer.copy_(captured)
        finally:  # also where memory ran out: what is freed here is still being written there
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def _memory_in_use(self) -> int:
        """Bytes; on the CPU those of the static buffers."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what calibration and the first run left behind
            free, total = torch.cuda.mem_get_info(self.device)
            return total - free
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for graph in self.by_budget.values()
            for tensor in (graph.input_buffer, *graph.metadata_buffers.values())
        }
        return sum(storages.values())


def _prefix(large: Tensor, small: Tensor) -> Tensor:
    """The first rows of `large` with the values of `small`; `small` itself where it does not
    fit.
    """
    if not small.ndim or large.ndim != small.ndim:
        return small
    if large.dtype != small.dtype or large.shape[1:] != small.shape[1:] or len(small) > len(large):
        return small
    return large[: len(small)].copy_(small)


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _check_fits(buffer: Tensor, source: Tensor) -> None:
    """A copy would spread a narrower source over the buffer."""
    fits = source.ndim == buffer.ndim and source.shape[1:] == buffer.shape[1:]
    if not fits or (source.ndim and len(source) > len(buffer)):
        raise ValueError(
            f"graphs were captured for inputs of {tuple(buffer.shape)}, got {tuple(source.shape)}"
        )
    if (source.dtype == torch.uint8) != (buffer.dtype == torch.uint8):
        raise ValueError(f"graphs were captured for {buffer.dtype} inputs, got {source.dtype}")


def _copy_rows(buffer: Tensor, source: Tensor) -> None:
    """Copy into the first rows; values of another dtype are converted on the device."""
    if source.dtype != buffer.dtype and source.device != buffer.device:
        source = source.to(buffer.device, non_blocking=outlives(source, buffer.device))
    target = buffer[: len(source)] if buffer.ndim else buffer
    target.copy_(source, non_blocking=outlives(source, buffer.device))


def _lacks_memory(error: Exception) -> bool:
    """Whether memory ran out; torch has no class for the host's."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(
        error
    )
