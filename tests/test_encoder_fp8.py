"""The encoder with FP8 layers: how far from float32, never stale, and items kept apart.

The bounds are multiples of bfloat16's own error on the same weights: 7 for random ones of the 8B
tower (simulated: 6.5 to 6.9); the tiny tower's are with its tests.
"""

import copy

import pytest
import torch

from vitgraph.bench.exactness import relative_error
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.encoder.embeddings import split_embeddings
from vitgraph.graphs import (
    CompilationConfig,
    EncoderCudaGraphManager,
    replace_vision_tower,
    restore_vision_tower,
)

GRIDS = [(1, 8, 12), (2, 4, 4), (1, 2, 2)]
SMALL = [(1, 2, 2), (2, 2, 4), (1, 2, 2)]  # for the interpreter
TIMES_BF16 = 7
SKIPS = [0, 2]
TRITON_TOO = ["torch", "triton"]


@pytest.fixture
def pixels(rng):
    patches = sum(t * h * w for t, h, w in SMALL)
    return torch.randn(patches, 1536, generator=rng, device=rng.device)


def fp8(reference, **options):
    """Of transformers' tower, in its dtype."""
    return Qwen3VLVisionEncoder.from_transformers(reference, linear_dtype="fp8", **options)


def errors(output, truth, grids, levels):
    """Relative, of each item and part."""
    tokens = [t * h * w // 4 for t, h, w in grids]
    for rows, expected in zip(output.split(tokens), truth.split(tokens), strict=True):
        for parts in zip(split(rows, levels), split(expected, levels), strict=True):
            ours, right = (part.double() for part in parts)
            yield ((ours - right).norm() / right.norm()).item()


def split(rows, levels):
    merged, deepstack = split_embeddings(rows, levels)
    return [merged, *deepstack]


def tower_of(tools, dtype=torch.float32, scale=1.0):
    tower = tools.make_reference()
    with torch.no_grad():
        for block in tower.blocks:  # or the residual stream would hide what the layers do
            for layer in (block.attn.qkv, block.mlp.linear_fc1, block.mlp.linear_fc2):
                layer.weight.mul_(scale)
    return tower.to(dtype)


# Weights three times as large amplify what goes in. bfloat16 rounds its sums in 4 blocks less often
# than in the 27 that the bound was simulated for, so FP8 is the further from it.
@pytest.mark.parametrize(("scale", "bound"), [(1.0, 3.5), (3.0, 9.0)])
def test_error_of_a_tiny_tower(tools, scale, bound):
    """Each item and level, in multiples of bfloat16's own error."""
    torch.manual_seed(0)
    pixels = torch.randn(132, 1536)
    truth = Qwen3VLVisionEncoder.from_transformers(tower_of(tools, scale=scale))(pixels, GRIDS)
    half = tower_of(tools, torch.bfloat16, scale)
    bf16 = Qwen3VLVisionEncoder.from_transformers(half)(pixels, GRIDS)
    own = list(errors(bf16, truth, GRIDS, 3))
    found = list(errors(fp8(half)(pixels, GRIDS), truth, GRIDS, 3))
    ratios = [one / other for one, other in zip(found, own, strict=True)]
    print(f"bf16 {max(own):.4f}, fp8 {max(found):.4f}, ratios {min(ratios):.2f}-{max(ratios):.2f}")
    assert max(ratios) < bound
    # neither the truth nor bf16 by mistake
    alone = list(errors(fp8(tower_of(tools, scale=scale))(pixels, GRIDS), truth, GRIDS, 3))
    assert min(alone) > 1e-3


def test_blocks_that_are_left_out_gain_accuracy(reference):
    pixels = torch.randn(132, 1536)
    truth = Qwen3VLVisionEncoder.from_transformers(reference)(pixels, GRIDS)
    found = [
        relative_error(fp8(reference, fp8_skip_blocks=skip)(pixels, GRIDS), truth)
        for skip in range(4)
    ]
    print(f"skipping 0 to 3 of 4 blocks: {', '.join(f'{error:.4f}' for error in found)}")
    assert found == sorted(found, reverse=True) and found[3] < found[0] / 1.3


def test_small_forwards_stay_in_their_dtype(reference, monkeypatch):
    """By their capacity, in graphs and eagerly: quantising takes longer than it gains there."""
    monkeypatch.setattr(Qwen3VLVisionEncoder, "fp8_min_patches", 257)
    plain, encoder = Qwen3VLVisionEncoder.from_transformers(reference), fp8(reference)
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64, 128), 8))
    manager.capture()
    grids = [[(1, 8, 12), (1, 4, 4)], [(1, 16, 16)], [(1, 16, 18)]]
    for item, small in zip(grids, (True, True, False), strict=True):
        batch = manager.model.make_encoder_inputs(item)
        expected = plain(batch["pixel_values"], item)
        for rows in (encoder(batch["pixel_values"], item), torch.cat(manager.execute(batch))):
            assert (relative_error(rows, expected) < 1e-5) == small
    assert manager.get_cumulative_stats()["graph_misses"] == 0


