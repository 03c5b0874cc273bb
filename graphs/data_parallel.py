"""The items of a batch spread over the ranks of a process group, weights replicated."""

import hashlib
import heapq
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.graphs.protocol import look
from vitgraph.graphs.qwen3_vl import as_model

# Its name from torch 2.13 on; the older one warns there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# What a rank says instead of (digest, items).
INVALID, FAILED = (0, -1), (0, -2)


def assign(sizes: Sequence[int], world: int) -> list[list[int]]:
    """Indices of the items of each rank, ascending: longest first onto the least loaded rank.

    Items of equal size are handed out in their order, rank by rank, so that a rank's items are
    neighbours where they can be and their pixels need no copy.
    """
    if world < 1:
        raise ValueError(f"world size {world} must be at least 1")
    loads = [(0, rank) for rank in range(world)]
    counts: list[Counter[int]] = [Counter() for _ in range(world)]
    for size in sorted(sizes, reverse=True):
        load, rank = loads[0]
        counts[rank][size] += 1
        heapq.heapreplace(loads, (load + max(size, 1), rank))
    ranks: list[list[int]] = [[] for _ in range(world)]
    first: Counter[int] = Counter()  # the first rank that may have room for a size
    for index, size in enumerate(sizes):
        while not counts[first[size]][size]:
            first[size] += 1
        counts[first[size]][size] -= 1
        ranks[first[size]].append(index)
    return ranks


class DataParallelEncoder:
    """Every rank gets the whole batch, encodes its share, and returns all outputs.

    Args:
        encoder: a captured `EncoderCudaGraphManager`, or a `Qwen3VLVisionEncoder` or any model that
            implements `SupportsEncoderCudaGraph` and has `device` and `dtype`, which then runs
            eagerly. The weights of all ranks must be the same.
        group: the process group; the default one if None. Making a `DataParallelEncoder` is a
            collective operation, as is `execute`.
        check: compare the batches of all ranks in each run: a few bytes over gloo, while the GPU
            encodes. Without it, ranks that disagree hang or return nonsense.

    Ranks must call `execute` in the same order; threads of a rank take turns. Without the check, a
    rank that fails in its encoder leaves the others to the timeout of the process group.
    """

    def __init__(
        self, encoder: Any, group: dist.ProcessGroup | None = None, check: bool = True
    ) -> None:
        self.encoder = as_model(encoder)
        self.model = getattr(self.encoder, "model", self.encoder)
        self.group = group
        self._calls = 0
        self._turn = threading.Lock()
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group")
        self.width = self.model.get_encoder_cudagraph_config().out_hidden_size
        self._check_group = self._host_group() if check and self.world > 1 else None

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
        model, digest = self.model, INVALID
        error: Exception | None = None
        own: Tensor | None = None
        self._calls += 1
        try:
            mm_kwargs, items = look(model, mm_kwargs)
            sizes = model.get_encoder_cudagraph_per_item_input_sizes(mm_kwargs)
            tokens = [item.tokens for item in items]
            ranks, digest = assign(sizes, self.world), FAILED
            own = self._encode(mm_kwargs, ranks[self.rank], len(sizes))
            digest = _digest(self._calls, self.dtype, mm_kwargs, sizes)
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
        if self.world > 1:
            return self._gather(own, ranks, tokens)
        assert own is not None  # the only rank has all items
        return list(own.split(tokens))

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
        _all_gather(rows, mine, group=self.group)
        outputs: dict[int, Tensor] = {}
        for rank, indices in enumerate(ranks):
            start = rank * share
            for index in indices:
                outputs[index] = rows[start : start + tokens[index]]
                start += tokens[index]
        return [outputs[index] for index in range(len(tokens))]

    def _host_group(self) -> dist.ProcessGroup:
        """A gloo group of the same ranks."""
        if dist.get_backend(self.group) == "gloo":
            group = self.group or dist.group.WORLD
            assert group is not None  # this rank is in it
            return group
        members = dist.get_process_group_ranks(self.group)
        return dist.new_group(members, backend="gloo", use_local_synchronization=True)

    def _compare(self, digest: tuple[int, int]) -> Exception | None:
        """What is wrong with the (digest, items) of the ranks, the same answer on each; None if all
        can go on."""
        if self._check_group is None:
            return None
        own = torch.tensor(digest, dtype=torch.int64)
        every = torch.empty(self.world * 2, dtype=torch.int64)
        _all_gather(every, own, group=self._check_group)
        batches = list(map(tuple, every.view(-1, 2).tolist()))
        for state, what in ((INVALID, "were given no valid batch"), (FAILED, "failed to encode")):
            if broken := [rank for rank, batch in enumerate(batches) if batch == state]:
                kind = ValueError if state == INVALID else RuntimeError
                return kind(f"data parallel: ranks {broken} {what}")
        other = next((r for r, batch in enumerate(batches) if batch != batches[0]), None)
        if other is None:
            return None
        items, others = batches[0][1], batches[other][1]
        what = "of other sizes, kinds or dtype" if items == others else "items"
        return ValueError(
            f"data parallel: the ranks hold different batches: rank 0 has {items} items, "
            f"rank {other} has {others} {what}"
        )


def _digest(
    call: int, dtype: torch.dtype, mm_kwargs: dict[str, Any], sizes: list[int]
) -> tuple[int, int]:
    """A hash of the call's number, the output's dtype and the batch's keys, shapes and grids (not
    of the pixels), and the number of items."""
    parts = [
        (key, tuple(value.shape) if isinstance(value, Tensor) else repr(value))
        for key, value in sorted(mm_kwargs.items())
    ]
    text = repr((call, dtype, parts, list(sizes))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big"), len(sizes)
