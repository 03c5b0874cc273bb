"""The actor of Ray Data, alone and on a local cluster of CPU actors."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.encoder.embeddings import split_embeddings
from vitgraph.graphs.media import MediaLoader
from vitgraph.graphs.media.ray_data import EncodeFiles

PHOTOS = sorted((Path(__file__).parents[1] / "graphs" / "cli" / "photos").glob("*.jpg"))
LOADER = {"max_pixels": 128 * 128}
OPTIONS = {"geometry": "tiny", "loader": LOADER, "config": {"cudagraph_mm_encoder": False}}


def check(row: dict, path: Path) -> None:
    """What the encoder itself gives."""
    media = MediaLoader(**LOADER).load(path)
    rows = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"])(media.pixel_values, [media.grid])
    merged, deepstack = split_embeddings(rows, 3)
    for ours, expected in ((row["embeddings"], merged), (row["deepstack"], torch.stack(deepstack))):
        ours = torch.tensor(np.stack([np.asarray(x) for x in ours]).astype(np.float32))
        torch.testing.assert_close(ours.view(expected.shape), expected, rtol=1e-4, atol=1e-4)
    assert tuple(row["grid"]) == media.grid and row["error"] == ""


def test_one_actor(tmp_path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    actor = EncodeFiles(**OPTIONS)
    paths = np.array([str(PHOTOS[0]), str(tmp_path / "bad.jpg"), str(PHOTOS[1])])
    batch = actor({"path": paths, "label": np.arange(3)})
    assert batch["label"].tolist() == [0, 1, 2]
    rows = [{name: column[i] for name, column in batch.items()} for i in range(3)]
    check(rows[0], PHOTOS[0])
    check(rows[2], PHOTOS[1])
    assert "bad.jpg: not an image" in rows[1]["error"] and len(rows[1]["embeddings"]) == 0


def test_a_local_cluster() -> None:
    """Two actors; every row comes back with its own embeddings."""
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    data = pytest.importorskip("ray.data", reason="the extra `ray` is not installed")
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        data.DataContext.get_current().enable_progress_bars = False
        files = data.from_items([{"path": str(path)} for path in PHOTOS * 2])
        encoded = files.map_batches(
            EncodeFiles, fn_constructor_kwargs=OPTIONS, batch_size=2, concurrency=2, num_cpus=1
        )
        rows = encoded.take_all()
    finally:
        ray.shutdown()
    assert sorted(row["path"] for row in rows) == sorted(map(str, PHOTOS * 2))
    for row in rows:
        check(row, Path(row["path"]))
