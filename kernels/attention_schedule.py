"""The work of packed varlen attention as a table, built on the device from the offsets.

An item of work is one tile (block_m query rows of one sequence) of one head. Tiles start at their
sequence's first row, so that a sequence's result does not depend on where it is packed. Items of
long sequences come first and programs draw from a counter, which balances mixed lengths. Where the
last round of a launch would leave programs idle, the kernel that can do it gets that round's items
split along their keys. Rows and sequence slots that a batch does not use never enter the table.
Where the queries are a range of the rows (one rank's share), tiles start at the range's first row;
keys are always the whole sequence.

Legend: P patches, S sequences.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitgraph.kernels.launch import num_multiprocessors, row_count


class TileConfig(Protocol):
    """What the table needs to know of a kernel."""

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""

    @property
    def block_n(self) -> int:
        """Keys of a step."""

    @property
    def can_split(self) -> bool:
        """Whether the kernel can join the parts of an item."""


@dataclass(frozen=True)
class AttentionSchedule:
    """The work of one batch, shared by all layers of a forward. Two launches that share it must not
    run at the same time: they draw from one counter.

    Attributes:
        config: the tiling the table was built for.
        table: int32 [units, 8], the work in the order it is drawn, long sequences first; per unit:
            first query row, first key, end of the keys, end of the sequence's queries, head, number
            of the part, parts of the item (1: not split), unused.
        state: int32 [2 + counters]; number of units, then counters, which are zero between
            launches: of units drawn (the program that draws the last one resets it), of parts done.
        partials: float32 workspace of the parts, or None where nothing is ever split.
    """

    config: TileConfig
    table: Tensor
    state: Tensor
    partials: Tensor | None


@triton.jit
def _bounds(cu_seqlens_ptr, queries_ptr, sequences, num_sequences):
    """(first row, end, first query, end of the queries) of each of `sequences`."""
    mask = sequences < num_sequences
    start = tl.load(cu_seqlens_ptr + sequences, mask=mask, other=0)
    end = tl.load(cu_seqlens_ptr + sequences + 1, mask=mask, other=0)
    first_query = start
    last_query = end
    if queries_ptr is not None:
        first_query = tl.maximum(start, tl.load(queries_ptr))
        last_query = tl.maximum(tl.minimum(end, tl.load(queries_ptr + 1)), first_query)
    return start, end, first_query, last_query


@triton.jit
def _lengths(cu_seqlens_ptr, queries_ptr, sequences, num_sequences, BLOCK_M: tl.constexpr):
    """Keys and tiles of each of `sequences`, zero where there is no query."""
    start, end, first, last = _bounds(cu_seqlens_ptr, queries_ptr, sequences, num_sequences)
    return tl.where(last > first, end - start, 0), tl.cdiv(last - first, BLOCK_M)


@triton.jit
def _plan_split(
    cu_seqlens_ptr,
    queries_ptr,
    num_sequences,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Split the last items of the long sequences along their keys, so that the last round of
    programs has work for all: (first item to split, how many, parts of each)."""
    longest = 0
    for base in range(0, num_sequences, BLOCK_S):
        sequences = base + tl.arange(0, BLOCK_S)
        lengths, _ = _lengths(cu_seqlens_ptr, queries_ptr, sequences, num_sequences, BLOCK_M)
        longest = tl.maximum(longest, tl.max(lengths))
    tiles = 0
    least = longest
    short_work = 0
    for base in range(0, num_sequences, BLOCK_S):
        sequences = base + tl.arange(0, BLOCK_S)
        lengths, counts = _lengths(cu_seqlens_ptr, queries_ptr, sequences, num_sequences, BLOCK_M)
        is_long = 2 * lengths > longest
        tiles += tl.sum(tl.where(is_long, counts, 0))
        least = tl.minimum(least, tl.min(tl.where(is_long, lengths, longest)))
        short_work += tl.sum(tl.where(is_long, 0, counts * tl.cdiv(lengths, BLOCK_N)))
    last_round = tiles * HEADS % PROGRAMS

    steps = tl.cdiv(least, BLOCK_N)
    best = steps
    parts = 1
    for k in tl.static_range(2, 9):
        # Leaving and joining parts takes as long as about four steps.
        cost = tl.cdiv(last_round * k, PROGRAMS) * tl.cdiv(steps, k) + 4
        better = (last_round * k <= MAX_PARTS) & (steps >= 4 * k) & (cost < best)
        parts = tl.where(better, k, parts)
        best = tl.where(better, cost, best)
    # Enough short sequences fill the last round of the long ones anyway.
    parts = tl.where(short_work * HEADS >= (PROGRAMS - last_round) * steps, 1, parts)
    num_split = tl.where(parts > 1, last_round, 0)
    return tiles * HEADS - num_split, num_split, parts