@pytest.mark.parametrize("skip", SKIPS)
def test_kernels_give_what_the_reference_gives(reference, device, pixels, skip):
    """Values that lie between two of e4m3 fall to either side, few of them."""
    if device.type == "cuda":
        reference = copy.deepcopy(reference).to(device)
    options = {"fp8_skip_blocks": skip, "attention": "triton"}
    truth = Qwen3VLVisionEncoder.from_transformers(reference, ops="torch", attention="sdpa")
    expected = fp8(reference, ops="torch", fp8_skip_blocks=skip, attention="sdpa")
    actual = fp8(reference, ops="triton", **options)
    right, wanted, found = (one(pixels, SMALL) for one in (truth, expected, actual))
    print(f"kernels: {relative_error(found, wanted):.1e}, fp8: {relative_error(wanted, right):.1e}")
    assert relative_error(found, wanted) < 0.25 * relative_error(wanted, right)


@pytest.mark.parametrize("ops", TRITON_TOO)
def test_weights_changed_in_place_are_seen_by_the_next_forward(tools, device, pixels, ops):
    """Weight, bias and the norm folded into them, of every layer in FP8."""
    tower = tools.make_reference(str(device))
    encoder = fp8(tower, ops=ops)
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64,), 4))
    manager.capture()
    batch = {"pixel_values": pixels, "image_grid_thw": SMALL}
    block = tower.blocks[1]
    everything = [block.norm1.bias, block.attn.qkv.weight, block.mlp.linear_fc1.bias]
    everything += [block.norm2.weight, block.mlp.linear_fc2.weight, block.mlp.linear_fc2.bias]
    one_by_one = [[parameter] for parameter in everything]
    for parameters in one_by_one if ops == "torch" else [everything]:
        before = torch.cat(manager.execute(batch)), encoder(pixels, SMALL)
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
        after = torch.cat(manager.execute(batch)), encoder(pixels, SMALL)
        expected = fp8(copy.deepcopy(tower), ops=ops)(pixels, SMALL)
        for old, new in zip(before, after, strict=True):
            assert relative_error(new, expected) < 1e-3 < relative_error(old, expected)


@pytest.mark.parametrize("ops", TRITON_TOO)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_item(reference, device, pixels, ops, value):
    if device.type == "cuda":
        reference = copy.deepcopy(reference).to(device)
    attention = "triton" if ops == "triton" else "sdpa"
    encoder = fp8(reference, ops=ops, attention=attention)
    tokens = [t * h * w // 4 for t, h, w in SMALL]
    clean = encoder(pixels, SMALL).split(tokens)
    pixels[6] = value  # of the second item
    dirty = encoder(pixels, SMALL).split(tokens)
    assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[2], clean[2])
    assert dirty[1].isnan().any()


def test_a_hundredfold_input(reference, device, pixels):
    """No scale of the activations is kept: right for pixels of any size."""
    if device.type == "cuda":
        reference = copy.deepcopy(reference).to(device)
    truth, encoder = Qwen3VLVisionEncoder.from_transformers(reference), fp8(reference)
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64,), 4))
    manager.capture()
    for size in (1, 100, 0.01):
        batch = {"pixel_values": size * pixels, "image_grid_thw": SMALL}
        rows = torch.cat(manager.execute(batch))
        assert relative_error(rows, truth(size * pixels, SMALL)) < 0.1


