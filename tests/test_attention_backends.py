"""Attention backends on a GPU: every package that is installed is exact, follows the offsets in a
captured graph, and survives what KNOWN_FAILURES lists."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitgraph.bench.exactness import relative_error
from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.encoder.attention import backends, flash
from vitgraph.encoder.attention.trial import Heads, guarded
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager
from vitgraph.graphs.calibration import calibrate
from vitgraph.kernels.attention import attention_reference
from vitgraph.kernels.layout import Layout

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PACKAGES = {package.name: package for package in flash.PACKAGES}
INSTALLED = ["triton", *(f"flash_attn/{name}" for name in PACKAGES), "flashinfer", "sdpa"]
GPU_LENGTHS = {
    "4": [4],
    "8": [8],
    "392": [392],
    "400": [400],
    "1024": [1024],
    "8160": [8160],
    "23040": [23040],
    "mixed_pack": [280, 3072, 1260, 8160, 936, 2304, 400],
    "60_of_64_empty": [400, 0, 1024, 64, 3] + [0] * 59,
}


@pytest.fixture
def serving():
    """`serving(name, dtype, count)` is (capability, build) of one package, or skips."""

    def find(name: str, dtype: torch.dtype, count: int = 4):
        heads = Heads(count, 72, dtype)
        backend, _, package = name.partition("/")
        if package:
            answer = flash.probe(PACKAGES[package], heads, CUDA)
            build = flash.build_with(PACKAGES[package])
            build = guarded(build) if answer.guard else build
        else:
            answer = backends.capability(backend, heads, CUDA)
            build = backends.BACKENDS[backend]
        if not answer.ok:
            pytest.skip(f"{name}: {answer.reason}")
        return answer, build

    return find


@pytest.fixture(scope="module")
def expected_rows():
    """Float64 attention and torch's own in the dtype, at most 2,048 query rows a sequence, for a
    pack that is made once: (qkv, rows, truth, torch_result)."""
    known: dict = {}

    def find(case: str, dtype: torch.dtype):
        if (case, dtype) not in known:
            lengths, rng = GPU_LENGTHS[case], torch.Generator("cuda").manual_seed(0)
            real = sum(lengths)
            qkv = torch.randn(real + 300, 3, 4, 72, generator=rng, device="cuda").to(dtype)
            qkv[real:] = float("nan")
            rows, truths, theirs, start = [], [], [], 0
            for length in filter(None, lengths):
                step = -(-length // 2048)
                q, k, v = qkv[start : start + length].permute(1, 2, 0, 3)  # [H, L, D] each
                picked = torch.arange(0, length, step, device="cuda")
                heads = [
                    torch.softmax(qh[picked].double() @ kh.double().T / 72**0.5, -1) @ vh.double()
                    for qh, kh, vh in zip(q, k, v, strict=True)
                ]
                truths.append(torch.stack(heads, 1).flatten(1))
                full = F.scaled_dot_product_attention(q[None], k[None], v[None])
                theirs.append(full[0].transpose(0, 1).flatten(1)[picked])
                rows.append(start + picked)
                start += length
            known[case, dtype] = qkv, torch.cat(rows), torch.cat(truths), torch.cat(theirs)
        return known[case, dtype]

    return find


def make_layout(name: str, lengths: list[int], rows: int, slots: int) -> Layout:
    """As a captured forward has it; `sdpa` needs the lengths on the host."""
    slots = max(slots, len(lengths))
    ends = torch.tensor([0, *lengths, *[0] * (slots - len(lengths))]).cumsum(0)
    offsets = ends.to(CUDA, torch.int32)
    coords = torch.zeros(rows, 4, dtype=torch.int32, device=CUDA)
    total = offsets[-1:].clone()
    seqlens = tuple(lengths) if name == "sdpa" else None
    count = torch.full_like(total, slots)
    return Layout(total, total // 4, count, offsets, coords, rows, seqlens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", GPU_LENGTHS)
@pytest.mark.parametrize("name", INSTALLED)
def test_matches_float64(
    name, case, dtype, serving, expected_rows, assert_as_exact_as, poisoned_empty
) -> None:
    _, build = serving(name, dtype)
    qkv, rows, truth, theirs = expected_rows(case, dtype)
    layout = make_layout(name, GPU_LENGTHS[case], len(qkv), len(GPU_LENGTHS[case]) + 2)
    out = build(layout, Heads(4, 72, dtype))(qkv.clone())
    # In float32 the error is the order of the sums and exp2's last bits.
    assert_as_exact_as(out[rows], theirs, truth, 6.0 if dtype == torch.float32 else 1.1)
    if name in ("flash_attn/vllm", "flashinfer"):  # the others' outputs are their own memory
        assert out[sum(GPU_LENGTHS[case]) :].isnan().all()


@pytest.mark.parametrize("name", INSTALLED[:-1])
def test_replays_follow_the_offsets(name, serving) -> None:
    """One captured graph of three layers, other packs each time, NaN past the last sequence."""
    heads, rows, slots = Heads(16, 72, torch.bfloat16), 4096, 16
    _, build = serving(name, heads.dtype, heads.count)
    clean = torch.randn(rows, 3, 16, 72, device="cuda").bfloat16()
    qkv, layout = clean.clone(), make_layout(name, [rows], rows, slots)

    def forward() -> list[Tensor]:
        attend = build(layout, heads)
        return [attend(qkv) for _ in range(3)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        layers = forward()
    for lengths in ([1000, 3, 0, 2000], [64] * 16, [4096], [130, 1, 700], [2040, 2056]):
        other = make_layout(name, lengths, rows, slots)
        layout.cu_seqlens.copy_(other.cu_seqlens)
        layout.num_patches.copy_(other.num_patches)
        real = sum(lengths)
        qkv.copy_(clean)
        qkv[real:] = float("nan")
        graph.replay()
        expected = attention_reference(clean[:real].float(), layout.cu_seqlens)
        for layer in layers:
            torch.testing.assert_close(layer[:real].float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", INSTALLED)
def test_a_nan_stays_in_its_item_where_the_trial_says_so(name, serving) -> None:
    """KNOWN_FAILURES 29, NaN and infinity in q, k and v; `auto` takes nobody else."""
    heads, lengths = Heads(16, 72, torch.bfloat16), [40, 300, 129]
    answer, build = serving(name, heads.dtype, heads.count)
    qkv = torch.randn(512, 3, 16, 72, device="cuda").bfloat16()
    attend = build(make_layout(name, lengths, 512, 8), heads)
    clean = attend(qkv.clone())
    kept = True
    for part, value in itertools.product((slice(None), 0, 1, 2), ("nan", "inf")):
        poisoned = qkv.clone()
        poisoned[40:340, part] = float(value)
        out = attend(poisoned)
        assert not out[40:340].isfinite().any()
        kept &= torch.equal(out[:40], clean[:40]) and torch.equal(out[340:469], clean[340:469])
    assert kept == answer.isolates


@pytest.fixture(scope="module")
def captured_managers(reference):
    """A captured manager for each backend, its graphs' memory full of NaN."""
    model = copy.deepcopy(reference).cuda().bfloat16()
    known: dict = {}

    def find(name: str):
        if name not in known:
            try:
                encoder = Qwen3VLVisionEncoder.from_transformers(model, attention=name)
            except ValueError as error:
                pytest.skip(str(error))
            manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64, 512), 8, 64))
            manager.capture()
            known[name] = manager
        manager = known[name]
        for budget in (64, 512):  # KNOWN_FAILURES 1: every buffer of the graphs holds NaN now
            pixels = torch.full((4 * budget, 1536), float("nan"), device="cuda")
            grids = [(1, 2, 2 * budget)]
            out = manager.execute({"pixel_values": pixels, "image_grid_thw": grids})
            assert out[0].isnan().all()
        return manager

    return find