@triton.jit
def _write_sequence(
    cu_seqlens_ptr, queries_ptr, table_ptr, state_ptr, sequence, num_sequences,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PROGRAMS: tl.constexpr,
    MAX_PARTS: tl.constexpr, COUNTERS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    start, end, first_query, last_query = _bounds(
        cu_seqlens_ptr, queries_ptr, sequence, num_sequences
    )
    length = tl.where(last_query > first_query, end - start, 0)

    first_item = 0
    num_items = 0
    for base in range(0, num_sequences, BLOCK_S):
        others = base + tl.arange(0, BLOCK_S)
        lengths, tiles = _lengths(cu_seqlens_ptr, queries_ptr, others, num_sequences, BLOCK_M)
        counts = tiles * HEADS
        before = (lengths > length) | ((lengths == length) & (others < sequence))
        first_item += tl.sum(tl.where(before, counts, 0))
        num_items += tl.sum(counts)
    first_split = num_items
    num_split = 0
    parts = 1
    if MAX_PARTS > 0:
        first_split, num_split, parts = _plan_split(
            cu_seqlens_ptr, queries_ptr, num_sequences, HEADS, BLOCK_M, BLOCK_N, PROGRAMS,
            MAX_PARTS, BLOCK_S,
        )  # fmt: skip
    extra = num_split * (parts - 1)
    if sequence == 0:
        tl.store(state_ptr, num_items + extra)
        for base in range(0, COUNTERS + 1, BLOCK_U):
            counter = base + tl.arange(0, BLOCK_U)
            tl.store(state_ptr + 1 + counter, 0, mask=counter <= COUNTERS)

    # The items of a sequence go head by head: fewer keys and values are in use at a time.
    own_tiles = tl.cdiv(last_query - first_query, BLOCK_M)
    steps = tl.cdiv(length, BLOCK_N)
    for base in range(0, own_tiles * HEADS, BLOCK_U):
        own = base + tl.arange(0, BLOCK_U)
        row = first_query + own % own_tiles * BLOCK_M
        split = first_item + own - first_split
        is_split = (split >= 0) & (split < num_split)
        item_parts = tl.where(is_split, parts, 1)
        unit = first_item + own
        unit += tl.where(is_split, split * (parts - 1), tl.where(split >= num_split, extra, 0))
        for part in range(0, parts):
            mask = (own < own_tiles * HEADS) & (part < item_parts)
            first_key = start + part * steps // item_parts * BLOCK_N
            last_key = tl.minimum(start + (part + 1) * steps // item_parts * BLOCK_N, end)
            unit_ptr = table_ptr + (unit + part) * 8
            tl.store(unit_ptr, row, mask=mask)
            tl.store(unit_ptr + 1, first_key, mask=mask)
            tl.store(unit_ptr + 2, last_key, mask=mask)
            tl.store(unit_ptr + 3, tl.zeros_like(own) + last_query, mask=mask)
            tl.store(unit_ptr + 4, own // own_tiles, mask=mask)
            tl.store(unit_ptr + 5, split * parts + part, mask=mask)
            tl.store(unit_ptr + 6, item_parts, mask=mask)


@triton.jit(do_not_specialize=["max_sequences"])
def attention_schedule_kernel(
    cu_seqlens_ptr,  # int32 [S + 1]
    queries_ptr,  # int32 [2] or None
    num_sequences_ptr,  # int32 [1] or None
    table_ptr,  # int32 [units, 8]
    state_ptr,  # int32 [2 + COUNTERS]
    max_sequences,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    COUNTERS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """Programs take turns over the sequences: count the items of all longer ones, then write the
    sequence's own."""
    num_sequences = row_count(num_sequences_ptr, max_sequences)
    # Sequence 0 is looked at even where there is none: it writes how many units there are.
    for sequence in range(tl.program_id(0), tl.maximum(num_sequences, 1), tl.num_programs(0)):
        _write_sequence(
            cu_seqlens_ptr, queries_ptr, table_ptr, state_ptr, sequence, num_sequences,
            HEADS, BLOCK_M, BLOCK_N, PROGRAMS, MAX_PARTS, COUNTERS, BLOCK_S, BLOCK_U,
        )  # fmt: skip


def attention_schedule(
    cu_seqlens: Tensor,  # [S + 1]
    num_patches: int,
    num_heads: int,
    config: TileConfig,
    num_sequences: Tensor | None = None,
    queries: Tensor | None = None,
) -> AttentionSchedule:
    """Build the tile table of a batch on the device.

    Args:
        cu_seqlens: int32 [S + 1], never falling; empty sequences are free.
        num_patches: capacity P, at least the last offset.
        num_sequences: int32 [1] on the device, sequences that are not past the last; None for S.
        queries: int32 [2] on the device, the first row that attends and the end; None for all.
    """
    max_sequences = cu_seqlens.shape[0] - 1
    programs = num_multiprocessors(cu_seqlens.device)
    max_parts = 2 * programs if config.can_split else 0
    counters = max_parts * config.block_m // 64  # enough for every warpgroup of a part
    items = (num_patches // config.block_m + max_sequences) * num_heads
    table = cu_seqlens.new_empty(items + max_parts + 1, 8)
    state = cu_seqlens.new_empty(2 + counters)
    partials = None
    if config.can_split:
        partials = state.new_empty(max_parts * config.block_m, 96, dtype=torch.float32)
    attention_schedule_kernel[(min(max(max_sequences, 1), 2 * programs),)](
        cu_seqlens, queries, num_sequences, table, state, max_sequences,
        HEADS=num_heads, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        PROGRAMS=programs if config.can_split else 0,  # else one binary serves all GPUs of a kind
        MAX_PARTS=max_parts, COUNTERS=counters, BLOCK_S=128, BLOCK_U=512, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return AttentionSchedule(config, table, state, partials)
