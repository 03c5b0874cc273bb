"""What was read, through a manager."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitgraph.graphs.manager import EncoderCudaGraphManager, OnPack
from vitgraph.graphs.media.loader import Media
from vitgraph.graphs.packing import Pack
from vitgraph.graphs.qwen3_vl import KEYS
from vitgraph.graphs.statistics import Stopwatch


@dataclass(frozen=True)
class Result:
    """One encoded item and how it was served."""

    media: Media
    embeddings: Tensor  # [tokens, output_width]
    pack: Pack  # that it was in
    watch: Stopwatch

    @property
    def fill(self) -> float:
        """Real tokens over the budget; 0 of what ran eagerly."""
        return self.pack.tokens / self.pack.budget if self.pack.budget else 0.0

    @property
    def seconds(self) -> float:
        """Time of the whole pack; waits for it."""
        return self.watch.seconds()


def run(
    manager: EncoderCudaGraphManager, batch: Sequence[Media], recorder: OnPack | None = None
) -> list[Result]:
    """Encode images together and videos together.

    Args:
        recorder: is told every pack, as a manager's `on_pack`.

    Returns:
        Results in the order of `batch`.
    """
    results: dict[int, Result] = {}
    packs: list[tuple[Pack, Stopwatch]] = []
    before, manager.on_pack = manager.on_pack, lambda pack, watch: packs.append((pack, watch))
    try:
        for modality, (pixel_key, grid_key) in KEYS.items():
            chosen = [i for i, media in enumerate(batch) if media.modality == modality]
            if not chosen:
                continue
            pixels = torch.cat([batch[i].pixel_values for i in chosen])
            grids = [batch[i].grid for i in chosen]
            outputs = manager.execute({pixel_key: pixels, grid_key: grids})
            for pack, watch in packs:
                if recorder is not None:
                    recorder(pack, watch)
                for position in pack.indices:
                    index = chosen[position]
                    results[index] = Result(batch[index], outputs[position], pack, watch)
            packs.clear()
    finally:
        manager.on_pack = before
    return [results[i] for i in range(len(batch))]
