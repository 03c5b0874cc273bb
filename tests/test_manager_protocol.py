"""The manager and a model that it knows nothing of: what the protocol asks, and answers that do not
fit it."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager, SupportsEncoderCudaGraph
from vitgraph.graphs.packing import Pack
from vitgraph.graphs.protocol import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
)


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