def test_ways_in(tools, tmp_path):
    """random, from_transformers and replace_vision_tower give the same; the weights' names are as
    without FP8."""
    tower, pixels = tools.make_reference(), torch.randn(16, 1536)
    options = {"linear_dtype": "fp8", "fp8_skip_blocks": 1}
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"], **options)
    plain = Qwen3VLVisionEncoder.from_transformers(tower)
    assert encoder.state_dict().keys() == plain.state_dict().keys()
    encoder.load_state_dict(plain.state_dict())
    expected = encoder(pixels, [(1, 4, 4)])
    shared = Qwen3VLVisionEncoder.from_transformers(tower, **options)
    assert shared.fp8_blocks == range(1, 4)
    assert torch.equal(shared(pixels, [(1, 4, 4)]), expected)
    assert not torch.equal(plain(pixels, [(1, 4, 4)]), expected)
    replace_vision_tower(tower, **options)
    rows = tower(pixels, torch.tensor([[1, 4, 4]]))
    assert torch.equal(torch.cat([rows.pooler_output, *rows.deepstack_features], dim=1), expected)
    restore_vision_tower(tower)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear_dtype": "int8"}, "linear_dtype 'int8' is none of same, fp8"),
        ({"linear_dtype": torch.float8_e4m3fn}, "is none of same, fp8"),
        ({"linear_dtype": "fp8", "fp8_skip_blocks": -1}, "fp8_skip_blocks -1 .*from 0 to 3"),
        ({"linear_dtype": "fp8", "fp8_skip_blocks": 4}, "fp8_skip_blocks 4 .*has 4 blocks"),
        ({"linear_dtype": "fp8", "fp8_skip_blocks": 1.0}, r"fp8_skip_blocks 1\.0 must be an int"),
        ({"fp8_skip_blocks": 2}, "fp8_skip_blocks 2 goes with linear_dtype 'fp8'"),
        ({"linear_dtype": "fp8", "batch_invariant": True}, "batch_invariant has linear_dtype"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Qwen3VLVisionEncoder(GEOMETRIES["tiny"], ops="triton", **options)


def test_a_gpu_without_e4m3_is_refused(monkeypatch):
    from vitgraph.kernels.fp8 import quantize

    monkeypatch.setattr(quantize, "capability_of", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"linear_dtype 'fp8': e4m3 needs .* 8\.9.*ops 'torch'"):
        Qwen3VLVisionEncoder(GEOMETRIES["tiny"], ops="triton", linear_dtype="fp8")
    Qwen3VLVisionEncoder(GEOMETRIES["tiny"], ops="torch", linear_dtype="fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("skip", [0, 9])
def test_error_of_the_8b_tower(device, skip):
    """In bfloat16, each item and level, eagerly and replayed."""
    grids = [(1, 32, 32), (1, 20, 20), (2, 16, 24)]
    patches = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator(device).manual_seed(0)
    pixels = torch.randn(patches, 1536, generator=generator, device=device)
    exact = Qwen3VLVisionEncoder.random(GEOMETRIES["8b"], device=device, ops="torch")
    truth = exact(pixels, grids)
    options = {"device": device, "dtype": torch.bfloat16}
    towers = [
        Qwen3VLVisionEncoder(GEOMETRIES["8b"], **options),
        Qwen3VLVisionEncoder(GEOMETRIES["8b"], **options, linear_dtype="fp8", fp8_skip_blocks=skip),
    ]
    for tower in towers:
        tower.load_state_dict(exact.state_dict())
    own, eager = (list(errors(tower(pixels, grids), truth, grids, 3)) for tower in towers)
    manager = EncoderCudaGraphManager(towers[1], CompilationConfig(True, (512, 1024), 8))
    manager.capture()
    batch = {"pixel_values": pixels, "image_grid_thw": grids}
    replayed = list(errors(torch.cat(manager.execute(batch)), truth, grids, 3))
    for found in (eager, replayed):
        ratios = [one / other for one, other in zip(found, own, strict=True)]
        print(f"skip {skip}: bf16 {max(own):.4f}, fp8 {max(found):.4f}, at most {max(ratios):.2f}")
        assert max(ratios) < TIMES_BF16


@pytest.mark.gpu
def test_replays_equal_the_eager_forward(device):
    """As nearly as two forwards in FP8 can: layers that stay in bfloat16 round differently in
    another capacity, and what was between two values of e4m3 falls to the other side."""
    options = {"device": device, "dtype": torch.bfloat16, "attention": "triton"}
    half = Qwen3VLVisionEncoder.random(GEOMETRIES["8b"], **options)
    encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["8b"], linear_dtype="fp8", **options)
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (256, 1024), 8))
    manager.capture()
    for size in (1.0, 100.0):
        for grids in ([(1, 20, 20)], [(1, 32, 32), (1, 16, 16)], [(1, 16, 16)] * 8):
            batch = manager.model.make_encoder_inputs(grids)
            batch["pixel_values"] = size * batch["pixel_values"]
            rows = torch.cat(manager.execute(batch))
            inputs = batch["pixel_values"], grids
            eager, right = encoder(*inputs), half(*inputs)
            print(*(f"{relative_error(*two):.4f}" for two in ((rows, eager), (eager, right))))
            assert relative_error(rows, eager) < relative_error(eager, right)
            assert relative_error(rows, right) < 1.1 * relative_error(eager, right)


def test_an_interpreter_that_nobody_mended_is_refused(monkeypatch) -> None:
    """It truncates to e4m3, and a NaN comes out as a number."""
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted where there is a GPU")
    monkeypatch.setattr("vitgraph.kernels.fp8.quantize.INTERPRETER_IS_MENDED", False)
    with pytest.raises(ValueError, match="interpreter rounds to e4m3 wrongly"):
        Qwen3VLVisionEncoder.random(GEOMETRIES["tiny"], ops="triton", linear_dtype="fp8")