PACKS = {
    "small_after_nan": [(1, 20, 20)],  # 1
    "frames_overflow": [(70, 4, 4), (1, 4, 4)],  # 2
    "images_after_a_video": [(1, 20, 20), (1, 28, 28)],  # 3
    "video": [(4, 24, 20)],  # 18
    "many_empty_slots": [(1, 16, 16)],  # 31
    "all_items": [(1, 4, 2 * n) for n in range(1, 9)],
}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("name", ["triton", "flash_attn", "flashinfer", "auto"])
def test_known_failures(name, pack, captured_managers, encoder) -> None:
    """KNOWN_FAILURES 1, 2, 3, 18 and 31: one frame at a time, in float32, is what is right."""
    manager, grids = captured_managers(name), PACKS[pack]
    before = manager.get_cumulative_stats()
    frames = [(1, h, w) for t, h, w in grids for _ in range(t)]
    # Frames of different means: attending across them is ten times the rounding of bf16.
    parts = [torch.randn(h * w, 1536) + 3 * torch.randn(1536) for _, h, w in frames]
    mm_kwargs = {"pixel_values": torch.cat(parts), "image_grid_thw": grids}
    outputs = torch.cat(manager.execute(mm_kwargs)).float().cpu()
    alone = torch.cat([encoder(x, [grid]) for x, grid in zip(parts, frames, strict=True)])
    assert relative_error(outputs, alone) <= 1.5e-2
    after = manager.get_cumulative_stats()
    misses = after["graph_misses"] - before["graph_misses"]
    assert misses == (1 if pack == "frames_overflow" else 0)


def test_auto_records_what_it_measured(reference) -> None:
    """Where a capture measures: not with the Hopper kernels, whose tables serve."""
    model = copy.deepcopy(reference).cuda().bfloat16()
    encoder = Qwen3VLVisionEncoder.from_transformers(model)
    for patches in (256, 2048):
        plan = calibrate(encoder, patches, 8)
        measured = plan.microseconds["attention"]
        assert plan.attention == min(measured, key=measured.get)
        assert measured.keys() | plan.left_out.keys() == backends.BACKENDS.keys()
        assert not measured.keys() & plan.left_out.keys() and "triton" in measured
        assert all(plan.left_out.values())
