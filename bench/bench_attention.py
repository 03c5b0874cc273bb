"""Packed varlen attention, 16 heads of 72 in bf16: ours against every library that is installed.

The launches of a graph take turns over inputs that exceed the L2 cache together. FLOPs are the
useful ones: a head of 72 is not counted as 80 or 96. A summary follows the table: ours against the
best library of each row.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitgraph.bench.exactness import relative_error
from vitgraph.encoder.attention import flash, flashinfer
from vitgraph.encoder.attention.trial import Heads
from vitgraph.kernels.attention import attention
from vitgraph.kernels.attention_config import attention_config
from vitgraph.kernels.attention_schedule import attention_schedule
from vitgraph.kernels.layout import Layout

HEADS = Heads(16, 72, torch.bfloat16)
CASES = {
    "1x400": [400],
    "20x400": [400] * 20,
    "8x960": [960] * 8,
    "8x1024": [1024] * 8,
    "1x3072": [3072],
    "1x8160": [8160],
    "1x23040": [23040],
    "mixed": [280, 3072, 1260, 8160, 936, 2304, 400],
}
VARLEN = ("vllm", "fa3-fwd", "flash-attn-4", "flash-attn", "flashinfer")
SDPA = {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}
FLASH_ATTENTION_3 = ("vllm", "fa3-fwd")
CHECKED_ROWS = 64  # of each sequence

Attend = Callable[[Tensor], Tensor]


def random_qkv(rows: int) -> Tensor:
    return torch.randn(rows, 3, HEADS.count, HEADS.dim, device="cuda", dtype=HEADS.dtype)


def useful_flops(lengths: list[int]) -> int:
    return sum(4 * length**2 * HEADS.count * HEADS.dim for length in lengths)


def least_bytes(lengths: list[int]) -> int:
    return sum(lengths) * 4 * HEADS.count * HEADS.dim * HEADS.dtype.itemsize


def make_layout(lengths: list[int], rows: int, slots: int, longest: int) -> Layout:
    ends = torch.tensor([0, *lengths, *[0] * (slots - len(lengths))]).cumsum(0)
    offsets = ends.to("cuda", torch.int32)
    coords = torch.empty(rows, 4, device="cuda", dtype=torch.int32)
    count = torch.full_like(offsets[:1], slots)
    return Layout(offsets[-1:], offsets[-1:] // 4, count, offsets, coords, longest)


def ours(lengths: list[int], rows: int = 0, slots: int = 0) -> Attend:
    """A launch on a prepared table, as a layer of the encoder makes it; capacity as needed."""
    rows, slots = rows or sum(lengths), slots or len(lengths)
    offsets = make_layout(lengths, rows, slots, rows).cu_seqlens
    config = attention_config(rows, slots, HEADS.count, HEADS.dim, HEADS.dtype, offsets.device)
    schedule = attention_schedule(offsets, rows, HEADS.count, config)
    return lambda qkv: attention(qkv, offsets, schedule=schedule)


def theirs(name: str, lengths: list[int], rows: int = 0, slots: int = 0) -> Attend:
    """A library as it is, told the longest length, or that of a capacity; skips where there is
    none."""
    if name in SDPA:
        return sdpa(lengths, SDPA[name])
    device = torch.device("cuda")
    if name == "flashinfer":
        answer, build = flashinfer.serving(HEADS, device)
    else:
        package = next(one for one in flash.PACKAGES if one.name == name)
        answer = flash.probe(package, HEADS, device)
        build = flash.build_with(package)
    if not answer.ok:
        pytest.skip(f"{name}: {answer.reason}")
    layout = make_layout(lengths, rows or sum(lengths), slots or len(lengths), rows or max(lengths))
    return build(layout, HEADS)


def sdpa(lengths: list[int], backend: SDPBackend) -> Attend:
    if len(set(lengths)) > 1:
        pytest.skip("SDPA takes one length")

    def run(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(0, (len(lengths), lengths[0])).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1).flatten(1)

    return run


def check(attend: Attend, qkv: Tensor, lengths: list[int]) -> None:
    """Against float32, on some query rows of each sequence."""
    result, start = attend(qkv), 0
    for length in lengths:
        q, k, v = qkv[start : start + length].permute(1, 2, 0, 3)  # [H, L, D] each
        rows = torch.arange(0, length, max(length // CHECKED_ROWS, 1), device="cuda")
        scores = q[:, rows].float() @ k.float().transpose(1, 2) / HEADS.dim**0.5
        expected = (scores.softmax(-1) @ v.float()).transpose(0, 1).flatten(1)
        error = relative_error(result[start + rows], expected)
        assert error < 4e-3, f"relative error {error:.2g} from row {start}"
        start += length


@pytest.fixture(scope="module")
def results(summarise) -> Iterator[dict]:
    """(what, library) -> Row, summarised when all benchmarks of this file are done."""
    rows: dict = {}
    yield rows
    if rows:
        summarise(*summary(rows))


@pytest.mark.parametrize("library", (*VARLEN, *SDPA))
@pytest.mark.parametrize("case", CASES)
def test_attention(case, library, measure, rotate, results):
    lengths = CASES[case]
    baseline, run = theirs(library, lengths), ours(lengths)
    buffers = rotate(lambda: (random_qkv(sum(lengths)),))

    def check_both() -> None:
        check(run, *buffers[0], lengths)
        check(baseline, *buffers[0], lengths)

    results[case, library] = measure(
        f"attention {case}, {library}",
        run,
        baseline=baseline,
        baseline_name=library,
        flops=useful_flops(lengths),
        bytes=least_bytes(lengths),
        check=check_both,
        buffers=buffers,
    )


@pytest.mark.parametrize("library", ("ours", *VARLEN))
def test_capacity(library, measure, rotate, results):
    """The same rows in four times the capacity, 64 sequence slots instead of 8; a library is told
    that a sequence may be as long as the capacity."""
    lengths, rows, slots = [1024] * 8, 32768, 64
    if library == "ours":
        run, exact = ours(lengths, rows, slots), ours(lengths)
    else:
        run, exact = theirs(library, lengths, rows, slots), theirs(library, lengths)
    buffers = rotate(lambda: (random_qkv(rows),))
    results["capacity", library] = measure(
        f"attention 8x1024 in 32768 rows, 64 slots, {library}",
        run,
        baseline=lambda qkv: exact(qkv[:8192]),
        baseline_name="exact capacity",
        flops=useful_flops(lengths),
        bytes=least_bytes(lengths),
        check=lambda: check(run, *buffers[0], lengths),
        buffers=buffers,
    )


def test_tile_table(measure):
    """Once per forward: 8 sequences in 64 slots."""
    offsets = make_layout([1024] * 8, 32768, 64, 1024).cu_seqlens
    config = attention_config(32768, 64, HEADS.count, HEADS.dim, HEADS.dtype, offsets.device)
    measure("attention tile table", lambda: attention_schedule(offsets, 32768, HEADS.count, config))


def summary(rows: dict) -> tuple[Table, dict]:
    """Ours against the best library of each case, the geometric mean over FlashAttention-3, and
    what empty capacity costs each."""
    table = Table(title="attention: ours against the best library of each row")
    for column in ("case", "ours us", "TFLOP/s", "best library", "us", "ratio", ""):
        table.add_column(column, justify="left" if column == "best library" else "right")
    values: dict = {"cases": {}, "capacity": {}}
    over_fa3 = []
    for case in CASES:
        found = {library: row for (name, library), row in rows.items() if name == case}
        if not found:
            continue
        best = min(found, key=lambda library: found[library].baseline_us)
        us, other = found[best].median_us, found[best].baseline_us
        tflops, ratio = useful_flops(CASES[case]) / us / 1e6, other / us
        values["cases"][case] = {"us": us, "tflop_s": tflops, "best": best, "ratio": ratio}
        bar = "█" * round(10 * ratio)
        cells = (f"{us:.1f}", f"{tflops:.0f}", best, f"{other:.1f}", f"{ratio:.2f}", bar)
        table.add_row(case, *cells)
        fa3 = next((found[name] for name in FLASH_ATTENTION_3 if name in found), None)
        if fa3 is not None and case != "mixed":
            over_fa3.append(fa3.baseline_us / fa3.median_us)
    notes = []
    if over_fa3:
        values["over_fa3"] = math.exp(sum(map(math.log, over_fa3)) / len(over_fa3))
        notes.append(f"over FlashAttention-3, {len(over_fa3)} rows: {values['over_fa3']:.2f}")
    for (name, library), row in rows.items():
        if name == "capacity":
            values["capacity"][library] = extra = row.median_us / row.baseline_us - 1
            notes.append(f"capacity, {library}: {extra:+.1%}")
    table.caption = "; ".join(notes)
    return table, values
