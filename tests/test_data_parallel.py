"""Data parallel: a balanced assignment, and the outputs of one process from 1 to 4 of them.

Run as a script, this file is the ranks: each tries every case and writes what went wrong, by case.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


sizes = st.lists(st.integers(0, 5000) | st.sampled_from([100, 256]), max_size=40)


@given(sizes, st.integers(1, 9))
def test_every_item_exactly_once_in_order(sizes, world) -> None:
    from vitgraph.graphs.data_parallel import assign

    ranks = assign(sizes, world)
    assert len(ranks) == world
    assert sorted(index for rank in ranks for index in rank) == list(range(len(sizes)))
    assert all(rank == sorted(rank) for rank in ranks)
    assert ranks == assign(sizes, world)


@given(sizes.filter(any), st.integers(1, 9))
def test_balance(sizes, world) -> None:
    """Longest first keeps every load within a mean and one item, and leaves no rank idle that
    could help."""
    from vitgraph.graphs.data_parallel import assign

    ranks = assign(sizes, world)
    loads = [sum(max(sizes[index], 1) for index in rank) for rank in ranks]
    weights = [max(size, 1) for size in sizes]
    busiest = max(range(world), key=loads.__getitem__)
    smallest = min(max(sizes[index], 1) for index in ranks[busiest])
    # times `world`, in integers: a quotient would be rounded
    assert world * loads[busiest] <= sum(weights) + max(weights) * (world - 1)
    assert loads[busiest] - smallest <= min(loads)
    assert sum(map(bool, ranks)) == min(world, len(sizes))


def test_equal_items_stay_neighbours() -> None:
    from vitgraph.graphs.data_parallel import assign

    assert assign([7] * 6, 3) == [[0, 1], [2, 3], [4, 5]]
    assert assign([1, 9, 1, 1, 1], 2) == [[1], [0, 2, 3, 4]]


def test_no_world() -> None:
    from vitgraph.graphs.data_parallel import assign

    with pytest.raises(ValueError, match="world size 0"):
        assign([1], 0)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[int, list[dict[str, str | None]]]:
    """What went wrong, by world size, rank and case; one process imports torch for all ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder)]
    subprocess.run(command, env=environment, timeout=240, check=True)
    return {
        world: [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]
        for world in WORLDS
    }


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_with_one_process(case, world, outcomes) -> None:
    assert [rank[case] for rank in outcomes[world]] == [None] * world


def run_worlds(folder: Path) -> None:
    """Fork the ranks of each world size from this process, which has started no thread."""
    import multiprocessing

    import vitgraph.graphs.data_parallel

    assert vitgraph.graphs.data_parallel
    context = multiprocessing.get_context("fork")
    for world in WORLDS:
        ranks = [
            context.Process(target=run_rank, args=(folder, world, rank)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            if process.exitcode != 0:
                process.kill()
                sys.exit(f"a rank of {world} ended with {process.exitcode}")


def run_rank(folder: Path, world: int, rank: int) -> None:
    """Try every case; what a rank got wrong must not keep it from the collectives of the others."""
    import traceback
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{world}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=30),
    )
    cases = Cases(world, rank)
    outcomes: dict[str, str | None] = {}
    for case in CASES:
        try:
            cases.images(case) if case in IMAGES else getattr(cases, case)()
            outcomes[case] = None
        except Exception:
            outcomes[case] = traceback.format_exc()
    (folder / f"{world}-{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


class Cases:
    """The cases that every rank runs, by name."""

    def __init__(self, world: int, rank: int) -> None:
        from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
        from vitgraph.graphs.data_parallel import DataParallelEncoder

        self.world, self.rank = world, rank
        self.make = DataParallelEncoder
        self.encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])
        self.parallel = DataParallelEncoder(self.encoder)

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
        self.raises(self.batch([(1, 4, 4)]), "1 of other sizes, kinds or dtype")
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


if __name__ == "__main__":
    run_worlds(Path(sys.argv[1]))
