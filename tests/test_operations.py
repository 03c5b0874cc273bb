"""The forward on Triton kernels against plain torch, and the switch between them."""

import dataclasses

import pytest
import torch

from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder, forward
from vitgraph.encoder.attention.backends import resolve_backend
from vitgraph.encoder.attention.trial import Heads
from vitgraph.encoder.operations import resolve_operations
from vitgraph.kernels import linear
from vitgraph.kernels.launch import is_interpreted

# One head, patches of 8x8: the interpreter takes its time for every tile.
SMALL = dataclasses.replace(
    GEOMETRIES["tiny"],
    depth=2,
    deepstack_visual_indexes=(0,),
    hidden_size=72,
    num_heads=1,
    intermediate_size=80,
    out_hidden_size=48,
    patch_size=8,
)
WIDTH = SMALL.patch_width
GRIDS = [(1, 4, 6), (2, 2, 4), (1, 2, 2)]
PATCHES = 24 + 16 + 4


def pair(dtype: torch.dtype, device: torch.device, config=SMALL, **options) -> tuple:
    """The same tower on Triton kernels and on plain torch."""
    options |= {"device": device, "dtype": dtype}
    ours = Qwen3VLVisionEncoder.random(config, ops="triton", attention="triton", **options)
    plain = Qwen3VLVisionEncoder.random(config, ops="torch", attention="sdpa", **options)
    return ours, plain


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    ],
    ids=["fp32", "fp16", "bf16"],
)
def test_triton_equals_torch(dtype, device, assert_as_exact_as) -> None:
    ours, plain = pair(dtype, device)
    pixels = torch.randn(PATCHES, WIDTH, device=device)
    truth = Qwen3VLVisionEncoder.random(SMALL, device=device, ops="torch", attention="sdpa")
    truth.load_state_dict(plain.float().state_dict())
    plain.to(dtype)
    expected = truth(pixels, GRIDS)
    if dtype == torch.float32:
        torch.testing.assert_close(ours(pixels, GRIDS), expected, rtol=1e-5, atol=1e-5)
        return
    assert_as_exact_as(ours(pixels, GRIDS), plain(pixels, GRIDS), expected, 1.25)


def test_capacity_beyond_the_items(device) -> None:
    """KNOWN_FAILURES 1: rows past the items hold NaN, and the items come out to the bit."""
    encoder, _ = pair(torch.float32, device)
    exact = encoder(torch.ones(PATCHES, WIDTH, device=device), GRIDS)
    capacity, slots = 96, 6
    pixels = torch.full((capacity, WIDTH), float("nan"), device=device)
    pixels[:PATCHES] = 1
    grid_thw = torch.zeros(slots, 3, dtype=torch.int32, device=device)
    grid_thw[: len(GRIDS)] = torch.tensor(GRIDS, device=device)
    layout = encoder.make_layout(grid_thw, capacity, 24)
    out = torch.full((capacity // 4, SMALL.output_width), 7.0, device=device)
    encoder.encode(pixels, layout, out)
    assert torch.equal(out[: PATCHES // 4], exact)
    assert (out[PATCHES // 4 :] == 7).all(), "rows past the items are not written"


@pytest.mark.parametrize("linears", [{}, {"linear_dtype": "fp8", "fp8_skip_blocks": 1}])
@pytest.mark.parametrize("layers", [("proj",), ("fc2",), ("proj", "fc2")], ids="+".join)
def test_norms_add_what_cublas_would(layers, linears, device, monkeypatch) -> None:
    """To the bit, and without one kernel a layer; the last sum is the merger's, one a level's. In a
    block with FP8 layers fc2 is none of cuBLAS's."""
    levels = (0,) if not linears else ()  # or a merger's norm would add what an FP8 block's has to
    config = dataclasses.replace(SMALL, deepstack_visual_indexes=levels)
    encoder, _ = pair(torch.float16, device, config, **linears)
    encoder.plan = dataclasses.replace(encoder.plan, providers=dict.fromkeys(layers, "cublas"))
    pixels = torch.randn(PATCHES, WIDTH, device=device)
    additions, add = [], torch.add
    monkeypatch.setattr(torch, "add", lambda *x, **out: additions.append(x) or add(*x, **out))
    with monkeypatch.context() as patch:
        patch.setattr(forward, "adds_apart", lambda *layer: False)
        expected = encoder(pixels, GRIDS)
    saved = SMALL.depth * len(layers) - (bool(linears) and "fc2" in layers)
    assert len(additions) == saved
    assert torch.equal(encoder(pixels, GRIDS), expected)
    assert len(additions) == saved


def test_plain_torch_asks_no_table_of_kernels(device, monkeypatch) -> None:
    """On a CPU, where nothing is interpreted, Triton has no driver to say for which GPU."""
    _, plain = pair(torch.float32, device)
    monkeypatch.setattr(forward, "adds_apart", lambda *layer: pytest.fail("asked"))
    assert plain(torch.randn(PATCHES, WIDTH, device=device), GRIDS).isfinite().all()


def test_the_table_says_where_norms_add(monkeypatch) -> None:
    """On a GPU whose plans are not measured."""
    table = {512: ("triton", "cublas"), 1024: ("cublas", "triton")}
    monkeypatch.setattr(linear, "linear_providers", lambda device, dtype, rows, *shape: table[rows])
    weight = torch.empty(64, 64)
    for rows, expected in ((512, False), (1024, True)):
        x = torch.empty(rows, 64)
        assert linear.adds_apart(x, weight) == expected
        assert linear.adds_apart(x, weight, "cublas") and not linear.adds_apart(x, weight, "gluon")


@pytest.mark.parametrize("ops", ["triton", "torch"])
def test_uint8_patches(ops, device) -> None:
    encoder = Qwen3VLVisionEncoder.random(SMALL, device=device, ops=ops)
    pixels = torch.randint(0, 256, (PATCHES, WIDTH), dtype=torch.uint8, device=device)
    normalised = (pixels.float() / 255 - 0.5) / 0.5
    torch.testing.assert_close(
        encoder(pixels, GRIDS), encoder(normalised, GRIDS), rtol=1e-4, atol=1e-4
    )


def test_the_switch() -> None:
    half, cpu, gpu = torch.float16, torch.device("cpu"), torch.device("cuda")
    assert resolve_operations("auto", cpu, half).name == "torch"
    assert resolve_operations("auto", gpu, half).name == "triton"
    assert resolve_operations("torch", gpu, half).name == "torch"
    assert resolve_operations("auto", gpu, torch.float64).name == "torch"
    assert resolve_backend("auto", Heads(16, 72, torch.float64), gpu) == "sdpa"
    with pytest.raises(ValueError, match="ops 'fast' is none of auto, triton, torch"):
        resolve_operations("fast", cpu, half)
    with pytest.raises(ValueError, match="ops 'triton' has no kernels for"):
        resolve_operations("triton", gpu, torch.float64)


@pytest.mark.skipif(is_interpreted(), reason="interpreted kernels do run on a CPU")
def test_triton_on_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="ops 'triton' needs a GPU"):
        resolve_operations("triton", torch.device("cpu"), torch.float32)
