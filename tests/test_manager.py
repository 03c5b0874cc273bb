"""The manager: same outputs as eagerly, in order, for our encoder and for a model it knows nothing
of.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from vitgraph.bench.exactness import relative_error
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder, VisionConfig
from vitgraph.graphs import (
    CompilationConfig,
    EncoderCudaGraphManager,
    SupportsEncoderCudaGraph,
)
from vitgraph.graphs.packing import Pack
from vitgraph.graphs.protocol import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
)

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


def test_mistakes_leave_the_manager_usable(manager, encoder, batch) -> None:
    good = batch([(1, 4, 4)])
    bad_batches = {
        "got ['pixel_values']": {"pixel_values": good["pixel_values"]},
        "a batch has": good | {"pixel_values_videos": good["pixel_values"]},
        "item 0 with grid (1, 4, 8) needs rows 0..31": good | {"image_grid_thw": [(1, 4, 8)]},
        "item 0: h 3 and w 4": good | {"image_grid_thw": [(1, 3, 4)]},
    }
    before = manager.get_cumulative_stats()
    for message, mm_kwargs in bad_batches.items():
        with pytest.raises(ValueError) as error:
            manager.execute(mm_kwargs)
        assert message in str(error.value)
    assert manager.get_cumulative_stats() == before
    expected = encoder(good["pixel_values"], [(1, 4, 4)])
    torch.testing.assert_close(manager.execute(good)[0], expected, rtol=1e-5, atol=1e-5)


WRONG = {
    "a_tuple": lambda good: tuple(good.values()),
    "none": lambda good: None,
    "nested": lambda good: (
        good | {"pixel_values": torch.nested.nested_tensor([good["pixel_values"]])}
    ),
    "no_grids": lambda good: good | {"image_grid_thw": None},
    "swapped": lambda good: {
        "pixel_values": torch.tensor(good["image_grid_thw"]),
        "image_grid_thw": good["pixel_values"],
    },
    "swapped_arrays": lambda good: good | {"image_grid_thw": good["pixel_values"].numpy()},
    "swapped_lists": lambda good: good | {"image_grid_thw": good["pixel_values"].tolist()},
    "nested_grids": lambda good: (
        good | {"image_grid_thw": torch.nested.nested_tensor([torch.tensor([1, 4, 4])])}
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_batch_is_said_in_a_few_words(name, manager, batch) -> None:
    """KNOWN_FAILURES 40."""
    with pytest.raises(ValueError) as error:
        manager.execute(WRONG[name](batch([(1, 4, 4)])))
    assert any(word in str(error.value) for word in ("batch", "pixel_values", "grid"))
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("channels", [1, 6])
def test_bytes_have_three_channels(channels, tools) -> None:
    """KNOWN_FAILURES 40."""
    config = VisionConfig.from_dict(tools.tiny | {"in_channels": channels})
    encoder = Qwen3VLVisionEncoder.random(config)
    pixels = torch.zeros(16, config.patch_width, dtype=torch.uint8)
    message = f"uint8 pixels need in_channels 3, this encoder has {channels}"
    for use in (
        lambda: encoder(pixels, [(1, 4, 4)]),
        lambda: EncoderCudaGraphManager(encoder).execute(
            {"pixel_values": pixels, "image_grid_thw": [(1, 4, 4)]}
        ),
        lambda: Qwen3VLVisionEncoder(config, pixel_dtype=torch.uint8),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    assert encoder(pixels.float(), [(1, 4, 4)]).isfinite().all()


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


def test_weights_updated_in_place_are_seen(tools, batch) -> None:
    encoder = Qwen3VLVisionEncoder.from_transformers(tools.make_reference())
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64,), 4))
    manager.capture()
    mm_kwargs = batch([(1, 4, 4)])
    before = manager.execute(mm_kwargs)[0]
    with torch.no_grad():
        encoder.merger.linear_fc2.bias.add_(1)
    after = manager.execute(mm_kwargs)[0]
    width = encoder.config.out_hidden_size
    torch.testing.assert_close(after[:, :width], before[:, :width] + 1)


def test_static_buffers_are_shared(encoder) -> None:
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64, 128, 512), 8))
    manager.capture()
    graphs = list(manager.budget_graphs.values())
    assert len({graph.input_buffer.data_ptr() for graph in graphs}) == 1
    assert len({graph.metadata_buffers["output"].data_ptr() for graph in graphs}) == 1
    rows = {graph.token_budget: len(graph.input_buffer) for graph in graphs}
    # KNOWN_FAILURES 4: the rows follow from the budget, whatever the frames are.
    assert rows == {64: 256, 128: 512, 512: 2048}


class SegmentSum:
    """A model that is nothing like ours: output row = sum of an item's rows so far, times a padded
    weight.

    Its metadata buffers must be zeroed: rows past the batch would otherwise add to a checksum
        column.
    """

    width = 5

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(("sound",), {"sound": "samples"}, ("weight", "start"), 3)

    def get_encoder_cudagraph_budget_range(self, config: Any = None) -> tuple[int, int]:
        return 4, 32

    def get_encoder_cudagraph_num_items(self, mm_kwargs) -> int:
        return len(mm_kwargs["lengths"])

    def get_encoder_cudagraph_per_item_output_tokens(self, mm_kwargs) -> list[int]:
        return list(mm_kwargs["lengths"])

    def get_encoder_cudagraph_per_item_input_sizes(self, mm_kwargs) -> list[int]:
        return list(mm_kwargs["lengths"])

    def select_encoder_cudagraph_items(self, mm_kwargs, indices) -> dict[str, Any]:
        parts = mm_kwargs["samples"].split(mm_kwargs["lengths"])
        lengths = [mm_kwargs["lengths"][i] for i in indices]
        return {"samples": torch.cat([parts[i] for i in indices]), "lengths": lengths}

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget, max_batch_size, max_frames_per_batch, device, dtype
    ) -> EncoderCudaGraphCaptureInputs:
        return EncoderCudaGraphCaptureInputs(
            {"samples": torch.ones(token_budget, self.width, device=device, dtype=dtype)},
            {
                "weight": torch.ones(token_budget, 1, device=device, dtype=dtype),
                "start": torch.zeros(token_budget, dtype=torch.int64, device=device),
            },
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs, max_batch_size, max_frames_per_batch
    ) -> EncoderCudaGraphReplayBuffers:
        lengths = mm_kwargs["lengths"]
        weight = torch.cat([torch.full((n, 1), float(n)) for n in lengths])
        start = [sum(lengths[:i]) for i, n in enumerate(lengths) for _ in range(n)]
        return EncoderCudaGraphReplayBuffers({"weight": weight, "start": torch.tensor(start)})

    def encoder_cudagraph_forward(self, mm_kwargs, buffers) -> Tensor:
        running = mm_kwargs["samples"].sum(1, keepdim=True).cumsum(0)
        before = torch.cat([torch.zeros_like(running[:1]), running])[buffers["start"]]
        checksum = mm_kwargs["samples"].sum() * torch.ones_like(running)
        weights = buffers["weight"].sum() * torch.ones_like(running)
        return torch.cat([(running - before) * buffers["weight"], checksum, weights], dim=1)

    def encoder_eager_forward(self, mm_kwargs) -> Tensor:
        buffers = self.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, 0, 0).buffers
        device = mm_kwargs["samples"].device
        return self.encoder_cudagraph_forward(
            mm_kwargs, {key: value.to(device) for key, value in buffers.items()}
        )


def test_a_replay_without_a_buffer_is_refused() -> None:
    """KNOWN_FAILURES 41: the graph would read the last batch's."""
    model, omitted = SegmentSum(), []
    prepare = model.prepare_encoder_cudagraph_replay_buffers

    def without(*arguments):
        buffers = prepare(*arguments).buffers
        return EncoderCudaGraphReplayBuffers(
            {key: value for key, value in buffers.items() if key not in omitted}
        )

    model.prepare_encoder_cudagraph_replay_buffers = without
    manager = EncoderCudaGraphManager(model, CompilationConfig(True, (8,), 4))
    manager.capture()
    batch = {"samples": torch.randn(3, model.width), "lengths": [3]}
    expected = manager.execute(batch)
    omitted.append("weight")
    with pytest.raises(ValueError, match="SegmentSum prepared a replay without weight"):
        manager.execute(batch)
    omitted.clear()
    assert torch.equal(manager.execute(batch)[0], expected[0])


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_needs_zeroed_buffers(device) -> None:
    model = SegmentSum()
    assert isinstance(model, SupportsEncoderCudaGraph)
    config = CompilationConfig(True, (4, 8, 32), 4)
    packs: list[Pack] = []
    manager = EncoderCudaGraphManager(
        model, config, device=device, on_pack=lambda pack, _: packs.append(pack)
    )
    manager.capture()
    for lengths in ([30], [3, 5, 2], [1], [40, 2], [2, 2, 2, 2, 2, 2, 2]):
        samples = torch.randn(sum(lengths), model.width, device=device)
        mm_kwargs = {"samples": samples, "lengths": lengths}
        packs.clear()
        outputs = manager.execute(mm_kwargs)
        assert packs
        for pack in packs:
            selected = model.select_encoder_cudagraph_items(mm_kwargs, list(pack.indices))
            expected = model.encoder_eager_forward(selected)
            output = torch.cat([outputs[index] for index in pack.indices])
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert manager.get_cumulative_stats()["graph_misses"] == 1


