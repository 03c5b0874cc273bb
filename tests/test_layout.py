"""layout against its reference, and the reference against loops over the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitgraph.kernels.layout import MAX_SLOTS, Layout, layout, layout_reference

EMPTY = (0, 0, 0)


def check(grids, device, spare_patches=0, spare_sequences=0, dtype=torch.int32) -> Layout:
    """Run `layout`, compare with the reference wherever a value is defined, return it."""
    grid_thw = torch.tensor(grids, dtype=dtype, device=device).reshape(-1, 3)
    patches = sum(t * h * w for t, h, w in grids)
    sequences = sum(t for t, _, _ in grids)
    arguments = grid_thw, patches + spare_patches, sequences + spare_sequences
    actual, expected = layout(*arguments), layout_reference(*arguments)
    for name in ("num_patches", "num_tokens", "num_sequences", "cu_seqlens", "coords"):
        assert getattr(actual, name).shape == getattr(expected, name).shape
        assert getattr(actual, name).dtype == torch.int32
    assert actual.num_patches.item() == expected.num_patches.item() == patches
    assert actual.num_tokens.item() == expected.num_tokens.item() == patches // 4
    assert actual.num_sequences.item() == expected.num_sequences.item() == sequences
    assert torch.equal(actual.cu_seqlens, expected.cu_seqlens)
    assert torch.equal(actual.coords[:patches], expected.coords[:patches])
    assert actual.cu_seqlens[-1].item() == patches
    assert (actual.cu_seqlens.diff() >= 0).all()
    return actual


side = st.integers(1, 7).map(lambda half: 2 * half)
item = st.tuples(st.integers(1, 4), side, side)


@settings(max_examples=25, deadline=None)
@given(
    grids=st.lists(item | st.just(EMPTY), max_size=9),
    spare_patches=st.integers(0, 300),
    spare_sequences=st.integers(0, 9),
)
def test_any_grids(device, grids, spare_patches, spare_sequences):
    check(grids, device, spare_patches, spare_sequences)


@pytest.mark.parametrize(
    "grids",
    [
        pytest.param([], id="zero_items"),
        pytest.param([EMPTY] * 3, id="empty_slots_only"),
        pytest.param([(1, 2, 2)], id="one_token"),
        pytest.param([EMPTY, (1, 4, 6), EMPTY, EMPTY, (2, 2, 4), EMPTY], id="empty_slots_anywhere"),
        pytest.param([(1, 2, 196)], id="one_token_high"),
        pytest.param([(1, 2, 400), (1, 400, 2)], id="one_token_high_and_wide"),
        pytest.param([(1, 2, 32768)], id="as_wide_as_the_largest_budget"),
        pytest.param([(70, 16, 24)], id="many_frames"),
        pytest.param([(1, 20, 20), (1, 28, 28)], id="images"),
        pytest.param([(1, 2, 2)] * 65, id="slots_above_64"),
        pytest.param([(1, 2, 4), EMPTY] * 128, id="256_slots"),
    ],
)
def test_edges(device, grids):
    check(grids, device)


def test_images_in_slots_sized_for_video(device):
    """KNOWN_FAILURES 3: the tail of the offsets must not fall to zero."""
    check([(1, 20, 20), (1, 28, 28)], device, spare_patches=1000, spare_sequences=64)


def test_int64_grids(device):
    check([(3, 4, 6), (1, 2, 2)], device, dtype=torch.int64)


def test_merge_order_and_frames_by_definition(device):
    """KNOWN_FAILURES 17 and 18."""
    grids = [(2, 4, 6), (1, 2, 8)]
    coords, offsets = [], [0]
    for frames, height, width in grids:
        for _ in range(frames):
            for block_row in range(height // 2):
                for block_col in range(width // 2):
                    for row in range(2 * block_row, 2 * block_row + 2):
                        for col in range(2 * block_col, 2 * block_col + 2):
                            coords.append([row, col, height, width])
            offsets.append(len(coords))
    actual = check(grids, device)
    assert actual.coords.tolist() == coords
    assert actual.cu_seqlens.tolist() == offsets


def test_rows_past_the_total_stay_unwritten(device, poisoned_empty):
    actual = check([(1, 4, 4)], device, spare_patches=600)
    assert (actual.coords[16:] == torch.iinfo(torch.int32).min).all()


def test_host_lengths_pass_through(device):
    grid_thw = torch.tensor([[2, 4, 6]], dtype=torch.int32, device=device)
    assert layout(grid_thw, 100, 4).max_seqlen == 100
    known = layout(grid_thw, 100, 4, seqlens=(24, 24))
    assert (known.max_seqlen, known.seqlens) == (24, (24, 24))


@pytest.mark.gpu
def test_replay_follows_the_grids(device):
    """Same total, other items: a graph must not keep the offsets it was captured with."""
    grid_thw = torch.zeros(4, 3, dtype=torch.int32, device=device)
    layout(grid_thw, 512, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layout(grid_thw, 512, 8)
    for grids in (
        [(1, 16, 32), EMPTY, EMPTY, EMPTY],
        [(1, 16, 16), EMPTY, (1, 16, 16), EMPTY],
        [EMPTY, (8, 2, 4), (0, 4, 4), EMPTY],
    ):
        grid_thw.copy_(torch.tensor(grids))
        graph.replay()
        expected = layout_reference(grid_thw, 512, 8)
        real = expected.num_patches.item()
        assert captured.num_patches.item() == real
        assert torch.equal(captured.cu_seqlens, expected.cu_seqlens)
        assert torch.equal(captured.coords[:real], expected.coords[:real])


def test_more_items_than_a_scan_holds(device) -> None:
    """Beyond MAX_SLOTS the scan would spill; the same layout comes from torch."""
    grids = torch.tensor([[1, 2, 2]] * (MAX_SLOTS + 1), dtype=torch.int32, device=device)
    batch = layout(grids, 4 * len(grids), len(grids))
    assert batch.num_patches.item() == 4 * len(grids)
    expected = 4 * torch.arange(len(grids) + 1, dtype=torch.int32, device=device)
    assert torch.equal(batch.cu_seqlens, expected)


@pytest.mark.parametrize("run", [layout, layout_reference])
def test_grids_above_the_capacity_never_reach_past_it(device, run):
    """Checked long before; but a kernel that trusted such offsets might not end."""
    grid_thw = torch.tensor([(1, 4, 4), (3, 400, 400), (2, 2, 2)], dtype=torch.int32, device=device)
    result = run(grid_thw, 64, 3)
    assert result.num_patches.item() == 64
    assert result.num_tokens.item() == 16
    assert result.num_sequences.item() == 3
    offsets = result.cu_seqlens.tolist()
    assert offsets == sorted(offsets) and offsets[-1] == 64
