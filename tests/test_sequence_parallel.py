"""Rows of a batch shared over 1 to 4 ranks: the rows of one process, and nothing that hangs.

ranks.py runs the methods of `Cases` on every rank.
"""

from contextlib import suppress

import pytest

WORLDS = [1, 2, 3, 4]
GRIDS = {
    "one_image": [(1, 12, 10)],
    "fewer_tokens_than_ranks": [(1, 2, 4)],
    "shares_that_end_early": [(1, 2, 2), (1, 6, 6)],  # 10 tokens: of four ranks the last has one
    "several_items": [(1, 4, 4), (3, 4, 6), (1, 8, 6), (1, 2, 2), (2, 2, 8)],
    "a_video": [(5, 6, 4)],
}
CASES = [
    *GRIDS,
    "no_items",
    "eagerly_without_a_manager",
    "through_graphs",
    "bytes",
    "fp8",
    "interpreted_kernels",
    "a_nan_stays_in_its_item",
    "small_batches_are_not_shared",
    "capture_measures_the_same_everywhere",
    "what_pays_is_done",
    "other_batches_raise_before_anything_runs",
    "only_own_rows_attend",
    "budgets_that_are_large_enough",
    "other_graphs_are_not_replayed_together",
    "a_rank_that_fails_is_named_and_ends_it",
    "an_error_outlives_a_silent_rank",
    "an_interrupted_rank_goes_on_no_more",
    "all_ranks_fail_and_go_on",
    "what_cannot_be_shared",
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_with_one_process(case, world, outcomes) -> None:
    assert [rank[case] for rank in outcomes[world]] == [None] * world


class Cases:
    """The cases that every rank runs, by name."""

    def __init__(self, world: int, rank: int) -> None:
        from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
        from vitgraph.encoder.sequence_parallel import SequenceParallel
        from vitgraph.graphs import DataParallelEncoder

        self.world, self.rank = world, rank
        self.make, self.ranks = DataParallelEncoder, SequenceParallel(min_patches=0)
        self.random, self.tiny = Qwen3VLVisionEncoder.random, GEOMETRIES["tiny"]
        self.encoder = self.random(self.tiny)
        self.parallel = DataParallelEncoder(self.encoder, split=True)

    def __getattr__(self, case: str):
        """The cases of GRIDS."""
        if case not in GRIDS:
            raise AttributeError(case)
        return lambda: self.check(self.encoder, GRIDS[case])

    def pixels(self, grids: list):
        """The same on every rank."""
        import torch

        patches = sum(t * h * w for t, h, w in grids)
        return torch.randn(patches, 1536, generator=torch.Generator().manual_seed(patches))

    def check(self, encoder, grids: list, pixels=None, bound: float = 1e-5) -> None:
        import torch

        pixels = self.pixels(grids) if pixels is None else pixels
        together = encoder(pixels, grids, parallel=self.ranks)
        torch.testing.assert_close(together, encoder(pixels, grids), rtol=bound, atol=bound)

    def batch(self, grids: list) -> dict:
        return {"pixel_values": self.pixels(grids), "image_grid_thw": grids}

    def collectives(self, parallel) -> int:
        return parallel.together.parallel.collectives if self.world > 1 else 0

    def expect(self, outputs: list, grids: list) -> None:
        import torch

        tokens = [t * h * w // 4 for t, h, w in grids]
        expected = self.encoder(self.pixels(grids), grids).split(tokens)
        for output, rows in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, rows, rtol=1e-5, atol=1e-5)

    def no_items(self) -> None:
        assert self.parallel.execute(self.batch([])) == []

    def eagerly_without_a_manager(self) -> None:
        for grids in GRIDS.values():
            before = self.collectives(self.parallel)
            self.expect(self.parallel.execute(self.batch(grids)), grids)
            assert self.world == 1 or self.collectives(self.parallel) > before

    def through_graphs(self) -> None:
        """Two packs and an item above every budget; every rank replays the same."""
        from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager

        manager = EncoderCudaGraphManager(self.encoder, CompilationConfig(True, (16, 32), 4))
        parallel = self.make(manager, split=True)
        parallel.capture()
        grids = [*GRIDS["several_items"], (1, 14, 10)]
        self.expect(parallel.execute(self.batch(grids)), grids)
        replayed = manager if self.world == 1 else parallel.together.manager
        stats = replayed.get_cumulative_stats()
        assert (stats["graph_hits"], stats["graph_misses"]) == (5, 1)
        assert self.world == 1 or parallel.together.parallel.collectives > 0

    def bytes(self) -> None:
        import torch

        grids = GRIDS["several_items"]
        pixels = self.pixels(grids).mul(64).add(128).clamp(0, 255).to(torch.uint8)
        self.check(self.encoder, grids, pixels)

    def fp8(self) -> None:
        """A row's scales are its own, so a share's are, too."""
        encoder = self.random(self.tiny, linear_dtype="fp8")
        # the whole batch decides, not a share of it
        encoder.fp8_min_patches = sum(t * h * w for t, h, w in GRIDS["several_items"])
        self.check(encoder, GRIDS["several_items"], bound=1e-3)

    def interpreted_kernels(self) -> None:
        from dataclasses import replace

        import torch

        if self.world not in (1, 3):  # an interpreter takes its time
            return
        device = "cuda" if torch.cuda.is_available() else "cpu"
        config = replace(self.tiny, depth=1, deepstack_visual_indexes=())
        encoder = self.random(config, device=device, ops="triton", attention="triton")
        invariant = self.random(config, device=device, ops="triton", batch_invariant=True)
        with pytest.raises(ValueError, match="batch_invariant: the rows of a sequence"):
            invariant(self.pixels([(1, 2, 2)]), [(1, 2, 2)], parallel=self.ranks)
        grids = [(1, 4, 6), (1, 2, 2)]
        self.check(encoder, grids, bound=1e-5 if device == "cpu" else 1e-3)

    def a_nan_stays_in_its_item(self) -> None:
        grids = GRIDS["several_items"]
        pixels = self.pixels(grids)
        clean = self.encoder(pixels, grids, parallel=self.ranks)
        pixels[16 + 10] = float("nan")  # of the second item's first frame
        broken = self.encoder(pixels, grids, parallel=self.ranks)
        hit = broken.isnan().any(1)
        assert hit[4:10].all() and hit.sum() == 6
        assert clean[~hit].equal(broken[~hit])

    def small_batches_are_not_shared(self) -> None:
        from unittest import mock

        from vitgraph.encoder import sequence_parallel

        ranks = sequence_parallel.SequenceParallel()
        with mock.patch.object(sequence_parallel, "all_gather") as gather:
            rows = self.encoder(self.pixels([(1, 4, 4)]), [(1, 4, 4)], parallel=ranks)
        assert not gather.called
        assert rows.equal(self.encoder(self.pixels([(1, 4, 4)]), [(1, 4, 4)]))

    def capture_measures_the_same_everywhere(self) -> None:
        from unittest import mock

        import torch.distributed as dist

        from vitgraph.graphs.parallel import assignment

        parallel = self.make(self.encoder)
        with mock.patch.multiple(assignment, TRIAL=[(1, 8, 8)], LARGE=1 << 18):
            parallel.capture()
        every = [None] * self.world
        rates = parallel.together and parallel.together.rates
        dist.all_gather_object(every, rates)
        assert every == [rates] * self.world
        assert (rates is None) == (self.world == 1)

    def what_pays_is_done(self) -> None:
        """By rates that are given: links for nothing, then links that cost too much."""
        from unittest import mock

        from vitgraph.graphs.parallel.assignment import Rates

        parallel, grids = self.make(self.encoder), [(1, 16, 16)]
        if self.world == 1:
            return
        parallel.together.parallel.min_patches = 200
        for rates, shared in ((Rates(1e-6, 0, 0), True), (Rates(1e-12, 1, 1), False)):
            parallel.together.rates = rates
            before = self.collectives(parallel)
            self.expect(parallel.execute(self.batch(grids)), grids)
            assert (self.collectives(parallel) > before) == shared
        parallel.together.rates = Rates(1e-6, 0, 0)
        with mock.patch.object(parallel.together, "encode") as encode:
            self.expect(parallel.execute(self.batch([(1, 8, 8)])), [(1, 8, 8)])
        assert not encode.called, "fewer patches than are shared"

    def other_batches_raise_before_anything_runs(self) -> None:
        from unittest import mock

        from vitgraph.encoder import sequence_parallel

        last = self.rank == self.world - 1
        grids = [(1, 4, 16)] if last else [(1, 8, 8)]
        if self.world == 1:
            return
        with (
            mock.patch.object(sequence_parallel, "all_gather") as gather,
            pytest.raises(ValueError, match=f"rank {self.world - 1} has 1 of other sizes"),
        ):
            self.parallel.execute(self.batch(grids))
        assert not gather.called
        self.expect(self.parallel.execute(self.batch([(1, 8, 8)])), [(1, 8, 8)])

    def only_own_rows_attend(self) -> None:
        """What makes it faster."""
        from unittest import mock

        from vitgraph.encoder import sequence_parallel

        if self.world == 1:
            return
        attend, seen = sequence_parallel.attention_reference, []

        def look(qkv, offsets, queries):
            seen.append(queries.tolist())
            return attend(qkv, offsets, queries)

        with mock.patch.object(sequence_parallel, "attention_reference", look):
            self.check(self.encoder, [(1, 8, 8)])
        full = -(-16 // self.world) * 4
        own = [min(self.rank * full, 64), min((self.rank + 1) * full, 64)]
        assert seen == [own] * self.tiny.depth

    def budgets_that_are_large_enough(self) -> None:
        """And their memory, beside that of one rank."""
        from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager

        if self.world == 1:
            return
        for budgets, shared in (((16, 512), (512,)), ((16, 32), ())):
            manager = EncoderCudaGraphManager(self.encoder, CompilationConfig(True, budgets, 4))
            parallel = self.make(manager)
            parallel.together.capture(rates=False)
            assert parallel.together.budgets == shared
            model = parallel.together.model
            alone = manager.model.estimate_encoder_memory(512)
            assert model.estimate_encoder_memory(512) > alone

    def other_graphs_are_not_replayed_together(self) -> None:
        """A budget did not fit one rank's memory; later, one rank cleared its graphs."""
        from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager

        if self.world == 1:
            return
        last, grids = self.rank == self.world - 1, [(1, 8, 8), (1, 4, 4)]
        budgets = (8, 16) if last else (8, 16, 32)
        manager = EncoderCudaGraphManager(self.encoder, CompilationConfig(True, budgets, 4))
        parallel = self.make(manager, split=True)
        parallel.capture()
        assert parallel.together.budgets == ()
        self.expect(parallel.execute(self.batch(grids)), grids)
        manager = EncoderCudaGraphManager(self.encoder, CompilationConfig(True, (8, 16), 4))
        parallel = self.make(manager, split=True)
        parallel.capture()
        if last:
            parallel.together.manager.clear()
        with pytest.raises(ValueError, match="of other sizes, kinds, dtype or graphs"):
            parallel.execute(self.batch(grids))

    def an_error_outlives_a_silent_rank(self) -> None:
        """The others never answer: what the rank itself has to say is not lost in that."""
        from unittest import mock

        if self.world == 1:
            return
        parallel = self.make(self.encoder, split=True)
        silence = mock.Mock(side_effect=[parallel._exchange((0, 1)), RuntimeError("timed out")])
        with (
            mock.patch.object(parallel, "_exchange", silence),
            mock.patch.object(parallel.together, "encode", side_effect=RuntimeError("no memory")),
        ):
            for message in ("no memory", "a rank did not answer while all encoded together"):
                with pytest.raises(RuntimeError, match=message):
                    parallel.execute(self.batch([(1, 8, 8)]))

    def an_interrupted_rank_goes_on_no_more(self) -> None:
        from unittest import mock

        if self.world == 1:
            return
        parallel = self.make(self.encoder, split=True)
        stopped = mock.patch.object(parallel.together, "encode", side_effect=KeyboardInterrupt)
        with stopped, suppress(KeyboardInterrupt):
            parallel.execute(self.batch([(1, 8, 8)]))
        with pytest.raises(RuntimeError, match=f"rank {self.rank} was interrupted"):
            parallel.execute(self.batch([(1, 8, 8)]))

    def a_rank_that_fails_is_named_and_ends_it(self) -> None:
        """The others wait for it inside the encoder, until the group's time is up."""
        from datetime import timedelta

        import torch.distributed as dist

        group = dist.new_group(timeout=timedelta(seconds=2))
        parallel, last = self.make(self.encoder, group, split=True), self.rank == self.world - 1
        if self.world == 1:
            return

        def fail(mm_kwargs: dict) -> None:
            raise RuntimeError("no memory")

        if last:
            parallel.together.encode = fail
        for message in ("no memory" if last else "", "start the process group anew"):
            with pytest.raises(RuntimeError, match=message):
                parallel.execute(self.batch([(1, 8, 8)]))

    def all_ranks_fail_and_go_on(self) -> None:
        """At the same place, so that none waits: weights that moved, say."""
        from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager

        encoder = self.random(self.tiny)
        manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (16, 32), 4))
        parallel = self.make(manager, split=True)
        parallel.capture()
        weight = encoder.patch_embed.proj.weight
        weight.data = weight.data.clone()
        with pytest.raises(RuntimeError, match="weights moved since capture"):
            parallel.execute(self.batch([(1, 8, 8)]))
        parallel.capture()
        self.expect(parallel.execute(self.batch([(1, 8, 8)])), [(1, 8, 8)])

    def what_cannot_be_shared(self) -> None:
        class Other:
            def get_encoder_cudagraph_config(self):
                from types import SimpleNamespace

                return SimpleNamespace(out_hidden_size=8)

        with pytest.raises(
            ValueError, match="split: the rows of a Other cannot be shared over ranks"
        ):
            self.make(Other(), split=True)
