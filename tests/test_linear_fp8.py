"""linear_fp8 against float64: of the quantised operands, tightly, and of those before.

The CPU runs small tiles through the interpreter, whose conversions to e4m3 are mended in
conftest.py; marked `gpu`, the checked-in table and the candidates, those of the Gluon kernel among
them, run the layers of the 8B tower.
"""

import pytest
import torch

from vitgraph.kernels.fp8.linear_fp8 import (
    dequantize,
    linear_fp8,
    linear_fp8_reference,
    quantize_tiles,
    scales_of,
)
from vitgraph.kernels.fp8.linear_fp8_config import (
    CANDIDATES,
    HOPPER,
    HOPPER_CANDIDATES,
    HOPPER_ROWS,
    HopperConfig,
)
from vitgraph.kernels.fp8.quantize import E4M3, QuantizedLinear, quantize_reference, to_e4m3
from vitgraph.kernels.launch import hopper_tier_unavailable
from vitgraph.kernels.layer_norm import normalized_scale
from vitgraph.kernels.linear_config import LinearConfig, Tile

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
GPU = torch.device("cuda", 0)
POINTERS = LinearConfig(
    Tile(32, 256, 128, stages=2, parts=2), Tile(16, 128, 128, stages=2), small_rows=20
)
CONFIGS = [
    pytest.param(POINTERS, id="pointers"),
    pytest.param(LinearConfig(**{**vars(POINTERS), "descriptors": True}), id="descriptors"),
]
GLUON = [pytest.param(HOPPER_CANDIDATES[name], id=name, marks=pytest.mark.gpu)
         for name in HOPPER_CANDIDATES]  # fmt: skip
EVERY_CONFIG = [pytest.param(None, id="table")]
EVERY_CONFIG += [pytest.param(CANDIDATES[name], id=name) for name in CANDIDATES]
EVERY_CONFIG += GLUON
# capacity, real rows
ROWS = [
    pytest.param(33, 0, id="zero_rows"),
    pytest.param(33, 1, id="one_row"),
    pytest.param(70, 20, id="small_tiles_full"),
    pytest.param(70, 50, id="partial_tile"),
    pytest.param(64, 64, id="full_capacity"),
    pytest.param(17, 17, id="capacity_of_small_tiles"),
]
EPILOGUES = ["plain", "in_place", "e4m3", "gelu_e4m3"]
LAYERS = {"qkv": (3456, 1152), "fc1": (4304, 1152), "fc2": (1152, 4304)}
# What float32 sums of float32 products may lose, relative to a row's size.
SUM_ERROR = 1e-6
# On a GPU: tensor cores keep 14 bits of a sum of 128 products, and the GELU takes a short tanh.
GPU_ERROR = 1e-3


def make(rng, rows, out_features, in_features, tiled, dtype):
    """Rows, scales, layer, residual."""

    def randn(*shape, scale=1.0):
        return torch.randn(*shape, generator=rng, device=rng.device) * scale

    layer = quantize_reference(
        randn(out_features, in_features, scale=in_features**-0.5), randn(out_features)
    )
    if tiled:
        x = torch.empty(rows, in_features, dtype=E4M3, device=rng.device)
        x_scale = scales_of(rows, in_features, rng.device)
        # sizes that differ a thousandfold: a scale that is another's shows
        sizes = torch.logspace(-2, 1, in_features, device=rng.device)
        quantize_tiles(randn(rows, in_features) * sizes * randn(rows, 1), x, x_scale)
    else:
        x_scale = normalized_scale(in_features)
        x = to_e4m3(randn(rows, in_features) / x_scale)
    return x, x_scale, layer, randn(rows, out_features).to(dtype)


def truth_of(x, x_scale, layer, residual, activation):
    doubles = QuantizedLinear(layer.weight, layer.scale, layer.bias)
    out = torch.empty(len(x), len(layer.bias), dtype=torch.float64, device=x.device)
    residual = None if residual is None else residual.double()
    return linear_fp8_reference(
        x, x_scale, doubles, activation=activation, residual=residual, out=out
    )


