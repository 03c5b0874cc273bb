"""A batch spread over the ranks of a process group, weights replicated: by items, or by rows."""

import hashlib
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitgraph.encoder.sequence_parallel import SequenceParallel, all_gather
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.graphs.parallel.assignment import assign, work
from vitgraph.graphs.parallel.row_parallel import RowParallelEncoder, why_not_by_rows
from vitgraph.graphs.protocol import look
from vitgraph.graphs.qwen3_vl import Qwen3VLGraphModel, as_model

# What a rank says instead of (digest, items).
INVALID, FAILED = (0, -1), (0, -2)


class DataParallelEncoder:
    """Every rank gets the whole batch and returns all outputs.

    Each encodes whole items of its own; where that leaves ranks idle, all encode every item
    together, each a share of its rows (`vitgraph.encoder.sequence_parallel`).

    Args:
        encoder: an `EncoderCudaGraphManager`, or a `Qwen3VLVisionEncoder` or any model that
            implements `SupportsEncoderCudaGraph` and has `device` and `dtype`, which then runs
            eagerly. The weights of all ranks must be the same.
        group: the process group; the default one if None. Making a `DataParallelEncoder` is a
            collective operation, as are `capture` and `execute`.
        check: compare the batches of all ranks in each run: a few bytes over gloo, while the GPU
            encodes whole items, before it where all encode together. Without it, ranks that
            disagree hang or return nonsense.
        split: share the rows of every batch (True) or of none (False). None: of those for which
            that is estimated to be faster, from what `capture` measured; of none before that.

    Attributes:
        together: what encodes by rows; None where that is not possible or not wanted.

    Ranks must call `execute` in the same order; threads of a rank take turns. Without the check, a
    rank that fails in its encoder leaves the others to the timeout of the process group.

    Raises:
        ValueError: a process outside the group, or `split` for an encoder whose rows cannot be
            shared.
    """

    def __init__(
        self,
        encoder: Any,
        group: dist.ProcessGroup | None = None,
        check: bool = True,
        *,
        split: bool | None = None,
    ) -> None:
        self.encoder = as_model(encoder)
        self.model = getattr(self.encoder, "model", self.encoder)
        self.group = group
        self._calls = 0
        self._turn = threading.Lock()
        self._out_of_step: str | None = None
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group")
        self.width = self.model.get_encoder_cudagraph_config().out_hidden_size
        reason = why_not_by_rows(self.model)
        if split not in (True, False, None):
            raise ValueError(f"split {split!r} is none of True, False and None")
        if split and reason:
            raise ValueError(f"split: {reason}")
        self.split = split
        self.together: RowParallelEncoder | None = None
        if self.world > 1 and split is not False and reason is None:
            parallel = SequenceParallel(group, *([0] if split else []))
            self.together = RowParallelEncoder(self.encoder, parallel)
        # Its own, as soon as ranks may wait for one another inside an encoder.
        self._check_group = self._host_group() if check and self.world > 1 else None

    def capture(self) -> None:
        """Capture the graphs of whole items and those that all ranks replay together, where the
        encoder is a manager, and measure when the latter are faster."""
        with self._turn:
            if isinstance(self.encoder, EncoderCudaGraphManager):
                self.encoder.capture()
            if self.together is not None:
                self.together.capture(rates=self.split is None)

    @property
    def dtype(self) -> torch.dtype:
        """Of the outputs: the model's, which may have changed since a manager was made."""
        return getattr(self.model, "dtype", None) or self.encoder.dtype

    def execute(self, mm_kwargs: dict[str, Any]) -> list[Tensor]:
        """Encode a batch that all ranks hold.

        Returns:
            One tensor [tokens, width] an item, in the order of the items, on every rank. They are
            views of one buffer that belongs to the caller.

        Raises:
            ValueError: a batch that does not fit together, or, on every rank, batches that differ.
            RuntimeError: on the other ranks, one that failed to encode.
                Nothing was gathered in either case, and the next call works.
        """
        with self._turn:
            return self._execute(mm_kwargs)

    def _execute(self, mm_kwargs: dict[str, Any]) -> list[Tensor]:
        if self._out_of_step is not None:
            raise RuntimeError(
                f"data parallel: {self._out_of_step}, and the others may still wait for it: start "
                f"the process group anew"
            )
        model, digest = self.model, INVALID
        error: Exception | None = None
        own: Tensor | None = None
        self._calls += 1
        try:
            mm_kwargs, items = look(model, mm_kwargs)
            sizes = model.get_encoder_cudagraph_per_item_input_sizes(mm_kwargs)
            tokens = [item.tokens for item in items]
            (ranks, together), digest = self._plan(mm_kwargs, sizes), FAILED
            if not together:
                own = self._encode(mm_kwargs, ranks[self.rank], len(sizes))
            graphs = self.together.budgets if together and self.together else ()
            run = self._calls, self.dtype, together, graphs
            digest = _digest(run, mm_kwargs, sizes)
        except Exception as mistake:  # the others wait for this rank: tell them first
            error = mistake
        # The encoder's work has only been launched: the GPU does not wait for this.
        problem = self._compare(digest)
        if error is None:
            error = problem
        if error is not None:
            raise error
        if not sizes:
            return []
        if together:
            return self._encode_together(mm_kwargs, digest, tokens)
        if self.world > 1:
            return self._gather(own, ranks, tokens)
        assert own is not None  # the only rank has all items
        return list(own.split(tokens))

    def _plan(self, mm_kwargs: dict[str, Any], sizes: list[int]) -> tuple[list[list[int]], bool]:
        """The items of each rank, and whether all encode them together instead."""
        if not isinstance(self.model, Qwen3VLGraphModel):
            return assign(sizes, self.world), False
        grids = self.model.grids_of(mm_kwargs)
        ranks = assign([work(self.model.config, grid) for grid in grids], self.world)
        if self.together is None or not grids:
            return ranks, False
        return ranks, bool(self.split) or self.together.pays(grids, ranks)

    def _encode_together(
        self, mm_kwargs: dict[str, Any], digest: tuple[int, int], tokens: list[int]
    ) -> list[Tensor]:
        """The rows of all items, of which each rank computes a share.

        A rank that failed before it met the others would meet them in the next batch, one layer's
        rows for another's: then there is no next batch.
        """
        assert self.together is not None
        error: Exception | None = None
        try:
            rows = self.together.encode(mm_kwargs)
        except Exception as mistake:
            error, digest = mistake, _failure(mistake, self.together.parallel.collectives)
        except BaseException:  # Ctrl-C: nobody is told
            self._out_of_step = f"rank {self.rank} was interrupted while all encoded together"
            raise
        try:
            every = self._exchange(digest)
        except Exception as silence:
            self._out_of_step = "a rank did not answer while all encoded together"
            raise error or silence from None
        failed = [rank for rank, (_, items) in enumerate(every) if items == FAILED[1]]
        if failed and len({*every}) > 1:  # not all of them, or not at the same place
            self._out_of_step = f"ranks {failed} failed while all encoded together"
        if error is not None:
            raise error
        if failed:
            raise RuntimeError(f"data parallel: {self._out_of_step}")
        return list(rows.split(tokens))

    def _encode(
        self, mm_kwargs: dict[str, Any], indices: list[int], num_items: int
    ) -> Tensor | None:
        """The rows of this rank's items; nothing is launched without any."""
        if not indices:
            return None
        if len(indices) < num_items:
            mm_kwargs = self.model.select_encoder_cudagraph_items(mm_kwargs, indices)
        if isinstance(self.encoder, EncoderCudaGraphManager):
            return self.encoder.encode(mm_kwargs)[0]
        return self.model.encoder_eager_forward(mm_kwargs)

    def _gather(
        self, own: Tensor | None, ranks: list[list[int]], tokens: list[int]
    ) -> list[Tensor]:
        """All ranks' outputs by one all-gather of equal shares, the last rows of which are
        undefined where a rank has fewer."""
        share = max(sum(tokens[index] for index in indices) for indices in ranks)
        rows = torch.empty(
            self.world * share, self.width, device=self.encoder.device, dtype=self.dtype
        )
        mine = rows[self.rank * share : (self.rank + 1) * share]
        if own is not None:
            mine[: len(own)].copy_(own)
        all_gather(rows, mine, group=self.group)
        outputs: dict[int, Tensor] = {}
        for rank, indices in enumerate(ranks):
            start = rank * share
            for index in indices:
                outputs[index] = rows[start : start + tokens[index]]
                start += tokens[index]
        return [outputs[index] for index in range(len(tokens))]

    def _host_group(self) -> dist.ProcessGroup:
        """A gloo group of the same ranks; of its own where ranks may wait for one another inside an
        encoder, for a rank that failed there says so here."""
        if dist.get_backend(self.group) == "gloo" and self.together is None:
            group = self.group or dist.group.WORLD
            assert group is not None  # this rank is in it
            return group
        members = dist.get_process_group_ranks(self.group)
        return dist.new_group(members, backend="gloo", use_local_synchronization=True)

    def _exchange(self, digest: tuple[int, int]) -> list[tuple[int, int]]:
        """The (digest, items) of all ranks; without the check, of this one."""
        if self._check_group is None:
            return [digest]
        own = torch.tensor(digest, dtype=torch.int64)
        every = torch.empty(self.world * 2, dtype=torch.int64)
        all_gather(every, own, group=self._check_group)
        return [(first, items) for first, items in every.view(-1, 2).tolist()]

    def _compare(self, digest: tuple[int, int]) -> Exception | None:
        """What is wrong with the batches of the ranks, the same answer on each; None if all can
        go on."""
        batches = self._exchange(digest)
        for state, what in ((INVALID, "were given no valid batch"), (FAILED, "failed to encode")):
            if broken := [rank for rank, batch in enumerate(batches) if batch == state]:
                kind = ValueError if state == INVALID else RuntimeError
                return kind(f"data parallel: ranks {broken} {what}")
        other = next((r for r, batch in enumerate(batches) if batch != batches[0]), None)
        if other is None:
            return None
        items, others = batches[0][1], batches[other][1]
        what = "of other sizes, kinds, dtype or graphs" if items == others else "items"
        return ValueError(
            f"data parallel: the ranks hold different batches: rank 0 has {items} items, "
            f"rank {other} has {others} {what}"
        )


def _digest(
    run: tuple[object, ...], mm_kwargs: dict[str, Any], sizes: list[int]
) -> tuple[int, int]:
    """A hash of what the run is (number, dtype, by rows) and of the batch's keys, shapes and grids
    (not of the pixels), and the number of items."""
    parts = [
        (key, tuple(value.shape) if isinstance(value, Tensor) else repr(value))
        for key, value in sorted(mm_kwargs.items())
    ]
    return _hash((run, parts, list(sizes))), len(sizes)


def _failure(error: Exception, collectives: int) -> tuple[int, int]:
    """What a rank says of its failure: the same where ranks failed alike."""
    return _hash((type(error).__name__, str(error), collectives)), FAILED[1]


def _hash(value: object) -> int:
    """Of its representation; fits int64."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")