def test_models_without_the_protocol_are_refused() -> None:
    assert not isinstance(torch.nn.Linear(2, 2), SupportsEncoderCudaGraph)
    with pytest.raises(ValueError, match="Linear lacks get_encoder_cudagraph_config"):
        EncoderCudaGraphManager(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int32}, "dtype torch.int32 is not the model's, torch.float32"),
        ({"device": "meta"}, "device meta is not the model's, cpu"),
        ({"config": {"cudagraph_mm_encoder": True}}, "config is a dict, no CompilationConfig"),
    ],
)
def test_what_contradicts_the_model_is_refused(options, message, encoder) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderCudaGraphManager(encoder, **options)


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


@pytest.mark.gpu
def test_a_backend_that_reads_lengths_cannot_be_captured() -> None:
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"], device="cuda", attention="sdpa")
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64,), 4))
    with pytest.raises(ValueError, match="'sdpa' reads sequence lengths on the host"):
        manager.capture()
    assert not manager.is_captured()


def test_a_processors_whole_output_may_be_handed_in(manager, batch) -> None:
    mm_kwargs = batch([(1, 4, 4)])
    text = {"input_ids": torch.zeros(1, 3), "attention_mask": torch.ones(1, 3)}
    assert torch.equal(manager.execute(mm_kwargs | text)[0], manager.execute(mm_kwargs)[0])


