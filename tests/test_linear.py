"""linear against torch in float64: epilogues, edges of tiles, rows past the real ones, providers.

The CPU runs small tiles of its own through the interpreter; marked `gpu`, the checked-in table and
every provider run the layers of the towers.
"""

import pytest
import torch

from vitgraph.kernels.linear import linear, linear_providers, linear_reference
from vitgraph.kernels.linear_config import LinearConfig, Tile
from vitgraph.kernels.linear_triton import PixelNormalization, linear_triton

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
SMALL_TILES = LinearConfig(
    Tile(32, 32, 32, stages=2, parts=2), Tile(16, 16, 64, stages=2), small_rows=20
)
# both tile shapes of a kernel, both ways to load
CONFIGS = [
    pytest.param(SMALL_TILES, id="pointers"),
    pytest.param(LinearConfig(**{**vars(SMALL_TILES), "descriptors": True}), id="descriptors"),
]
# capacity, real rows
ROWS = [
    pytest.param(33, 0, id="zero_rows"),
    pytest.param(33, 1, id="one_row"),
    pytest.param(70, 20, id="small_tiles_full"),
    pytest.param(70, 50, id="partial_tile"),
    pytest.param(64, 64, id="full_capacity"),
    pytest.param(17, 17, id="capacity_of_small_tiles"),
    pytest.param(500, 40, id="far_below_capacity"),
]
EPILOGUES = ["plain", "bias", "gelu", "gelu_tanh", "residual", "gelu_residual", "in_place"]
# (out, in) features of the towers: qkv, projection, fc1, fc2 of 8B and 2B, patches, a merger's fc1
LAYERS = [(3456, 1152), (1152, 1152), (4304, 1152), (1152, 4304), (4096, 1024), (1024, 4096)]
LAYERS += [(1152, 1536), (4608, 4608)]
# one for each way through the table on Hopper
TABLE_ROWS = [
    pytest.param(8160, 8160, id="full_budget"),
    pytest.param(400, 399, id="small_budget"),
    pytest.param(6000, 400, id="small_tiles"),
    pytest.param(6000, 777, id="large_tiles"),
    pytest.param(6000, 1793, id="hopper_tier_narrow_tiles"),
    pytest.param(6000, 4000, id="hopper_tier_wide_tiles"),
]


def make_layer(rng, rows, out_features, in_features, dtype):
    def randn(*shape, scale=1.0):
        return (torch.randn(*shape, generator=rng, device=rng.device) * scale).to(dtype)

    x, weight = randn(rows, in_features), randn(out_features, in_features, scale=in_features**-0.5)
    return x, weight, randn(out_features), randn(rows, out_features)


def check(rng, assert_as_exact_as, launch, epilogue, capacity, real, layer, dtype):
    """Run `launch(x, weight, bias, activation, residual, num_rows, out)` on poisoned memory."""
    x, weight, bias, residual = make_layer(rng, capacity, *layer, dtype)
    bias = None if epilogue == "plain" else bias
    activation = "gelu_tanh" if "tanh" in epilogue else "gelu" if "gelu" in epilogue else None
    x[real:] = float("nan")
    # `out` is a column slice, 16 columns from the left of a wider tensor
    wide = torch.full((capacity, layer[0] + 32), float("nan"), dtype=dtype, device=x.device)
    out = wide[:, 16 : 16 + layer[0]]
    if epilogue == "in_place":
        residual = out.copy_(residual)
    elif "residual" not in epilogue:
        residual = None
    before, inputs = wide.clone(), (x[:real], weight, bias, residual)
    doubles = [t if t is None else t[:real].double() for t in inputs[:1]]
    doubles += [t if t is None else t.double() for t in inputs[1:3]]
    added = None if residual is None else residual[:real].clone()
    num_rows = torch.tensor([real], dtype=torch.int32, device=x.device)
    launch(x, weight, bias, activation, residual, num_rows, out)

    torch_result = linear_reference(*inputs[:3], activation=activation, residual=added)
    added = None if added is None else added.double()
    truth = linear_reference(*doubles, activation=activation, residual=added)
    if real:
        assert_as_exact_as(out[:real], torch_result, truth)
    untouched = torch.ones_like(wide, dtype=torch.bool)
    untouched[:real, 16 : 16 + layer[0]] = False
    assert torch.equal(wide[untouched].nan_to_num(7), before[untouched].nan_to_num(7))


def with_tiles(config):
    return lambda *arguments: linear_triton(*arguments, None, config)


