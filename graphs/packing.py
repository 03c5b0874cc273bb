"""Which items share a replay."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from vitgraph.graphs.config import Limits
from vitgraph.graphs.cost import Cost, CostModel

# A plan this close to its lower bound is taken: searching on costs the host more than it can gain.
CLOSE = 1.01
# Running eagerly must take less than this share of a plan without: the model errs by as much.
DECLINE = 0.97


@dataclass(frozen=True)
class Item:
    """Size of one item: output tokens, attention sequences (frames), and the sum of the squared
    lengths of these in patches."""

    tokens: int
    sequences: int = 1
    squares: int = 0


@dataclass(frozen=True)
class Pack:
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


def predicted_seconds(plan: Sequence[Pack], items: Sequence[Item], model: CostModel) -> float:
    """Time of a plan: the sum of its packs'."""
    return sum(
        model.seconds(pack.budget, pack.tokens, sum(items[i].squares for i in pack.indices))
        for pack in plan
    )


def minimise_cost(items: Sequence[Item], limits: Limits, model: CostModel) -> list[Pack]:
    """Pack for the least predicted time; never above that of `greedy`.

    One pack is taken at once where a lower bound says that no split beats it. Otherwise the best
    of these: greedy's packs; the best cut of the items in order of size; best fit, largest items
    first, into a few capacities. Packs that gain by it run eagerly instead, and all that does so
    runs at once, as the last pack of the plan.

    Raises:
        ValueError: the model is for other budgets than the limits.
    """
    if model.budgets != limits.budgets:
        raise ValueError(
            f"the cost model has budgets {list(model.budgets)}, the limits {list(limits.budgets)}"
        )
    largest, max_sequences = limits.budgets[-1], limits.max_sequences
    fitting: list[int] = []
    forced: list[int] = []
    tokens = sequences = squares = 0
    for index, item in enumerate(items):
        if item.tokens > largest or item.sequences > max_sequences:
            forced.append(index)
            continue
        fitting.append(index)
        tokens += item.tokens
        sequences += item.sequences
        squares += item.squares
    if not fitting:
        return _price([], items, model, forced)[1]
    packs = max(
        -(-tokens // largest),
        -(-len(fitting) // limits.max_items),
        -(-sequences // max_sequences),
    )
    groups, eager = [fitting], model.eager
    if packs > 1:
        plan = greedy([items[index] for index in fitting], limits)
        groups = [[fitting[i] for i in pack.indices] for pack in plan]
    best = _price(groups, items, model, forced)
    # All in one run is priced by now, and an eager run knows no limits: what is left has two.
    bound = model.bound(packs if packs > 1 and eager is None else 2, tokens, squares)
    if len(fitting) == 1 or (best[0] <= CLOSE * bound and not forced):
        return best[1]
    if eager is not None and not forced and best[0] <= eager(0, 0):
        eager = None
    for groups in _candidates(items, fitting, limits, model, eager):
        priced = _price(groups, items, model, forced)
        if priced[0] < best[0]:
            best = priced
        if best[0] <= CLOSE * bound and not forced:
            break
    return best[1]


def split_eager(plan: Sequence[Pack], items: Sequence[Item], most: int) -> list[Pack]:
    """Cut what runs eagerly into runs of at most `most` tokens, or one item: the activations of
    all of it at once might not fit the memory."""
    packs: list[Pack] = []
    for pack in plan:
        if pack.budget is not None or pack.tokens <= most:
            packs.append(pack)
            continue
        indices: list[int] = []
        for index in (*pack.indices, None):
            tokens = sum(items[i].tokens for i in indices)
            if indices and (index is None or tokens + items[index].tokens > most):
                packs.append(Pack(tuple(indices), tokens, None))
                indices = []
            if index is not None:
                indices.append(index)
    return packs


def _candidates(
    items: Sequence[Item],
    fitting: list[int],
    limits: Limits,
    model: CostModel,
    eager: Cost | None,
) -> Iterator[list[list[int]]]:
    """Partitions of the fitting items that may beat greedy's."""
    order = sorted(fitting, key=lambda index: items[index].tokens)
    yield _best_cut(items, order, limits, model, None)
    if eager is not None:
        yield _best_cut(items, order, limits, model, eager)
    tokens, longest = sum(items[index].tokens for index in order), items[order[-1]].tokens
    least_packs = -(-tokens // limits.budgets[-1])
    capacities = {
        smallest_budget(limits.budgets, max(-(-tokens // packs), longest))
        for packs in range(least_packs, least_packs + 4)
    }
    for capacity in sorted(capacities):
        yield _best_fit(items, order, limits, capacity)


def _best_cut(
    items: Sequence[Item], order: list[int], limits: Limits, model: CostModel, eager: Cost | None
) -> list[list[int]]:
    """The cheapest way to cut `order` into packs, by dynamic programming; with `eager`, a pack may
    also run at its slopes."""
    table = model.table
    budgets = [row[0] for row in table]
    largest, max_items, max_sequences = budgets[-1], limits.max_items, limits.max_sequences
    token_sums, square_sums, sequence_sums = [0], [0], [0]
    for index in order:
        item = items[index]
        token_sums.append(token_sums[-1] + item.tokens)
        square_sums.append(square_sums[-1] + item.squares)
        sequence_sums.append(sequence_sums[-1] + item.sequences)
    least, cuts = [0.0], [0]
    for end in range(1, len(order) + 1):
        best, cut = inf, end - 1
        for start in range(end - 1, max(end - max_items, 0) - 1, -1):
            tokens = token_sums[end] - token_sums[start]
            if tokens > largest or sequence_sums[end] - sequence_sums[start] > max_sequences:
                break
            squares = square_sums[end] - square_sums[start]
            _, fixed, per_row, per_square = table[bisect_left(budgets, tokens)]
            seconds = fixed + per_row * tokens + per_square * squares
            if eager is not None:
                seconds = min(seconds, eager.per_row * tokens + eager.per_square * squares)
            seconds += least[start]
            if seconds < best:
                best, cut = seconds, start
        least.append(best)
        cuts.append(cut)
    groups, end = [], len(order)
    while end:
        groups.append(order[cuts[end] : end])
        end = cuts[end]
    return groups[::-1]


def _best_fit(
    items: Sequence[Item], order: list[int], limits: Limits, capacity: int
) -> list[list[int]]:
    """Largest items first, each into the fullest pack of that capacity that still holds it."""
    groups: list[list[int]] = []
    room: list[list[int]] = []  # tokens, items, sequences left in each group
    for index in reversed(order):
        tokens, sequences = items[index].tokens, items[index].sequences
        chosen, tightest = -1, capacity + 1
        for position, left in enumerate(room):
            if tokens <= left[0] < tightest and left[1] and sequences <= left[2]:
                chosen, tightest = position, left[0]
        if chosen < 0:
            groups.append([])
            room.append([capacity, limits.max_items, limits.max_sequences])
        groups[chosen].append(index)
        left = room[chosen]
        left[0] -= tokens
        left[1] -= 1
        left[2] -= sequences
    return groups


class _Replay(NamedTuple):
    """A group in its cheapest budget."""

    seconds: float
    budget: int
    tokens: int
    squares: int
    indices: list[int]


def _price(
    groups: list[list[int]], items: Sequence[Item], model: CostModel, forced: list[int]
) -> tuple[float, list[Pack]]:
    """Seconds and plan of a partition: each group in its cheapest budget, or eagerly where that
    is better for all; `forced` items run eagerly in any case."""
    replays: list[_Replay] = []
    for group in groups:
        tokens = squares = 0
        for index in group:
            tokens += items[index].tokens
            squares += items[index].squares
        seconds, budget = min(
            (fixed + per_row * tokens + per_square * squares, budget)
            for budget, fixed, per_row, per_square in model.table
            if budget >= tokens
        )
        replays.append(_Replay(seconds, budget, tokens, squares, group))
    seconds, eager = sum(replay.seconds for replay in replays), model.eager
    declined: list[_Replay] = []
    if eager is not None and (forced or seconds > eager(0, 0)):
        rows = sum(items[index].tokens for index in forced)
        squares = sum(items[index].squares for index in forced)
        gaining = [
            replay
            for replay in replays
            if replay.seconds > eager.per_row * replay.tokens + eager.per_square * replay.squares
        ]
        options = []
        for chosen in ([], gaining, replays):
            cost = sum(replay.seconds for replay in replays if replay not in chosen)
            if chosen or forced:
                cost += eager(
                    rows + sum(replay.tokens for replay in chosen),
                    squares + sum(replay.squares for replay in chosen),
                )
            if not chosen or forced or cost < DECLINE * seconds:
                options.append((cost, chosen))
        seconds, declined = min(options, key=lambda option: option[0])
    plan = [
        Pack(tuple(sorted(replay.indices)), replay.tokens, replay.budget)
        for replay in replays
        if replay not in declined
    ]
    run_eagerly = sorted(forced + [index for replay in declined for index in replay.indices])
    if run_eagerly:
        plan.append(Pack(tuple(run_eagerly), sum(items[i].tokens for i in run_eagerly), None))
    return seconds, plan
