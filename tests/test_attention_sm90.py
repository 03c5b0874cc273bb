"""The Hopper tier of the packed varlen attention: every configuration in use, work split along the
keys, isolation, races. The plan of the split is plain Triton and is tested anywhere."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitgraph.kernels.attention import attention, attention_reference, attention_schedule
from vitgraph.kernels.sm90.attention import CONFIGS

EDGES = [1, 37, 63, 64, 65, 0, 127, 128, 129, 191, 192, 193, 255, 256, 257, 400, 511, 700, 1024, 3]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def offsets(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def random_qkv(rows: int, head_dim: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    shape = (rows, 3, 16, head_dim)
    return torch.randn(shape, generator=rng, device=rng.device, dtype=torch.float32).to(dtype)


def truth_and_sdpa(qkv: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """float64 attention head by head, and torch's own in the dtype of `qkv`."""
    cu_seqlens = offsets(lengths, torch.device("cpu"))
    heads = [attention_reference(head.double(), cu_seqlens) for head in qkv.split(1, dim=2)]
    theirs = []
    for part in qkv.split([length for length in lengths if length]):
        q, k, v = part.permute(1, 2, 0, 3).unsqueeze(1)
        theirs.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
    return torch.cat(heads, dim=1), torch.cat(theirs).flatten(1)


@pytest.mark.parametrize(
    "lengths",
    [[], [0], [100], [8160], [23040], [3100], [3000, 5, 2900], [9000, 400, 400], [1024] * 9],
    ids=str,
)
@pytest.mark.parametrize("queries", [None, (1500, 5003)], ids=["all", "a_range"])
def test_parts_cover_every_key_of_every_item_once(lengths, queries, device):
    config, heads = CONFIGS["tall"], 3
    cu_seqlens = offsets(lengths, device)
    between = None if queries is None else torch.tensor(queries, dtype=torch.int32, device=device)
    first_row, last_row = queries or (0, sum(lengths))
    schedule = attention_schedule(cu_seqlens, sum(lengths), heads, config, queries=between)
    assert not schedule.state[1:].any()
    table = schedule.table[: schedule.state[0], :7].tolist()
    seen, pieces = {}, []
    for row, first, last, end, head, piece, parts in table:
        seen.setdefault((row, head), []).append((first, last))
        if parts > 1:
            pieces.append(piece)
            assert piece % parts == len(seen[row, head]) - 1
            assert (piece + 1) * config.block_m <= schedule.partials.shape[0]
        assert first < last and row < end <= last_row
    assert pieces == list(range(len(pieces)))
    expected = {
        (row, head): (start, end)
        for start, end in itertools.pairwise(cu_seqlens.tolist())
        for row in range(max(start, first_row), min(end, last_row), config.block_m)
        for head in range(heads)
    }
    assert {key: (keys[0][0], keys[-1][1]) for key, keys in seen.items()} == expected
    assert all(a[1] == b[0] for keys in seen.values() for a, b in itertools.pairwise(keys))


def test_long_sequences_are_split_where_programs_would_idle(device):
    schedule = attention_schedule(offsets([3100], device), 3100, 3, CONFIGS["tall"])
    assert (schedule.table[: schedule.state[0], 6] > 1).any()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(72, torch.bfloat16), (64, torch.bfloat16), (80, torch.bfloat16), (72, torch.float16)],
    ids=str,
)
def test_matches_float64_and_isolates(config, head_dim, dtype, device, rng, assert_as_exact_as):
    real, slots = sum(EDGES), offsets([*EDGES, 0, 0, 0], device)
    qkv = random_qkv(real + 300, head_dim, dtype, rng)
    qkv[real:] = float("nan")
    schedule = attention_schedule(slots, real + 300, 16, config)
    results = []
    for _ in range(20):
        out = torch.full((real + 300, 16 * head_dim), float("nan"), dtype=dtype, device=device)
        attention(qkv, slots, schedule=schedule, out=out)
        assert out[real:].isnan().all()
        results.append(out[:real])
    assert not schedule.state[1:].any()
    assert all(torch.equal(result, results[0]) for result in results)
    truth, theirs = truth_and_sdpa(qkv[:real], EDGES)
    assert_as_exact_as(results[0], theirs, truth)

    start, end = slots[8].item(), slots[9].item()
    qkv[start:end] = float("nan")
    poisoned = attention(qkv, slots, schedule=schedule)
    assert poisoned[start:end].isnan().all()
    assert torch.equal(poisoned[:start], results[0][:start])
    assert torch.equal(poisoned[end:real], results[0][end:])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("lengths", [[2048], [8160], [8160, 400, 36], [1537, 1500, 1600]], ids=str)
def test_split_items_are_joined(config, lengths, device, rng, assert_as_exact_as):
    """Thirty launches on one table: the same bits, all counters back at zero."""
    qkv = random_qkv(sum(lengths), 72, torch.bfloat16, rng)
    cu_seqlens = offsets(lengths, device)
    schedule = attention_schedule(cu_seqlens, sum(lengths), 16, config)
    first = attention(qkv, cu_seqlens, schedule=schedule)
    truth, theirs = truth_and_sdpa(qkv, lengths)
    assert_as_exact_as(first, theirs, truth)
    for _ in range(30):
        out = torch.full_like(first, float("nan"))
        assert torch.equal(attention(qkv, cu_seqlens, schedule=schedule, out=out), first)
    assert not schedule.state[1:].any()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_only_a_range_of_the_rows_attends(config, device, rng, assert_as_exact_as):
    """To all keys of their sequences, parts of which are joined; other rows stay as they were."""
    lengths, first, last = [300, 8160, 400], 1000, 8503
    qkv = random_qkv(sum(lengths), 72, torch.bfloat16, rng)
    cu_seqlens = offsets(lengths, device)
    queries = torch.tensor([first, last], dtype=torch.int32, device=device)
    schedule = attention_schedule(cu_seqlens, len(qkv), 16, config, queries=queries)
    truth, theirs = truth_and_sdpa(qkv, lengths)
    qkv[:first, 0] = qkv[last:, 0] = float("nan")  # the queries of others are never there
    out = torch.full((len(qkv), 16 * 72), float("nan"), dtype=qkv.dtype, device=device)
    attention(qkv, cu_seqlens, schedule=schedule, out=out)
    assert out[:first].isnan().all() and out[last:].isnan().all()
    assert_as_exact_as(out[first:last], theirs[first:last], truth[first:last])