def test_a_model_that_contradicts_itself_is_named() -> None:
    class Miscounts(SegmentSum):
        def get_encoder_cudagraph_num_items(self, mm_kwargs) -> int:
            return 3

    class NoInput(SegmentSum):
        def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
            return EncoderCudaGraphConfig(("sound", "smell"), {"sound": "samples"}, (), 3)

    batch = {"samples": torch.ones(6, 5), "lengths": [2, 4]}
    with pytest.raises(ValueError, match="Miscounts says that a batch has 3 items, and 2 outputs"):
        EncoderCudaGraphManager(Miscounts()).execute(batch)
    with pytest.raises(ValueError, match="NoInput has graphs for smell, but an input only for s"):
        EncoderCudaGraphManager(NoInput())


def sums(kind: type = SegmentSum, **options: Any) -> EncoderCudaGraphManager:
    manager = EncoderCudaGraphManager(kind(), CompilationConfig(True, (4, 8, 32), 4), **options)
    manager.capture()
    return manager


def sound(lengths: list[int], key: str = "samples", width: int = SegmentSum.width) -> dict:
    return {key: torch.randn(sum(lengths), width), "lengths": lengths}


class Another(SegmentSum):
    """Takes "speech", too, for which it has no graphs."""

    def encoder_eager_forward(self, mm_kwargs) -> Tensor:
        rows = mm_kwargs["samples"] if "samples" in mm_kwargs else mm_kwargs["speech"]
        return rows[:, :3]


def test_a_modality_without_graphs_runs_eagerly() -> None:
    manager, speech = sums(Another), sound([1, 3], "speech")
    batches = [sound([2]), speech, sound([1])]
    results = list(map(manager.execute, batches))  # a StopIteration would end it quietly
    assert len(results) == 3
    assert torch.equal(torch.cat(results[1]), speech["speech"][:, :3])
    assert manager.get_cumulative_stats()["misses_by_reason"] == {"other_modality": 2}


@pytest.mark.parametrize(
    ("mm_kwargs", "message"),
    [
        (sound([3], width=1), r"captured for inputs of \(4, 5\), got \(3, 1\)"),
        (
            sound([2]) | {"samples": torch.ones(9, 5)},
            r"captured for inputs of \(4, 5\), got \(9, 5\)",
        ),
    ],
    ids=["narrow", "long"],
)
def test_inputs_of_another_shape_are_refused(mm_kwargs, message) -> None:
    """A copy would repeat one column over all of them."""
    manager = sums()
    with pytest.raises(ValueError, match=message):
        manager.execute(mm_kwargs)
    assert manager.get_cumulative_stats()["batches"] == 0


