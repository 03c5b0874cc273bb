"""`batch_invariant=True`: an item gives the same bits alone, in any pack, eager or in a graph."""

import copy
from dataclasses import replace

import pytest
import torch

from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder, VisionConfig
from vitgraph.encoder.operations import LAYERS
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager
from vitgraph.kernels.attention_config import ROWS, SMALL, fixed_config
from vitgraph.kernels.linear_config import fixed_config as fixed_tiles

IMAGE = (1, 4, 6)
OTHERS = [(1, 2, 2), (2, 2, 4), (1, 2, 10)]


@pytest.fixture(scope="module")
def small(tools) -> torch.nn.Module:
    """One block: what is interpreted takes its time."""
    return tools.make_reference(**tools.tiny | {"depth": 1, "deepstack_visual_indexes": [0]})


def outputs(encode, pixels, others, place: int, count: int) -> torch.Tensor:
    """The image's rows, among `count` others, at `place`."""
    grids = [OTHERS[i % len(OTHERS)] for i in range(count)]
    parts = [others[: t * h * w] for t, h, w in grids]
    grids.insert(place, IMAGE)
    parts.insert(place, pixels)
    return encode(torch.cat(parts), grids)[place]


def test_same_bits_in_the_interpreter(small, device) -> None:
    """KNOWN_FAILURES 42: alone and in packs, eagerly and from each budget."""
    dtype = torch.float32
    model = copy.deepcopy(small).to(device, dtype)
    encoder = Qwen3VLVisionEncoder.from_transformers(model, batch_invariant=True)
    assert encoder.ops.name == "triton" and set(encoder.plan.providers) == set(LAYERS)
    rng = torch.Generator().manual_seed(0)
    pixels, others = torch.randn(24, 1536, generator=rng), torch.randn(20, 1536, generator=rng)
    pixels, others = pixels.to(device, dtype), others.to(device, dtype)

    def eager(pixels, grids):
        tokens = [t * h * w // 4 for t, h, w in grids]
        return encoder(pixels, grids).split(tokens)

    alone = outputs(eager, pixels, others, 0, 0)
    assert torch.equal(outputs(eager, pixels, others, 1, 2), alone)
    assert torch.equal(outputs(eager, pixels, others, 3, 3), alone)
    for budgets in ((8,), (64,)):
        manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, budgets, 8))
        manager.capture()
        assert manager.model.plans == {budgets[0]: replace(encoder.plan, branches=True)}

        def replayed(pixels, grids, manager=manager):
            return manager.execute({"pixel_values": pixels, "image_grid_thw": grids})

        assert torch.equal(outputs(replayed, pixels, others, 0, 0), alone)
        if budgets == (64,):
            assert torch.equal(outputs(replayed, pixels, others, 1, 2), alone)
        assert manager.get_cumulative_stats()["graph_hits"] > 0


def test_bytes_are_normalised_one_way(small, device) -> None:
    """KNOWN_FAILURES 42: a manager's graphs take what an eager forward takes."""
    model = copy.deepcopy(small).to(device, torch.float16)
    encoder = Qwen3VLVisionEncoder.from_transformers(model, batch_invariant=True)
    pixels = torch.randint(0, 256, (4, 1536), dtype=torch.uint8, device=device)
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (8,), 4))
    manager.capture()
    rows = manager.execute({"pixel_values": pixels, "image_grid_thw": [(1, 2, 2)]})[0]
    assert torch.equal(rows, encoder(pixels, [(1, 2, 2)]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["2b", "8b"])
def test_same_bits_on_a_gpu(name) -> None:
    """KNOWN_FAILURES 42: up to 41 images, in graphs and eagerly."""
    encoder = Qwen3VLVisionEncoder.random(
        GEOMETRIES[name], device="cuda", dtype=torch.bfloat16, batch_invariant=True
    )
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64, 512, 4096), 64))
    manager.capture()
    rng = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, 20, 20), (1, 14, 30), (1, 32, 32), (2, 12, 12), (1, 2, 2), (1, 40, 44)]
    grids = [shapes[i % len(shapes)] for i in range(41)]
    parts = [
        torch.randn(t * h * w, 1536, device="cuda", generator=rng).bfloat16() for t, h, w in grids
    ]
    alone = [encoder(part, [grid]) for part, grid in zip(parts, grids, strict=True)]
    for count in (1, 2, 4, 9, 20, 41):
        batch, chosen = torch.cat(parts[:count]), grids[:count]
        tokens = [t * h * w // 4 for t, h, w in chosen]
        eager = encoder(batch, chosen).split(tokens)
        replayed = manager.execute({"pixel_values": batch, "image_grid_thw": chosen})
        for item in range(count):
            assert torch.equal(eager[item], alone[item]), (count, item)
            assert torch.equal(replayed[item], alone[item]), (count, item)
    assert manager.get_cumulative_stats()["graph_hits"] > 41


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0)])
def test_one_tiling_for_every_capacity(capability, monkeypatch) -> None:
    """KNOWN_FAILURES 42: tiles of a layer do not follow the rows, on the GPU or on the host."""
    from vitgraph.kernels import attention_config

    for shape in ((1152, 1152), (3456, 1152), (4304, 1152), (1152, 4304), (4608, 4608)):
        configs = {fixed_tiles(capability, torch.bfloat16, n, *shape) for n in (1, 448, 5000)}
        assert len(configs) == 1 and configs.pop().small is None
    monkeypatch.setattr(attention_config, "capability_of", lambda _: capability)
    config = fixed_config(torch.bfloat16, torch.device("cuda"))
    assert config == ROWS.get(capability, SMALL)[-1].config and not config.can_split


@pytest.mark.parametrize("options", [{"attention": "sdpa"}, {"ops": "torch"}], ids=str)
def test_what_cannot_be_invariant(options, tools) -> None:
    config = VisionConfig.from_dict(tools.tiny)
    with pytest.raises(ValueError, match="batch_invariant has attention 'triton'"):
        Qwen3VLVisionEncoder(config, batch_invariant=True, **options)
    with pytest.raises(ValueError, match="no kernels for torch"):
        Qwen3VLVisionEncoder(config, batch_invariant=True, dtype=torch.float64)
