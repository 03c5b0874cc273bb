"""The manager: same outputs as eagerly, in order; statistics, memory, pixels from anywhere."""

import pytest
import torch

from vitgraph.bench.exactness import relative_error
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager

BUDGETS = (8, 16, 64)
BATCHES = {
    "below_every_budget": [(1, 2, 4)],
    "at_the_smallest": [(1, 4, 8)],
    "just_above_the_smallest": [(1, 2, 18)],
    "at_the_largest": [(1, 16, 16)],
    "just_above_the_largest": [(1, 2, 130)],
    "far_above": [(1, 20, 20)],
    "many_small": [(1, 2, 2 * n) for n in range(1, 12)],
    "every_kind": [(1, 20, 20), (1, 4, 4), (3, 8, 8), (1, 2, 130), (1, 4, 8), (1, 2, 2)],
    "too_many_frames": [(20, 2, 2), (1, 2, 4)],
}


@pytest.fixture(scope="module")
def manager(encoder) -> EncoderCudaGraphManager:
    # 16 frames: the configuration may limit what the encoder would not.
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, BUDGETS, 8, 16))
    manager.capture()
    return manager


@pytest.mark.parametrize("grids", BATCHES.values(), ids=BATCHES)
def test_equals_eager_in_order(grids, manager, encoder, batch) -> None:
    mm_kwargs = batch(grids)
    outputs = manager.execute(mm_kwargs)
    pixels = mm_kwargs["pixel_values"].split([t * h * w for t, h, w in grids])
    assert len(outputs) == len(grids)
    for output, item_pixels, grid in zip(outputs, pixels, grids, strict=True):
        expected = encoder(item_pixels, [grid])
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_videos(manager, encoder, batch) -> None:
    mm_kwargs = batch([(3, 8, 8), (2, 4, 4)])
    outputs = manager.execute(
        {
            "pixel_values_videos": mm_kwargs["pixel_values"],
            "video_grid_thw": torch.tensor(mm_kwargs["image_grid_thw"]),
        }
    )
    expected = encoder(mm_kwargs["pixel_values"], mm_kwargs["image_grid_thw"])
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-5, atol=1e-5)


def test_statistics(encoder, batch) -> None:
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (16, 32), 8))
    manager.capture()
    manager.execute(batch([(1, 8, 8), (1, 2, 2), (1, 12, 12)]))
    manager.execute(batch([(1, 4, 4)]))
    stats = manager.get_cumulative_stats()
    assert stats["graphs"] == "none on a CPU: hits were packed"
    assert (stats["graph_hits"], stats["graph_misses"]) == (3, 1)
    assert stats["hit_rate"] == 0.75
    assert stats["batches"] == 2
    for budget, items, tokens in ((16, 1, 4), (32, 2, 17)):
        numbers = stats["budgets"][budget]
        assert (numbers["replays"], numbers["items"], numbers["tokens"]) == (1, items, tokens)
        assert numbers["fill"] == tokens / budget


def test_statistics_are_logged_periodically(encoder, batch, caplog) -> None:
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64,), 4), log_interval=2)
    manager.capture()
    with caplog.at_level("INFO", logger="vitgraph"):
        manager.execute(batch([(1, 4, 4)]))
        assert not [r for r in caplog.records if "2 of 3 items" in r.message]
        manager.execute(batch([(1, 4, 4), (1, 2, 130)]))
    assert "2 of 3 items packed, no graphs on a CPU (66.7 %), 1 eagerly, 2 batches" in caplog.text


def test_what_a_higher_limit_would_save_is_said_once(encoder, batch, caplog) -> None:
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (16, 64), 2))
    manager.capture()
    with caplog.at_level("INFO", logger="vitgraph"):
        for _ in range(2):
            manager.execute(batch([(1, 4, 4)] * 5))
    said = [record.message for record in caplog.records if "said once" in record.message]
    assert len(said) == 1 and "5 items took 3 replays, for one may hold 2" in said[0]
    assert "with 5 they would take 1" in said[0]