class Odd(SegmentSum):
    """Eagerly it computes what `eagerly` makes of the rows; so many sequences as `sequences`."""

    eagerly = staticmethod(lambda rows: rows)
    sequences = 2

    def encoder_eager_forward(self, mm_kwargs) -> Tensor:
        return self.eagerly(super().encoder_eager_forward(mm_kwargs))

    def get_encoder_cudagraph_per_item_sequences(self, mm_kwargs) -> list[int]:
        return [1] * self.sequences


@pytest.mark.parametrize(
    ("oddity", "message"),
    [
        (
            {"eagerly": lambda rows: rows[:, :1]},
            r"Odd returned rows of \(1,\) after rows of \(3,\)",
        ),
        ({"eagerly": lambda rows: rows[1:]}, "Odd returned 39 rows for 40 tokens"),
        ({"sequences": 1}, "Odd says that a batch has 2 items, and 1 sequences"),
        ({"sequences": 0}, "Odd says that a batch has 2 items, and 0 sequences"),
    ],
    ids=["narrow", "short", "one_sequence", "no_sequences"],
)
def test_answers_that_do_not_fit_are_named(oddity, message) -> None:
    manager = sums(Odd)
    vars(manager.model).update(oddity)
    with pytest.raises(ValueError, match=message):
        manager.execute(sound([40, 2]))
    assert manager.get_cumulative_stats()["batches"] == 0


class Scalar(SegmentSum):
    """Has a metadata buffer without dimensions, as the longest sequence is."""

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(("sound",), {"sound": "samples"}, ("longest",), 1)

    def prepare_encoder_cudagraph_capture_inputs(self, *about) -> EncoderCudaGraphCaptureInputs:
        inputs = super().prepare_encoder_cudagraph_capture_inputs(*about)
        return EncoderCudaGraphCaptureInputs(inputs.mm_kwargs, {"longest": torch.tensor(about[0])})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs, max_batch_size, max_frames_per_batch
    ) -> EncoderCudaGraphReplayBuffers:
        return EncoderCudaGraphReplayBuffers({"longest": torch.tensor(max(mm_kwargs["lengths"]))})

    def encoder_cudagraph_forward(self, mm_kwargs, buffers) -> Tensor:
        return mm_kwargs["samples"][:, :1] * buffers["longest"]


def test_metadata_without_dimensions() -> None:
    manager, batch = sums(Scalar), sound([2, 3])
    assert torch.equal(torch.cat(manager.execute(batch)), batch["samples"][:, :1] * 3)


def test_a_pack_that_is_shown_may_raise_or_encode() -> None:
    """The batch is done by then, and counted."""
    manager = sums()
    seen = []

    def encode_once(pack: Pack, _: Any) -> None:
        seen.append(pack.tokens)
        if len(seen) == 1:
            manager.execute(sound([1]))

    manager.on_pack = encode_once
    manager.execute(sound([2, 40]))
    assert seen == [2, 1, 40]
    manager.on_pack = lambda pack, _: seen[99]
    with pytest.raises(IndexError):
        manager.execute(sound([2, 40]))
    stats = manager.get_cumulative_stats()
    assert (stats["batches"], stats["graph_hits"], stats["graph_misses"]) == (3, 3, 2)


def test_a_model_that_moved_is_captured_where_it_is(monkeypatch) -> None:
    """Not with the stream, nor on the device, of the capture before."""
    model = SegmentSum()
    model.device = torch.device("cpu")
    manager = EncoderCudaGraphManager(model, CompilationConfig(True, (8,), 4))
    manager.capture()
    manager._stream, current = object(), []
    monkeypatch.setattr(
        "vitgraph.graphs.manager.on_device", lambda device: current.append(device) or nullcontext()
    )
    model.device = torch.device("meta")
    manager.capture()
    assert current == [torch.device("meta")]
    assert manager._stream is None


def test_no_items_after_a_move(tools) -> None:
    encoder = Qwen3VLVisionEncoder.from_transformers(tools.make_reference())
    manager = EncoderCudaGraphManager(encoder)
    encoder.double()
    empty = {"pixel_values": torch.empty(0, 1536), "image_grid_thw": []}
    assert manager.encode(empty)[0].dtype == torch.float64
