"""The Hopper tier of the packed varlen attention: every configuration in use, work split along the
keys, isolation, races. The plan of the split is plain Triton and is tested anywhere."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitgraph.kernels.attention import attention, attention_reference, attention_tiles
from vitgraph.kernels.attention_sm90 import AttentionSm90Config

CONFIGS = {
    "tall": AttentionSm90Config(64, 3, 128, 3),
    "wide": AttentionSm90Config(128, 2, 64, 3, overlap=True),
    "small": AttentionSm90Config(64, 2, 128, 2),
}
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
    [[], [0], [100], [8160], [23040], [2048], [3000, 5, 2900], [9000, 400, 400], [1024] * 9],
    ids=str,
)
def test_plan_covers_every_key_of_every_item_once(lengths, device):
    """What the producer of the kernel derives from the state, spelled out."""
    config, heads = CONFIGS["tall"], 3
    cu_seqlens = offsets(lengths, device)
    tiles = attention_tiles(cu_seqlens, sum(lengths), heads, config)
    num_tiles, counter, first_split, num_split, parts = tiles.state.tolist()[:5]
    assert counter == 0 and not tiles.state[8:].any()
    num_items = num_tiles * heads
    assert first_split + num_split <= num_items
    assert num_split * parts * config.block_m <= tiles.partials.shape[0] or parts == 1
    seen = {}
    for unit in range(num_items + num_split * (parts - 1)):
        piece = unit - first_split
        if 0 <= piece < num_split * parts:
            item, part, of = first_split + piece // parts, piece % parts, parts
        else:
            item, part, of = unit - (num_split * (parts - 1) if piece >= 0 else 0), 0, 1
        _, start, end = tiles.table[item // heads].tolist()
        blocks = -(-(end - start) // config.block_n)
        first, last = part * blocks // of, (part + 1) * blocks // of
        assert first < last
        seen.setdefault(item, []).append((first, last, blocks))
    assert sorted(seen) == list(range(num_items))
    for ranges in seen.values():
        assert ranges[0][0] == 0 and ranges[-1][1] == ranges[0][2]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


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
    tiles = attention_tiles(slots, real + 300, 16, config)
    results = []
    for _ in range(20):
        out = torch.full((real + 300, 16 * head_dim), float("nan"), dtype=dtype, device=device)
        attention(qkv, slots, tiles=tiles, out=out)
        assert out[real:].isnan().all()
        results.append(out[:real])
    assert tiles.state[1] == 0
    assert all(torch.equal(result, results[0]) for result in results)
    truth, theirs = truth_and_sdpa(qkv[:real], EDGES)
    assert_as_exact_as(results[0], theirs, truth)

    start, end = slots[8].item(), slots[9].item()
    qkv[start:end] = float("nan")
    poisoned = attention(qkv, slots, tiles=tiles)
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
    tiles = attention_tiles(cu_seqlens, sum(lengths), 16, config)
    first = attention(qkv, cu_seqlens, tiles=tiles)
    truth, theirs = truth_and_sdpa(qkv, lengths)
    assert_as_exact_as(first, theirs, truth)
    for _ in range(30):
        out = torch.full_like(first, float("nan"))
        assert torch.equal(attention(qkv, cu_seqlens, tiles=tiles, out=out), first)
    assert tiles.state[1] == 0 and not tiles.state[8:].any()