def rows_error(actual, truth):
    """Of the worst row, relative."""
    sizes = truth.norm(dim=1)
    sizes = sizes.clamp_min(1e-3 * sizes.square().mean().sqrt())
    return ((actual.double() - truth).norm(dim=1) / sizes).amax().item()


def check(rng, launch, epilogue, capacity, real, layer_sizes, tiled, dtype):
    """Run `launch` on poisoned memory."""
    x, x_scale, layer, residual = make(rng, capacity, *layer_sizes, tiled, dtype)
    x[real:] = float("nan")
    if tiled:
        x_scale[:, real:] = float("nan")
    activation = "gelu_tanh" if "gelu" in epilogue else None
    num_rows = torch.tensor([real], dtype=torch.int32, device=x.device)
    real_scale = x_scale[:, :real] if tiled else x_scale
    exact = SUM_ERROR if rng.device.type == "cpu" else GPU_ERROR
    if "e4m3" in epilogue:
        out = torch.full((capacity, layer_sizes[0]), float("nan"), device=x.device).to(E4M3)
        out_scale = scales_of(capacity, layer_sizes[0], x.device).fill_(float("nan"))
        launch(x, x_scale, layer, activation=activation, num_rows=num_rows, out=out,
               out_scale=out_scale)  # fmt: skip
        assert out[real:].float().isnan().all() and out_scale[:, real:].isnan().all()
        if not real:
            return
        truth = truth_of(x[:real], real_scale, layer, None, activation)
        expected = torch.empty(truth.shape, dtype=E4M3, device=x.device)
        scales = scales_of(real, layer_sizes[0], x.device)
        quantize_tiles(truth, expected, scales)
        slack = 1e-5 if rng.device.type == "cpu" else 4 * GPU_ERROR
        torch.testing.assert_close(out_scale[:, :real], scales, rtol=slack, atol=1e-12)
        actual = dequantize(out[:real], out_scale[:, :real], torch.float64)
        # within half a step of e4m3, of the value or near zero of the tile's scale
        tile = scales.double().t().repeat_interleave(128, dim=1)[:, : truth.shape[1]]
        bound = (truth.abs() / 16).maximum(tile * 2**-10) * 1.001 + exact * tile * 448
        assert ((actual - truth).abs() <= bound).all()
        # Where a value lies between two, a last bit decides; anything else would move many. The
        # short tanh of a GPU moves what is next to zero: in the tile's terms, by nothing.
        moved = (out[:real].float() != expected.float()).float().mean()
        assert moved < (1e-3 if rng.device.type == "cpu" else 0.25)
        return
    # `out` is a column slice, 16 columns from the left of a wider tensor
    wide = torch.full((capacity, layer_sizes[0] + 32), float("nan"), dtype=dtype, device=x.device)
    out = wide[:, 16 : 16 + layer_sizes[0]]
    added = None
    if epilogue == "in_place":
        added = out.copy_(residual)
    before = wide.clone()
    launch(x, x_scale, layer, residual=added, num_rows=num_rows, out=out)
    if real:
        added = None if added is None else residual[:real]
        truth = truth_of(x[:real], real_scale, layer, added, None)
        bound = exact + torch.finfo(dtype).eps
        assert rows_error(out[:real], truth) < bound
    untouched = torch.ones_like(wide, dtype=torch.bool)
    untouched[:real, 16 : 16 + layer_sizes[0]] = False
    assert torch.equal(wide[untouched].nan_to_num(7), before[untouched].nan_to_num(7))


def with_tiles(config):
    if isinstance(config, HopperConfig) and (reason := hopper_tier_unavailable(GPU)):
        pytest.skip(reason)
    return lambda *arguments, **options: linear_fp8(*arguments, **options, config=config)


def widest(config):
    """The widest output that a kernel writes."""
    return torch.float16 if isinstance(config, HopperConfig) else torch.float32


