"""Data parallel: the outputs of one process from 1 to 4 of them.

ranks.py runs the methods of `Cases` on every rank.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

WORLDS = [1, 2, 3, 4]
IMAGES = {
    "no_items": [],
    "one_item": [(1, 4, 4)],
    "two_items": [(1, 4, 4), (1, 8, 6)],
    "equal_items": [(1, 4, 4)] * 5,
    "uneven_items": [(1, 4, 4), (1, 12, 10), (1, 2, 2), (1, 8, 6), (1, 2, 2), (1, 4, 8), (1, 6, 6)],
}
CASES = [
    *IMAGES,
    "videos",
    "through_a_manager",
    "idle_ranks_launch_nothing",
    "other_grids_of_the_same_size_raise",
    "another_number_of_items_raises",
    "another_dtype_raises",
    "a_model_that_changed_its_dtype",
    "threads_take_turns",
    "a_broken_batch_raises_everywhere",
    "a_rank_that_fails_raises_everywhere",
    "a_rank_that_fails_to_encode_raises_everywhere",
    "a_rank_that_is_a_call_behind_raises_everywhere",
    "usable_after_a_mistake",
    "without_the_check",
    "a_group_of_some_ranks",
    "the_check_beside_nccl",
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_with_one_process(case, world, outcomes) -> None:
    assert [rank[case] for rank in outcomes[world]] == [None] * world


class Cases:
    """The cases that every rank runs, by name."""

    def __init__(self, world: int, rank: int) -> None:
        from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
        from vitgraph.graphs.parallel.data_parallel import DataParallelEncoder

        self.world, self.rank = world, rank
        self.make = DataParallelEncoder
        self.encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
        self.parallel = DataParallelEncoder(self.encoder)

    def __getattr__(self, case: str):
        """The cases of IMAGES."""
        if case not in IMAGES:
            raise AttributeError(case)
        return lambda: self.images(case)

    def batch(self, grids: list) -> dict:
        """The same pixels on every rank."""
        import torch

        patches = sum(t * h * w for t, h, w in grids)
        pixels = torch.randn(patches, 1536, generator=torch.Generator().manual_seed(patches))
        return {"pixel_values": pixels, "image_grid_thw": grids}

    def expect(self, outputs: list, pixels, grids: list) -> None:
        import torch

        assert [output.shape for output in outputs] == [
            (t * h * w // 4, self.encoder.config.output_width) for t, h, w in grids
        ]
        for output, rows, grid in zip(
            outputs, pixels.split([t * h * w for t, h, w in grids]), grids, strict=True
        ):
            torch.testing.assert_close(output, self.encoder(rows, [grid]), rtol=1e-4, atol=1e-5)

    def images(self, case: str) -> None:
        batch = self.batch(IMAGES[case])
        outputs = self.parallel.execute(batch)
        if not IMAGES[case]:
            assert outputs == []
            return
        self.expect(outputs, batch["pixel_values"], IMAGES[case])

    def videos(self) -> None:
        grids = [(3, 4, 4), (1, 6, 4), (2, 2, 8)]
        batch = self.batch(grids)
        outputs = self.parallel.execute(
            {"pixel_values_videos": batch["pixel_values"], "video_grid_thw": grids}
        )
        self.expect(outputs, batch["pixel_values"], grids)

    def through_a_manager(self) -> None:
        from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager

        manager = EncoderCudaGraphManager(self.encoder, CompilationConfig(True, (16, 32), 4))
        manager.capture()
        grids = IMAGES["uneven_items"]
        batch = self.batch(grids)
        self.expect(self.make(manager).execute(batch), batch["pixel_values"], grids)
        stats = manager.get_cumulative_stats()
        assert 0 < stats["graph_hits"] + stats["graph_misses"] <= -(-len(grids) // self.world) + 2

    def idle_ranks_launch_nothing(self) -> None:
        """KNOWN_FAILURES 7."""
        launched, model = [], self.parallel.model
        forward = model.encoder_eager_forward
        model.encoder_eager_forward = lambda batch: launched.append(1) or forward(batch)
        try:
            self.parallel.execute(self.batch([(1, 4, 4)]))
            assert len(launched) == (1 if self.rank == 0 else 0)
            self.parallel.execute(self.batch([]))
            assert len(launched) == (1 if self.rank == 0 else 0)
        finally:
            del model.encoder_eager_forward

    def raises(self, batch: dict, message: str) -> None:
        try:
            self.parallel.execute(batch)
        except ValueError as error:
            assert message in str(error), error
            return
        assert self.world == 1, "no ValueError"

    def other_grids_of_the_same_size_raise(self) -> None:
        last = self.rank == self.world - 1
        grids = [(1, 4, 16)] if last else [(1, 8, 8)]
        self.raises(self.batch(grids), f"rank {self.world - 1} has 1 of other sizes")

    def another_number_of_items_raises(self) -> None:
        grids = [(1, 4, 4)] * (2 if self.rank == self.world - 1 else 0)
        self.raises(self.batch(grids), f"rank 0 has 0 items, rank {self.world - 1} has 2 items")

    def another_dtype_raises(self) -> None:
        import torch

        last = self.rank == self.world - 1
        self.encoder.to(torch.float64 if last else torch.float32)
        self.raises(self.batch([(1, 4, 4)]), "1 of other sizes, kinds, dtype or graphs")
        self.encoder.to(torch.float32)

    def a_model_that_changed_its_dtype(self) -> None:
        """A manager without graphs serves it; its own buffers have the dtype of before."""
        import torch

        from vitgraph.graphs import DataParallelEncoder, EncoderCudaGraphManager

        parallel = DataParallelEncoder(EncoderCudaGraphManager(self.encoder))
        self.encoder.to(torch.float64)
        outputs = parallel.execute(self.batch([(1, 4, 4)] * self.world))
        assert [output.dtype for output in outputs] == [torch.float64] * self.world
        self.encoder.to(torch.float32)

    def threads_take_turns(self) -> None:
        """Equal batches from three threads: which thread comes first differs between ranks."""
        grids = [(1, 4, 4)] * self.world
        with ThreadPoolExecutor(3) as pool:
            for outputs in pool.map(self.parallel.execute, [self.batch(grids) for _ in range(6)]):
                assert len(outputs) == self.world

    def a_broken_batch_raises_everywhere(self) -> None:
        batch = self.batch([(1, 4, 4)])
        if self.rank == self.world - 1:
            batch["image_grid_thw"] = [(1, 3, 4)]
            self.raises(batch, "item 0: h 3 and w 4")
        else:
            self.raises(batch, f"ranks [{self.world - 1}] were given no valid batch")

    def a_rank_that_fails_raises_everywhere(self) -> None:
        """Not only for a ValueError: without it the others would pair this batch with the next."""
        last = self.rank == self.world - 1

        def fail(mm_kwargs: dict) -> dict:
            raise RuntimeError("no memory")

        if last:
            self.parallel.model.check_encoder_inputs = fail
        try:
            self.parallel.execute(self.batch([(1, 4, 4)]))
        except (ValueError, RuntimeError) as error:
            assert isinstance(error, RuntimeError) == last, error
        else:
            raise AssertionError("nothing raised")
        finally:
            if last:
                del self.parallel.model.check_encoder_inputs

    def a_rank_that_fails_to_encode_raises_everywhere(self) -> None:
        """And leaves nothing behind: the next batches are not gathered with what is left of it."""
        last = self.rank == self.world - 1
        grids = [(1, 4, 4)] * self.world

        def fail(mm_kwargs: dict) -> None:
            raise RuntimeError("no memory")

        if last:
            self.parallel.model.encoder_eager_forward = fail
        try:
            self.parallel.execute(self.batch(grids))
        except RuntimeError as error:
            expected = "no memory" if last else f"ranks [{self.world - 1}] failed to encode"
            assert expected in str(error), error
        else:
            raise AssertionError("nothing raised")
        finally:
            if last:
                del self.parallel.model.encoder_eager_forward
        for name in ("uneven_items", "two_items"):
            self.images(name)

    def a_rank_that_is_a_call_behind_raises_everywhere(self) -> None:
        """Batches of the same sizes, but not the same batch."""
        last = self.rank == self.world - 1
        self.parallel._calls -= last
        self.raises(self.batch([(1, 4, 4)]), "the ranks hold different batches")
        self.parallel._calls += last

    def usable_after_a_mistake(self) -> None:
        self.images("uneven_items")

    def without_the_check(self) -> None:
        grids = IMAGES["two_items"]
        batch = self.batch(grids)
        unchecked = self.make(self.encoder, check=False)
        self.expect(unchecked.execute(batch), batch["pixel_values"], grids)

    def a_group_of_some_ranks(self) -> None:
        import torch.distributed as dist

        members = list(range(self.world))[-2:]
        group = dist.new_group(members)
        if self.rank in members:
            grids = IMAGES["uneven_items"]
            batch = self.batch(grids)
            outputs = self.make(self.encoder, group).execute(batch)
            self.expect(outputs, batch["pixel_values"], grids)

    def the_check_beside_nccl(self) -> None:
        """Batches are compared over a gloo group of their own where the group's backend is not
        gloo; there is no NCCL here, so only the name is."""
        from unittest import mock

        import torch.distributed as dist

        members = list(range(self.world))[-2:]
        group = dist.new_group(members)
        if self.rank not in members:
            return
        with mock.patch.object(dist, "get_backend", lambda group: "nccl"):
            parallel = self.make(self.encoder, group)
        assert parallel._check_group is not group
        grids = IMAGES["two_items"]
        batch = self.batch(grids)
        self.expect(parallel.execute(batch), batch["pixel_values"], grids)
