"""Which items share a replay."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from vitgraph.graphs.config import Limits


class Item(NamedTuple):
    """Size of one item: output tokens and attention sequences (frames)."""

    tokens: int
    sequences: int = 1


class Pack(NamedTuple):
    """Items that run together, by ascending index; `budget` is None where they run eagerly."""

    indices: tuple[int, ...]
    tokens: int
    budget: int | None


def smallest_budget(budgets: Sequence[int], tokens: int) -> int | None:
    """The smallest of the ascending `budgets` that holds `tokens`, or None."""
    position = bisect_left(budgets, tokens)
    return budgets[position] if position < len(budgets) else None


def greedy(items: Sequence[Item], limits: Limits) -> list[Pack]:
    """Fill packs in order of size, smallest items first, while tokens, items and sequences all fit.

    An item that no pack can hold (more tokens than the largest budget, or more sequences than a
    replay may have) becomes a pack of its own that runs eagerly, after the others.
    """
    packs: list[Pack] = []
    eager: list[Pack] = []
    current: list[int] = []
    tokens = sequences = 0

    def close() -> None:
        nonlocal current, tokens, sequences
        if current:
            budget = smallest_budget(limits.budgets, tokens)
            packs.append(Pack(tuple(sorted(current)), tokens, budget))
        current, tokens, sequences = [], 0, 0

    for index in sorted(range(len(items)), key=lambda i: items[i].tokens):
        item = items[index]
        if item.tokens > limits.budgets[-1] or item.sequences > limits.max_sequences:
            eager.append(Pack((index,), item.tokens, None))
            continue
        if (
            tokens + item.tokens > limits.budgets[-1]
            or sequences + item.sequences > limits.max_sequences
            or len(current) == limits.max_items
        ):
            close()
        current.append(index)
        tokens += item.tokens
        sequences += item.sequences
    close()
    return packs + eager


def split_by_items(
    items: Sequence[Item], limits: Limits, packs: Sequence[Pack]
) -> tuple[int, int, int] | None:
    """Where the limit of items alone split a batch: how many replays it took, how many it would
    take, and with which limit (at most the smallest budget, as every item has a token)."""

    def replays(packs: Sequence[Pack]) -> list[Pack]:
        return [pack for pack in packs if pack.budget is not None]

    served = replays(packs)
    if not any(len(pack.indices) == limits.max_items for pack in served):
        return None
    roomy = replays(greedy(items, replace(limits, max_items=limits.budgets[0])))
    if len(roomy) >= len(served):
        return None
    return len(served), len(roomy), max(len(pack.indices) for pack in roomy)


def all_eager(items: Sequence[Item]) -> Pack:
    """A batch that no graph serves."""
    return Pack(tuple(range(len(items))), sum(item.tokens for item in items), None)


def why_eager(item: Item, limits: Limits) -> str:
    """What keeps an item out of every pack of `greedy`; else its batch was of a modality that has
    no graphs."""
    if item.tokens > limits.budgets[-1]:
        return "too_large"
    return "too_many_sequences" if item.sequences > limits.max_sequences else "other_modality"
