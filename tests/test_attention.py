"""Packed varlen attention: the tile table, every dtype and head width, isolation, graph replay."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitgraph.kernels import attention_config as attention_config_module
from vitgraph.kernels.attention import attention, attention_reference
from vitgraph.kernels.attention_config import AttentionConfig, attention_config, portable_config
from vitgraph.kernels.attention_schedule import attention_schedule

LENGTHS = {
    "one_row": [1],
    "partial_tile": [33],
    "full_tile": [32, 64],
    "mixed": [5, 70, 1, 16, 33],
    "empty_between": [0, 7, 0, 0, 40, 0],
    "no_rows": [0, 0],
    "no_sequences": [],
}
GPU_LENGTHS = {
    "4": [4],
    "8": [8],
    "392": [392],
    "400": [400],
    "1024": [1024],
    "8160": [8160],
    "23040": [23040],
    "tile_edges": [1, 37, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 511, 700],
    "mixed_pack": [280, 3072, 1260, 8160, 936, 2304, 400],
    "60_of_64_empty": [400, 0, 1024, 64, 3] + [0] * 59,
}


def offsets(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def random_qkv(
    rows: int, heads: int, head_dim: int, dtype: torch.dtype, rng: torch.Generator
) -> Tensor:
    shape = (rows, 3, heads, head_dim)
    return torch.randn(shape, generator=rng, device=rng.device, dtype=torch.float32).to(dtype)


def sdpa(qkv: Tensor, lengths: list[int]) -> Tensor:
    """torch's own attention in the dtype of `qkv`, sequence by sequence."""
    out = qkv.new_zeros(qkv.shape[0], qkv.shape[2], qkv.shape[3])
    start = 0
    for length in lengths:
        q, k, v = qkv[start : start + length].permute(1, 2, 0, 3).unsqueeze(1)
        if length:
            out[start : start + length] = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)
        start += length
    return out.flatten(1)


def truth(qkv: Tensor, lengths: list[int]) -> Tensor:
    """float64 attention, head by head: the scores of 23,040 rows fit the GPU's memory."""
    cu_seqlens = offsets(lengths, torch.device("cpu"))
    heads = [attention_reference(head.double(), cu_seqlens) for head in qkv.split(1, dim=2)]
    return torch.cat(heads, dim=1)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_tiles_cover_each_sequence_once_longest_first(lengths, device):
    block_m, heads, rows = 16, 3, sum(lengths) + 40
    cu_seqlens = offsets(lengths, device)
    schedule = attention_schedule(cu_seqlens, rows, heads, AttentionConfig(block_m, 32))
    count, counter = schedule.state.tolist()
    assert counter == 0
    table = schedule.table[:count, :7].tolist()
    expected = [
        [row, start, end, end, head]
        for start, end in itertools.pairwise(cu_seqlens.tolist())
        for row in range(start, end, block_m)
        for head in range(heads)
    ]
    assert sorted(unit[:5] for unit in table) == expected
    assert all(unit[6] == 1 for unit in table)
    longest_first = [end - start for _, start, end, *_ in table]
    assert longest_first == sorted(longest_first, reverse=True)


@pytest.mark.parametrize("queries", [(0, 125), (3, 90), (75, 76), (40, 40), (100, 900)], ids=str)
def test_only_a_range_of_the_rows_attends(queries, device, rng, assert_as_exact_as):
    """To all keys of their sequences; nothing is written before them, or in other sequences."""
    lengths, config = LENGTHS["mixed"], AttentionConfig(16, 32)
    cu_seqlens, rows = offsets(lengths, device), sum(lengths)
    qkv = random_qkv(rows, 2, 72, torch.float16, rng)
    between = torch.tensor(queries, dtype=torch.int32, device=device)
    schedule = attention_schedule(cu_seqlens, rows, 2, config, queries=between)
    first, last = min(queries[0], rows), min(queries[1], rows)
    expected = [
        [row, start, end, min(end, last), head]
        for start, end in itertools.pairwise(cu_seqlens.tolist())
        for row in range(max(start, first), min(end, last), 16)
        for head in range(2)
    ]
    count = schedule.state[0]
    assert sorted(unit[:5] for unit in schedule.table[:count].tolist()) == expected
    out = torch.full((rows, 144), float("nan"), dtype=torch.float16, device=device)
    attention(qkv, cu_seqlens, schedule=schedule, out=out)
    end = next(offset for offset in cu_seqlens.tolist() if offset >= last)
    assert out[:first].isnan().all() and out[end:].isnan().all()
    everything = truth(qkv, lengths)
    reference = attention_reference(qkv.double(), cu_seqlens, between)
    torch.testing.assert_close(reference[first:last], everything[first:last])
    assert not reference[:first].any() and not reference[last:].any()
    if last > first:
        ours, torchs = out[first:last], sdpa(qkv, lengths)[first:last]
        assert_as_exact_as(ours, torchs, everything[first:last])