def with_provider(provider):
    def launch(x, weight, bias, activation, residual, num_rows, out):
        linear(x, weight, bias, activation=activation, residual=residual, num_rows=num_rows,
               out=out, provider=provider)  # fmt: skip

    return launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("capacity", "real"), ROWS)
def test_rows(rng, assert_as_exact_as, capacity, real, config, dtype):
    # 48 columns and a depth of 80: the last tile and the last step are partial in every config
    launch = with_tiles(config)
    check(rng, assert_as_exact_as, launch, "gelu_residual", capacity, real, (48, 80), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues(rng, assert_as_exact_as, epilogue, dtype):
    for config in (p.values[0] for p in CONFIGS):
        launch = with_tiles(config)
        check(rng, assert_as_exact_as, launch, epilogue, 40, 35, (48, 64), dtype)


@pytest.mark.parametrize("in_features", [1024, 1152, 1536, 4304])
def test_depths(rng, assert_as_exact_as, in_features):
    config = LinearConfig(Tile(16, 32, 256, stages=2))  # 4304 is no multiple of the step
    launch = with_tiles(config)
    check(rng, assert_as_exact_as, launch, "bias", 17, 17, (24, in_features), torch.float16)


@pytest.mark.parametrize("out_features", [3456, 4304])
def test_widths(rng, assert_as_exact_as, out_features):
    config = LinearConfig(Tile(16, 256, 32, stages=2))  # 4304 is no multiple of the tile
    launch = with_tiles(config)
    check(rng, assert_as_exact_as, launch, "gelu_tanh", 17, 17, (out_features, 32), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_table(rng, assert_as_exact_as, dtype):
    """`linear` itself, with what the table gives the interpreter."""
    check(rng, assert_as_exact_as, with_provider(None), "residual", 70, 66, (72, 64), dtype)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_nan_stays_in_its_row(rng, config, dtype):
    x, weight, bias, residual = make_layer(rng, 40, 48, 64, dtype)
    clean, dirty = torch.empty_like(residual), torch.empty_like(residual)
    linear_triton(x, weight, bias, "gelu", residual, None, clean, None, config)
    x[5, 3], x[33] = float("nan"), float("inf")
    linear_triton(x, weight, bias, "gelu", residual, None, dirty, None, config)
    others = [row for row in range(40) if row not in (5, 33)]
    assert torch.equal(dirty[others], clean[others])
    assert dirty[5].isnan().all()


def test_strided_input(rng, assert_as_exact_as):
    wide, weight, bias, _ = make_layer(rng, 20, 32, 64, torch.float16)
    for start in (8, 3):  # aligned for descriptors, and not
        x = wide[:, start : start + 48]
        truth = linear_reference(x.double(), weight[:, :48].double(), bias.double())
        torch_result = linear_reference(x, weight[:, :48], bias)
        actual = torch.empty_like(torch_result)
        config = LinearConfig(Tile(16, 32, 32, stages=2), descriptors=True)
        narrow = weight[:, :48].contiguous()
        linear_triton(x, narrow, bias, None, None, None, actual, None, config)
        assert_as_exact_as(actual, torch_result, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_pixels_equal_normalised_patches(rng, assert_as_exact_as, dtype):
    # three channels of 32 columns: a step of 64 straddles them; a different mean and std for each
    normalization = PixelNormalization((0.5, 0.4, 0.3), (0.5, 0.6, 0.25))
    _, weight, bias, _ = make_layer(rng, 40, 48, 96, dtype)
    pixels = torch.randint(0, 256, (40, 96), generator=rng, device=rng.device).to(torch.uint8)
    out = torch.full((40, 48), float("nan"), dtype=dtype, device=rng.device)
    num_rows = torch.tensor([35], dtype=torch.int32, device=rng.device)
    for config in (p.values[0] for p in CONFIGS):
        linear_triton(pixels, weight, bias, None, None, num_rows, out, normalization, config)
        truth = linear_reference(
            pixels, weight.double(), bias.double(), normalization=normalization
        )
        expected = linear_reference(pixels, weight, bias, normalization=normalization)
        assert_as_exact_as(out[:35], expected[:35], truth[:35])
        assert out[35:].isnan().all()


def test_count_above_capacity_stays_inside(rng):
    x, weight, bias, _ = make_layer(rng, 20, 32, 32, torch.float32)
    wide = torch.full((30, 32), float("nan"), device=x.device)
    num_rows = torch.tensor([25], dtype=torch.int32, device=x.device)
    linear(x, weight, bias, num_rows=num_rows, out=wide[:20])
    torch.testing.assert_close(wide[:20], linear_reference(x, weight, bias))
    assert wide[20:].isnan().all()


def test_no_rows_at_all(rng):
    x, weight, bias, _ = make_layer(rng, 0, 32, 32, torch.float32)
    assert linear(x, weight, bias).shape == (0, 32)


def test_refuses_what_does_not_fit(rng):
    x, weight, bias, _ = make_layer(rng, 4, 32, 16, torch.float32)
    with pytest.raises(ValueError, match=r"\(4, 16\).*\[rows, 8\]"):
        linear(x, weight[:, :8].contiguous(), bias)
    with pytest.raises(ValueError, match=r"bias has shape \(31,\), expected \(32,\)"):
        linear(x, weight, bias[:31])
    with pytest.raises(ValueError, match=r"out has stride 4 in its last dimension"):
        linear(x, weight, out=torch.empty(32, 4).t())
    with pytest.raises(ValueError, match="'gluon' cannot serve"):
        linear(x, weight, provider="gluon")
    with pytest.raises(ValueError, match="float16"):
        linear(x.half(), weight)
    with pytest.raises(ValueError, match="contiguous"):
        linear(x, torch.empty(16, 32).t())
    with pytest.raises(ValueError, match=r"bias is torch\.float16, expected torch\.float32"):
        linear(x, weight, bias.half())
    with pytest.raises(ValueError, match=r"out is torch\.float16, expected torch\.float32"):
        linear(x, weight, out=torch.empty(4, 32, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"num_rows is torch\.int64, expected torch\.int32"):
        linear(x, weight, num_rows=torch.tensor([4]))


@pytest.mark.parametrize(
    ("capacity", "layer", "expected"),
    [
        (512, (1152, 1152), ("triton", "gluon", "cublas")),
        (1024, (1152, 1152), ("cublas", "triton", "gluon")),
        (2048, (1152, 1152), ("gluon", "triton", "cublas")),
        (1024, (3456, 1152), ("triton", "gluon", "cublas")),
        (1024, (4304, 1152), ("cublas", "triton")),
        (2048, (1152, 4304), ("cublas", "gluon", "triton")),
        (256, (4608, 4608), ("cublas", "triton")),
        (4096, (4608, 4608), ("triton", "cublas")),
    ],
)
def test_the_table_chooses_by_capacity(monkeypatch, capacity, layer, expected) -> None:
    """On Hopper; without its kernels the rest keeps its order, and while compiling elsewhere cuBLAS
    is no default: there is nothing to compile."""
    module = "vitgraph.kernels.linear"
    monkeypatch.setattr(f"{module}.capability_of", lambda device: (9, 0))
    monkeypatch.setattr(f"{module}.hopper_tier_unavailable", lambda device: None)
    arguments = torch.bfloat16, capacity, *layer
    assert linear_providers(torch.device("cuda"), *arguments) == expected
    assert linear_providers(torch.device("cpu"), *arguments)[0] != "cublas"
    monkeypatch.setattr(f"{module}.hopper_tier_unavailable", lambda device: "not here")
    rest = tuple(provider for provider in expected if provider != "gluon")
    assert linear_providers(torch.device("cuda"), *arguments) == rest
    assert linear_providers(torch.device("cuda"), torch.uint8, capacity, *layer) == ("triton",)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize(("capacity", "real"), TABLE_ROWS)
def test_layers_of_the_towers(rng, assert_as_exact_as, capacity, real, layer, dtype):
    epilogue = "gelu_tanh" if layer[0] >= 4096 else "in_place"
    providers = linear_providers(rng.device, dtype, capacity, *layer)
    for provider in (p for p in providers if p != "cublas"):
        launch = with_provider(provider)
        check(rng, assert_as_exact_as, launch, epilogue, capacity, real, layer, dtype)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_cublas(rng, assert_as_exact_as, epilogue, dtype):
    check(rng, assert_as_exact_as, with_provider("cublas"), epilogue, 40, 40, (48, 64), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("wide_output", [False, True], ids=["input", "output"])
def test_addresses_past_int32(rng, wide_output):
    """Rows 2^23 values apart: the last of 300 starts past 2^31."""
    x, weight, bias, residual = make_layer(rng, 300, 64, 64, torch.bfloat16)
    expected = linear(x, weight, bias, residual=residual)
    storage = torch.empty(300 * 2**23, dtype=torch.bfloat16, device=x.device)
    apart = storage.as_strided((300, 64), (2**23, 1))
    if wide_output:
        linear(x, weight, bias, residual=apart.copy_(residual), out=apart)
        assert torch.equal(apart, expected)
    else:
        assert torch.equal(linear(apart.copy_(x), weight, bias, residual=residual), expected)