@pytest.mark.parametrize("tiled", [False, True], ids=["one_scale", "tile_scales"])
@pytest.mark.parametrize("config", [*CONFIGS, *GLUON])
@pytest.mark.parametrize(("capacity", "real"), ROWS)
def test_rows(rng, capacity, real, config, tiled):
    # 304 columns and a depth of 208: the last tile and the last step are partial, one part is empty
    launch = with_tiles(config)
    for epilogue in ("in_place", "gelu_e4m3"):
        check(rng, launch, epilogue, capacity, real, (304, 208), tiled, widest(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("tiled", [False, True], ids=["one_scale", "tile_scales"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues(rng, epilogue, tiled, dtype):
    configs = [*(p.values[0] for p in CONFIGS), None]  # the table's, too
    if dtype != torch.float32 and not hopper_tier_unavailable(rng.device):
        configs.append(HOPPER)
    for config in configs:
        check(rng, with_tiles(config), epilogue, 40, 35, (304, 144), tiled, dtype)


@pytest.mark.parametrize("in_features", [1152, 4304])
def test_depths_of_the_towers(rng, in_features):
    config = LinearConfig(Tile(16, 128, 128, stages=2))
    check(rng, with_tiles(config), "plain", 17, 17, (24, in_features), True, torch.float32)


@pytest.mark.parametrize("config", [pytest.param(None, id="table"), *GLUON])
def test_the_tail_of_the_depth_counts(rng, config):
    """The last tile of fc2 has 80 of 128 columns: end to end nobody would miss it."""
    launch = with_tiles(config)
    x, x_scale, layer, _ = make(rng, 20, 128, 4304, True, torch.float32)
    x[:, :4224] = 0
    x_scale[-1] = 3.0
    out = torch.empty(20, 128, dtype=widest(config), device=x.device)
    launch(x, x_scale, layer, out=out)
    truth = truth_of(x, x_scale, layer, None, None)
    assert rows_error(out, truth) < (SUM_ERROR if rng.device.type == "cpu" else GPU_ERROR)
    assert (truth - layer.bias).abs().amax() > 1


@pytest.mark.parametrize("config", [*CONFIGS, *GLUON])
def test_what_is_not_finite_stays_in_its_row(rng, config):
    launch = with_tiles(config)
    x, x_scale, layer, _ = make(rng, 40, 304, 208, True, torch.float32)

    def run():
        out = torch.empty(40, 304, dtype=E4M3, device=x.device)
        out_scale = scales_of(40, 304, x.device)
        launch(x, x_scale, layer, activation="gelu_tanh", out=out, out_scale=out_scale)
        return dequantize(out, out_scale, torch.float32), out_scale

    clean, _ = run()
    x[5, 3] = float("nan")
    x_scale[1, 33] = float("inf")
    dirty, scales = run()
    others = [row for row in range(40) if row not in (5, 33)]
    assert torch.equal(dirty[others], clean[others])
    assert dirty[5].isnan().all()
    # what is not finite is seen by the next layer, in every tile
    assert not dirty[33].isfinite().all()
    again = torch.empty(40, 128, dtype=widest(config), device=x.device)
    following = quantize_reference(torch.randn(128, 304), torch.zeros(128))
    following = QuantizedLinear(*(part.to(x.device) for part in following))
    launch(to_e4m3(dirty), scales, following, out=again)
    assert again[5].isnan().all() and again[33].isnan().all()
    assert again[others].isfinite().all()


def test_rows_of_zeros(rng):
    """Their scale is no zero to divide by."""
    x, x_scale, layer, _ = make(rng, 20, 304, 144, False, torch.float32)
    layer = layer._replace(bias=torch.zeros_like(layer.bias))
    x[3] = 0
    out = torch.empty(20, 304, dtype=E4M3, device=x.device)
    out_scale = scales_of(20, 304, x.device)
    linear_fp8(x, x_scale, layer, activation="gelu_tanh", out=out, out_scale=out_scale)
    assert (out[3].float() == 0).all() and out_scale.isfinite().all()


def test_error_against_what_was_quantised(rng):
    """Of fc1 and of fc2, whose weights and rows are rounded to 3 bits each: 2^-4 / sqrt(3) of a
    value in the worst octave is 0.036; in the mean over an octave, of both operands, 0.037."""
    for in_features, tiled in ((1152, False), (4304, True)):
        rows = torch.randn(32, in_features, generator=rng, device=rng.device)
        if not tiled:
            rows = torch.nn.functional.layer_norm(rows, (in_features,))
        weight = torch.randn(64, in_features, generator=rng, device=rng.device)
        layer = quantize_reference(weight, torch.zeros(64, device=rng.device))
        x = to_e4m3(rows / normalized_scale(in_features))
        x_scale = normalized_scale(in_features)
        if tiled:
            x_scale = scales_of(32, in_features, rng.device)
            quantize_tiles(rows, x, x_scale)
        out = torch.empty(32, 64, device=rng.device)
        linear_fp8(x, x_scale, layer, out=out)
        truth = rows.double() @ weight.double().T
        error = ((out - truth).norm() / truth.norm()).item()
        print(f"K {in_features}: relative error {error:.4f}")
        assert 0.02 < error < 0.045


def test_count_above_capacity_stays_inside(rng):
    x, x_scale, layer, _ = make(rng, 20, 144, 144, True, torch.float32)
    wide = torch.full((30, 144), float("nan"), device=x.device)
    num_rows = torch.tensor([25], dtype=torch.int32, device=x.device)
    linear_fp8(x, x_scale, layer, num_rows=num_rows, out=wide[:20])
    assert wide[:20].isfinite().all() and wide[20:].isnan().all()


def test_no_rows_at_all(rng):
    x, x_scale, layer, _ = make(rng, 0, 144, 144, False, torch.float32)
    out = torch.empty(0, 144, device=x.device)
    assert linear_fp8(x, x_scale, layer, out=out) is out


def test_refuses_what_does_not_fit(rng):
    x, x_scale, layer, residual = make(rng, 4, 304, 144, True, torch.float32)
    out = torch.empty_like(residual)
    with pytest.raises(ValueError, match=r"\(4, 128\).*\[rows, 144\]"):
        linear_fp8(x[:, :128], x_scale, layer, out=out)
    with pytest.raises(ValueError, match=r"x is torch\.float32, expected torch\.float8_e4m3fn"):
        linear_fp8(x.float(), x_scale, layer, out=out)
    with pytest.raises(ValueError, match=r"x_scale has shape \(1, 4\), expected \(2, 4\)"):
        linear_fp8(x, x_scale[:1], layer, out=out)
    with pytest.raises(ValueError, match="e4m3 and out_scale come together"):
        linear_fp8(x, x_scale, layer, out=out, out_scale=scales_of(4, 304, x.device))
    with pytest.raises(ValueError, match=r"residual is torch\.float16"):
        linear_fp8(x, x_scale, layer, residual=residual.half(), out=out)
    with pytest.raises(ValueError, match="x_scale is not contiguous"):
        linear_fp8(x, x_scale.repeat(1, 2)[:, :4], layer, out=out)


def test_an_older_gpu_is_refused_by_name(rng, monkeypatch):
    from vitgraph.kernels.fp8 import quantize

    x, x_scale, layer, residual = make(rng, 4, 304, 144, True, torch.float32)
    monkeypatch.setattr(quantize, "capability_of", lambda device: (8, 6))
    with pytest.raises(ValueError, match=r"e4m3 needs compute capability 8\.9, this GPU has 8\.6"):
        linear_fp8(x, x_scale, layer, out=residual)


def test_the_gluon_kernel_is_refused_where_it_cannot_serve(rng, monkeypatch):
    from vitgraph.kernels.fp8 import linear_fp8 as module

    x, x_scale, layer, residual = make(rng, 4, 304, 144, True, torch.float32)
    if rng.device.type == "cpu":
        with pytest.raises(ValueError, match=r"Gluon kernel needs compute capability 9\.0"):
            linear_fp8(x, x_scale, layer, out=residual, config=HOPPER)
    monkeypatch.setattr(module, "hopper_tier_unavailable", lambda device: None)
    with pytest.raises(ValueError, match=r"writes 16 or 8 bits, not torch\.float32"):
        linear_fp8(x, x_scale, layer, out=residual, config=HOPPER)
    apart = torch.empty(4, 305, dtype=torch.float16, device=x.device)[:, :304]
    with pytest.raises(ValueError, match="needs rows aligned to 16 bytes"):
        linear_fp8(x, x_scale, layer, out=apart, config=HOPPER)


def test_the_gluon_kernel_serves_large_capacities_on_hopper(rng, monkeypatch):
    from vitgraph.kernels.fp8 import linear_fp8 as module
    from vitgraph.kernels.sm90 import linear_fp8 as hopper

    launched = []
    monkeypatch.setattr(module, "hopper_tier_unavailable", lambda device: None)
    monkeypatch.setattr(hopper, "linear_fp8_sm90", lambda *operands: launched.append(operands))
    monkeypatch.setattr(module, "linear_fp8_triton", lambda *operands: launched.append("portable"))
    for rows, dtype in ((HOPPER_ROWS - 1, E4M3), (HOPPER_ROWS, E4M3), (HOPPER_ROWS, torch.float32)):
        x, _, layer, out = make(rng, rows, 16, 16, False, torch.float32)
        out_scale = scales_of(rows, 16, x.device) if dtype == E4M3 else None
        linear_fp8(x, 0.1, layer, out=out.to(dtype), out_scale=out_scale)
    assert [one if one == "portable" else one[-1] for one in launched] == [
        "portable",
        HOPPER,
        "portable",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("config", EVERY_CONFIG)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("capacity", "real"),
    [(8160, 8160), (6000, 777), (16384, 8401), *((400, n) for n in (1, 63, 64, 65, 130, 399, 400))],
)
def test_layers_of_the_8b_tower(rng, capacity, real, name, config):
    epilogue = {"qkv": "plain", "fc1": "gelu_e4m3", "fc2": "in_place"}[name]
    launch, tiled = with_tiles(config), name == "fc2"
    check(rng, launch, epilogue, capacity, real, LAYERS[name], tiled, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("config", GLUON)
@pytest.mark.parametrize("name", LAYERS)
def test_repeats_bitwise(rng, name, config):
    """A missing barrier would show as an error that moves."""
    launch, expands = with_tiles(config), name == "fc1"
    x, x_scale, layer, residual = make(rng, 8160, *LAYERS[name], name == "fc2", torch.bfloat16)
    results = []
    for _ in range(20):
        out = torch.full_like(residual, float("nan")).to(E4M3 if expands else residual.dtype)
        out_scale = scales_of(8160, LAYERS[name][0], x.device) if expands else None
        added = residual if name == "fc2" else None
        launch(x, x_scale, layer, residual=added, out=out, out_scale=out_scale)
        results.append(
            out.float() if out_scale is None else dequantize(out, out_scale, out_scale.dtype)
        )
        assert torch.equal(results[0], results[-1])
        del results[1:]


@pytest.mark.gpu
@pytest.mark.parametrize("config", EVERY_CONFIG)
def test_sums_are_promoted(rng, config):
    """4304 products of one sign: Hopper's 14 bits alone would lose some 0.4 % of their sum. Not
    every tile has memory for float32 outputs; float16 rounds by 2.4e-4."""
    launch = with_tiles(config)
    x = (1 + torch.rand(256, 4304, generator=rng, device=rng.device)).to(E4M3)
    weight = 1 + torch.rand(128, 4304, generator=rng, device=rng.device)
    layer = quantize_reference(weight, torch.zeros(128, device=rng.device))
    x_scale = scales_of(256, 4304, x.device).fill_(1)
    out = torch.empty(256, 128, dtype=torch.float16, device=x.device)
    for scale in (1.0, x_scale):
        launch(x, scale, layer, out=out)
        assert rows_error(out, truth_of(x, scale, layer, None, None)) < 5e-4


@pytest.mark.gpu
@pytest.mark.parametrize("config", [pytest.param(None, id="table"), *GLUON])
def test_addresses_past_int32(rng, config):
    """Rows 2^24 bytes apart: the last of 300 starts past 2^32."""
    launch = with_tiles(config)
    x, x_scale, layer, residual = make(rng, 300, 128, 144, False, torch.bfloat16)
    expected = launch(x, x_scale, layer, out=torch.empty_like(residual))
    apart = torch.empty(300 * 2**24, dtype=E4M3, device=x.device).as_strided((300, 144), (2**24, 1))
    apart.copy_(x)
    assert torch.equal(launch(apart, x_scale, layer, out=residual), expected)
