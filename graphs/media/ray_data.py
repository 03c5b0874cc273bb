"""Encode a Ray dataset: a class for `map_batches`, one encoder to an actor (extra `ray`).

Nothing here imports Ray: it makes the actors, places them on GPUs and moves the rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.encoder.embeddings import split_embeddings
from vitgraph.graphs.config import CompilationConfig
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.graphs.media.encoding import Result, run
from vitgraph.graphs.media.loader import Media, MediaLoader

Batch = dict[str, np.ndarray]


class EncodeFiles:
    """Rows with a path in, the same rows with embeddings out.

    Added are `embeddings` (float32, [tokens, out_hidden]), `deepstack` ([levels, tokens,
    out_hidden]), `grid`, `timestamps`, and `error`: of a file that cannot be read the reason, with
    no tokens; empty otherwise.

    Args:
        model: checkpoint directory or hub repository id; None for random weights of `geometry`.
        geometry: a name of `GEOMETRIES`, without a model.
        column: the rows' column of paths.
        config: how graphs are captured, as `CompilationConfig.from_json` reads it.
        dtype: of the weights; bfloat16 on a GPU, float32 without one.
        loader: arguments of `MediaLoader`: `max_pixels`, `image`, `video`, `device`.

    Raises:
        ValueError: as encoder, loader and manager.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        geometry: str = "8b",
        column: str = "path",
        config: str | dict[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        loader: Mapping[str, Any] | None = None,
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.column = column
        self.loader = MediaLoader(model, **(loader or {}))
        self.encoder = (
            Qwen3VLVisionEncoder.from_pretrained(model, **options)
            if model is not None
            else Qwen3VLVisionEncoder.random(GEOMETRIES[geometry], **options)
        )
        compilation = CompilationConfig.from_json(config or {"cudagraph_mm_encoder": True})
        self.manager = EncoderCudaGraphManager(self.encoder, compilation)
        self.manager.capture()

    def __call__(self, batch: Batch) -> Batch:
        """Encode one batch."""
        read = [self._read(Path(str(path))) for path in batch[self.column]]
        media = [item for item in read if isinstance(item, Media)]
        results = iter(run(self.manager, media))
        rows = [self._row(item, None if isinstance(item, str) else next(results)) for item in read]
        return batch | {name: _column([row[name] for row in rows]) for name in rows[0]}

    def _read(self, path: Path) -> Media | str:
        try:
            item = self.loader.read(path)
            return self.loader.finish(item, self.encoder.dtype, self.encoder.device)
        except ValueError as error:
            return str(error)

    def _row(self, item: Media | str, result: Result | None) -> dict[str, Any]:
        config = self.encoder.config
        levels, width = len(config.deepstack_visual_indexes), config.output_width
        embeddings = torch.empty(0, width) if result is None else result.embeddings.float().cpu()
        merged, deepstack = split_embeddings(embeddings, levels)
        grid: tuple[int, int, int] = (0, 0, 0)
        timestamps: tuple[float, ...] = ()
        if isinstance(item, Media):
            grid, timestamps, item = item.grid, item.timestamps, ""
        return {
            "embeddings": merged.numpy(),
            "deepstack": np.stack(
                [level.numpy() for level in deepstack] or [merged[None][:0].numpy()]
            ),
            "grid": np.array(grid),
            "timestamps": np.array(timestamps, dtype=np.float64),
            "error": item,
        }


def _column(values: list[Any]) -> np.ndarray:
    """Values of any shapes as one array."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