def test_outputs_are_the_callers_own(manager, batch) -> None:
    first = manager.execute(batch([(1, 4, 4)]))[0]
    kept = first.clone()
    manager.execute(batch([(1, 4, 4)]))
    assert torch.equal(first, kept)


def test_borrowed_outputs_last_until_the_next_call(manager, batch) -> None:
    mm_kwargs = batch([(1, 4, 4), (1, 2, 2)])
    owned = torch.cat(manager.execute(mm_kwargs))
    borrowed = manager.execute(mm_kwargs, borrow=True)
    assert torch.equal(torch.cat(borrowed), owned)
    manager.execute(batch([(1, 4, 4), (1, 2, 2)]))
    assert not torch.equal(torch.cat(borrowed), owned)


def test_same_total_other_layout(manager, encoder, batch) -> None:
    """KNOWN_FAILURES 6: the layout of the replay before must not survive."""
    for grids in ([(1, 8, 16)], [(1, 8, 8), (1, 8, 8)], [(2, 8, 8)]):
        mm_kwargs = batch(grids)
        outputs = torch.cat(manager.execute(mm_kwargs))
        expected = encoder(mm_kwargs["pixel_values"], grids)
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)


def test_stale_rows_do_not_leak(manager, encoder, batch) -> None:
    """KNOWN_FAILURES 1 and 29: NaN left in the static buffers by an earlier batch stays there."""
    poison = batch([(1, 16, 16)])
    poison["pixel_values"].fill_(float("nan"))
    assert manager.execute(poison)[0].isnan().all()
    mm_kwargs = batch([(1, 16, 14)])
    expected = encoder(mm_kwargs["pixel_values"], [(1, 16, 14)])
    torch.testing.assert_close(manager.execute(mm_kwargs)[0], expected, rtol=1e-5, atol=1e-5)


def test_no_items(manager) -> None:
    empty = {"pixel_values": torch.empty(0, 1536), "image_grid_thw": torch.empty(0, 3).long()}
    assert manager.execute(empty) == []


def test_graphs_off_runs_eagerly(encoder, batch) -> None:
    manager = EncoderCudaGraphManager(encoder)
    manager.capture()
    assert not manager.is_captured()
    mm_kwargs = batch([(1, 4, 4), (1, 2, 2)])
    expected = encoder(mm_kwargs["pixel_values"], mm_kwargs["image_grid_thw"])
    assert torch.equal(torch.cat(manager.execute(mm_kwargs)), expected)


def test_clear_and_capture_again(encoder, batch) -> None:
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64,), 4))
    mm_kwargs = batch([(1, 4, 4)])
    manager.capture()
    captured = manager.execute(mm_kwargs)[0]
    manager.clear()
    assert not manager.is_captured()
    torch.testing.assert_close(manager.execute(mm_kwargs)[0], captured)
    manager.capture()
    assert torch.equal(manager.execute(mm_kwargs)[0], captured)
    stats = manager.get_cumulative_stats()
    assert (stats["graph_hits"], stats["graph_misses"]) == (2, 1)


def test_frames_are_limited_only_where_they_cost(encoder, batch) -> None:
    """KNOWN_FAILURES 2: a video of more frames than a replay may hold runs eagerly."""
    video = batch([(20, 2, 2), (1, 4, 4)])
    for frames, expected_budgets in ((None, [64]), (16, [64, None])):
        seen: list[int | None] = []
        manager = EncoderCudaGraphManager(
            encoder,
            CompilationConfig(True, (64,), 8, frames),
            on_pack=lambda pack, _, seen=seen: seen.append(pack.budget),
        )
        manager.capture()
        outputs = manager.execute(video)
        assert seen == expected_budgets
        expected = encoder(video["pixel_values"], video["image_grid_thw"])
        torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-5, atol=1e-5)