def test_tiles_of_more_sequences_than_a_block(device):
    lengths = [(7 * i) % 50 for i in range(129)]
    schedule = attention_schedule(
        offsets(lengths, device), sum(lengths), 2, AttentionConfig(16, 32)
    )
    assert schedule.state.tolist() == [2 * sum(-(-length // 16) for length in lengths), 0]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_matches_float64(lengths, head_dim, dtype, device, rng, assert_as_exact_as):
    """Far below capacity: everything past the last sequence is NaN and stays what it was."""
    rows, real = sum(lengths) + 50, sum(lengths)
    qkv = random_qkv(rows, 2, head_dim, dtype, rng)
    qkv[real:] = float("nan")
    out = torch.full((rows, 2 * head_dim), float("nan"), dtype=dtype, device=device)
    cu_seqlens = offsets([*lengths, 0, 0, 0], device)
    assert attention(qkv, cu_seqlens, out=out) is out
    assert out[real:].isnan().all()
    if real:
        expected = truth(qkv[:real], lengths)
        assert_as_exact_as(out[:real], sdpa(qkv[:real], lengths), expected)


def test_nan_stays_in_its_sequence(device, rng):
    """Bit for bit, though neighbours share tiles; the counter is back at zero for the next
    layer."""
    lengths = [20, 37, 45]
    qkv = random_qkv(sum(lengths), 2, 72, torch.float16, rng)
    config = AttentionConfig(32, 32, num_stages=2)
    schedule = attention_schedule(offsets(lengths, device), sum(lengths), 2, config)
    clean = attention(qkv, offsets(lengths, device), schedule=schedule)
    assert schedule.state[1] == 0
    poisoned = qkv.clone()
    poisoned[20:57] = float("nan")
    result = attention(poisoned, offsets(lengths, device), schedule=schedule)
    assert result[20:57].isnan().all()
    assert torch.equal(result[:20], clean[:20])
    assert torch.equal(result[57:], clean[57:])


def test_result_does_not_depend_on_the_pack(device, rng):
    alone = random_qkv(37, 2, 72, torch.float16, rng)
    others = random_qkv(50, 2, 72, torch.float16, rng)
    packed = torch.cat([others[:21], alone, others[21:]])
    expected = attention(alone, offsets([37], device))
    assert torch.equal(attention(packed, offsets([21, 37, 29], device))[21:58], expected)


def test_refuses_what_it_cannot_read(device):
    qkv = torch.zeros(4, 3, 2, 72, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        attention(qkv.transpose(1, 2), offsets([4], device))
    with pytest.raises(ValueError, match="got 20"):
        attention(qkv.new_zeros(4, 3, 2, 20), offsets([4], device))
    with pytest.raises(ValueError, match=r"torch\.float64, none of"):
        attention(qkv.double(), offsets([4], device))
    for wrong in (offsets([4], device).long(), offsets([2, 2], device)[::2]):
        with pytest.raises(ValueError, match=r"cu_seqlens is torch\.int\d\d \(2,\) .* not contig"):
            attention(qkv, wrong)
    for out in (qkv.new_empty(4, 288)[:, ::2], qkv.new_empty(3, 144), qkv.new_empty(4, 144).half()):
        with pytest.raises(ValueError, match=r"out must be contiguous torch\.float32 \(4, 144\)"):
            attention(qkv, offsets([4], device), out=out)


H200_CHOICES = {  # patches, sequences: the faster of the table's tilings there
    (400, 1): 64,
    (8000, 20): 64,
    (8192, 8): 128,
    (2048, 1): 128,
    (3072, 1): 64,
    (8160, 1): 128,
    (23040, 1): 128,
    (16412, 7): 128,
}


@pytest.mark.parametrize("about", H200_CHOICES, ids=str)
def test_the_table_chooses_what_was_measured(about, monkeypatch):
    monkeypatch.setattr(attention_config_module, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(attention_config_module, "num_multiprocessors", lambda device: 132)
    config = portable_config(*about, 16, torch.bfloat16, torch.device("cuda"))
    assert (config.block_m, config.block_n) == (H200_CHOICES[about], 64)
    assert portable_config(*about, 16, torch.float32, torch.device("cuda")).block_m == 32


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", GPU_LENGTHS.values(), ids=GPU_LENGTHS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gpu_matches_float64(lengths, dtype, device, rng, assert_as_exact_as):
    real = sum(lengths)
    qkv = random_qkv(real + 300, 4, 72, dtype, rng)
    qkv[real:] = float("nan")
    out = torch.full((real + 300, 288), float("nan"), dtype=dtype, device=device)
    attention(qkv, offsets([*lengths, 0, 0], device), out=out)
    assert out[real:].isnan().all()
    # In float32 the error is the order of the sums and exp2's last bits.
    factor = 6.0 if dtype == torch.float32 else 1.1
    expected = truth(qkv[:real], lengths)
    assert_as_exact_as(out[:real], sdpa(qkv[:real], lengths), expected, factor)


@pytest.mark.gpu
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_portable_tier(block_m, dtype, device, rng, assert_as_exact_as):
    """The tilings of GPUs without a tier of their own, on whatever GPU this is."""
    lengths = GPU_LENGTHS["tile_edges"]
    qkv = random_qkv(sum(lengths) + 100, 4, 72, dtype, rng)
    cu_seqlens = offsets(lengths, device)
    config = AttentionConfig(block_m, 64)
    schedule = attention_schedule(cu_seqlens, sum(lengths), 4, config)
    result = attention(qkv, cu_seqlens, schedule=schedule)
    for _ in range(20):
        assert torch.equal(
            attention(qkv, cu_seqlens, schedule=schedule)[: sum(lengths)], result[: sum(lengths)]
        )
    qkv, result = qkv[: sum(lengths)], result[: sum(lengths)]
    assert_as_exact_as(result, sdpa(qkv, lengths), truth(qkv, lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_head_dims(head_dim, dtype, device, rng, assert_as_exact_as):
    lengths = [400, 1, 1000, 130]
    qkv = random_qkv(sum(lengths), 16, head_dim, dtype, rng)
    result = attention(qkv, offsets(lengths, device))
    assert_as_exact_as(result, sdpa(qkv, lengths), truth(qkv, lengths))


@pytest.mark.gpu
def test_gpu_addresses_past_int32(device, rng, assert_as_exact_as):
    """qkv has more than 2^31 elements; only two short sequences at its ends are real."""
    rows = 640_000
    qkv = torch.empty(rows, 3, 16, 72, dtype=torch.bfloat16, device=device)
    ends = [slice(0, 100), slice(rows - 100, rows)]
    for end in ends:
        qkv[end] = random_qkv(100, 16, 72, torch.bfloat16, rng)
    cu_seqlens = torch.tensor([0, 100, 100], dtype=torch.int32, device=device)
    for end in ends:
        result = attention(qkv, cu_seqlens + end.start)[end]
        assert_as_exact_as(result, sdpa(qkv[end], [100]), truth(qkv[end], [100]))


@pytest.mark.gpu
def test_gpu_replay_follows_the_offsets(device, rng):
    """One captured graph of three layers, replayed for other packs: equal to eager runs, every
    time."""
    rows, slots = 4096, 16
    qkv = random_qkv(rows, 16, 72, torch.bfloat16, rng)
    cu_seqlens = offsets([rows] + [0] * (slots - 1), device)
    config = attention_config(rows, slots, 16, 72, qkv.dtype, device)

    def forward() -> list[Tensor]:
        schedule = attention_schedule(cu_seqlens, rows, 16, config)
        return [attention(qkv, cu_seqlens, schedule=schedule) for _ in range(3)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = forward()
    for lengths in ([1000, 3, 0, 2000], [64] * 16, [4096], [0], [130, 1, 700]):
        cu_seqlens.copy_(offsets(lengths + [0] * (slots - len(lengths)), device))
        expected = sdpa(qkv, lengths)[: sum(lengths)]
        graph.replay()
        first = layers[0][: sum(lengths)].clone()
        torch.testing.assert_close(first, expected, atol=2e-2, rtol=2e-2)
        for _ in range(50):
            for layer in layers:
                layer.fill_(float("nan"))
            graph.replay()
            for layer in layers:
                assert torch.equal(layer[: sum(lengths)], first)
                assert layer[sum(lengths) :].isnan().all()
