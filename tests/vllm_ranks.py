"""One rank of several, on the CPU: `python vllm_ranks.py RANK RANKS FOLDER`; see vllm_modes.py.

mm_encoder_tp_mode is left at its default, "weights". The plugin replicates the tower all the same,
and every rank must end up with the embeddings of all items: vLLM shares them out, or our ranks
share the rows of each pack.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vllm_harness import build_manager, build_model, check, join, make_batch, truth

BATCHES = {
    "fewer_items_than_ranks": ([(1, 4, 4)], "image"),
    "as_many": ([(1, 4, 2 * n + 2) for n in range(4)], "image"),
    "more": ([(1, 4, 2 * n + 2) for n in range(9)], "image"),
    "above_every_budget": ([(1, 2, 1026), (1, 4, 4)], "image"),
    "videos": ([(3, 4, 4), (2, 8, 8), (1, 4, 4)], "video"),
}


def main() -> None:
    """Fails with an AssertionError where a rank has other embeddings."""
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    join(rank, ranks, folder / "rendezvous")
    for split_from in ("", "1"):
        os.environ["VITGRAPH_SPLIT_FROM"] = split_from
        model = build_model(folder, ranks=ranks)
        assert model.vitgraph is not None
        manager = build_manager(model, pytest.MonkeyPatch())
        assert manager.use_dp == model.use_data_parallel == (not split_from)
        for grids, modality in BATCHES.values():
            batch = make_batch(grids, modality)
            expected = truth(model, next(iter(batch.values())), grids)
            for encode in (manager.execute, embed(model)):
                before = collectives(model)
                check(encode(dict(batch)), expected)
                assert (collectives(model) > before) == bool(split_from)


def embed(model) -> Callable:
    """Without a graph manager."""
    return torch.no_grad()(lambda batch: model.embed_multimodal(**batch))


def collectives(model) -> int:
    """Launched by our encoder so far."""
    parallel = model.vitgraph.parallel
    return 0 if parallel is None else parallel.collectives


if __name__ == "__main__":
    main()