def test_static_buffers_are_shared(encoder) -> None:
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64, 128, 512), 8))
    manager.capture()
    graphs = list(manager.budget_graphs.values())
    assert len({graph.input_buffer.data_ptr() for graph in graphs}) == 1
    assert len({graph.metadata_buffers["output"].data_ptr() for graph in graphs}) == 1
    rows = {graph.token_budget: len(graph.input_buffer) for graph in graphs}
    # KNOWN_FAILURES 4: the rows follow from the budget, whatever the frames are.
    assert rows == {64: 256, 128: 512, 512: 2048}


def test_memory_is_reported_on_a_cpu(encoder) -> None:
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (8, 64), 4))
    manager.capture()
    report = manager.memory_report()["budgets"]
    buffers = manager.budget_graphs[64].input_buffer.nbytes
    assert report[64] >= buffers > report[8] >= 0


@pytest.fixture(scope="module")
def gpu_manager() -> EncoderCudaGraphManager:
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["2b"], device="cuda", dtype=torch.bfloat16)
    # KNOWN_FAILURES 1: what the graphs' memory holds before capture must not matter.
    poison = torch.full((2**30,), float("nan"), device="cuda", dtype=torch.bfloat16)
    del poison
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, BUDGETS, 8))
    manager.capture()
    return manager


@pytest.mark.gpu
@pytest.mark.parametrize("grids", BATCHES.values(), ids=BATCHES)
def test_graphs_equal_eager(grids, gpu_manager, batch) -> None:
    mm_kwargs = batch(grids, device="cuda", dtype=torch.bfloat16)
    encoder = gpu_manager.model.module
    before = gpu_manager.get_cumulative_stats()
    outputs = gpu_manager.execute(mm_kwargs)
    after = gpu_manager.get_cumulative_stats()
    assert after["graph_hits"] + after["graph_misses"] - len(grids) == (
        before["graph_hits"] + before["graph_misses"]
    )
    pixels = mm_kwargs["pixel_values"].split([t * h * w for t, h, w in grids])
    for output, item_pixels, grid in zip(outputs, pixels, grids, strict=True):
        expected = encoder(item_pixels, [grid])
        assert relative_error(output, expected) <= 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["host", "pinned", "device", "host_float32", "device_float32"])
def test_pixels_from_anywhere(source, gpu_manager, batch) -> None:
    mm_kwargs = batch([(1, 8, 12), (1, 4, 6)], device="cuda", dtype=torch.bfloat16)
    expected = torch.cat(gpu_manager.execute(mm_kwargs))
    pixels = mm_kwargs["pixel_values"]
    pixels = pixels.float() if source.endswith("float32") else pixels
    pixels = pixels if source.startswith("device") else pixels.cpu()
    pixels = pixels.pin_memory() if source == "pinned" else pixels
    assert torch.equal(
        torch.cat(gpu_manager.execute(mm_kwargs | {"pixel_values": pixels})), expected
    )


@pytest.mark.gpu
def test_other_streams_see_finished_outputs(gpu_manager, batch) -> None:
    batches = [batch([(1, 8, 8 + 2 * n)], device="cuda", dtype=torch.bfloat16) for n in range(8)]
    expected = [gpu_manager.execute(mm_kwargs)[0] for mm_kwargs in batches]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in batches]
    outputs = []
    for stream, mm_kwargs in zip(streams, batches, strict=True):
        with torch.cuda.stream(stream):
            outputs.append(gpu_manager.execute(mm_kwargs)[0])
    torch.cuda.synchronize()
    for output, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(output, wanted)


def test_a_processors_whole_output_may_be_handed_in(manager, batch) -> None:
    mm_kwargs = batch([(1, 4, 4)])
    text = {"input_ids": torch.zeros(1, 3), "attention_mask": torch.ones(1, 3)}
    assert torch.equal(manager.execute(mm_kwargs | text)[0], manager.execute(mm_kwargs)[0])


def test_no_items_after_a_move(tools) -> None:
    encoder = Qwen3VLVisionEncoder.from_transformers(tools.make_reference())
    manager = EncoderCudaGraphManager(encoder)
    encoder.double()
    empty = {"pixel_values": torch.empty(0, 1536), "image_grid_thw": []}
    assert manager.encode(empty)[0].dtype == torch.float64
