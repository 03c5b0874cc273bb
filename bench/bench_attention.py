"""Packed varlen attention, 16 heads of 72 in bf16: ours against FlashAttention-3 and torch's SDPA.

The inputs are hot in L2 where they fit, as they are behind the kernel that writes qkv. FLOPs are
the useful ones: a head of 72 is not counted as 80 or 96.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitgraph.kernels.attention import attention, attention_config, attention_tiles

HEADS, HEAD_DIM = 16, 72
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
LIBRARIES = ("fa3", "sdpa_cudnn", "sdpa_flash")


def random_qkv(rows: int) -> Tensor:
    return torch.randn(rows, 3, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)


def useful_flops(lengths: list[int]) -> int:
    return sum(4 * length**2 * HEADS * HEAD_DIM for length in lengths)


def ours(qkv: Tensor, lengths: list[int], slots: int = 0):
    """A launch on a prepared table, as a layer of the encoder makes it."""
    rows, slots = qkv.shape[0], max(slots, len(lengths))
    ends = torch.tensor([0, *lengths, *[0] * (slots - len(lengths))]).cumsum(0)
    cu_seqlens = ends.to("cuda", torch.int32)
    config = attention_config(rows, slots, HEAD_DIM, qkv.dtype, qkv.device)
    tiles = attention_tiles(cu_seqlens, rows, HEADS, config)
    out = torch.empty(rows, HEADS * HEAD_DIM, device="cuda", dtype=qkv.dtype)
    return lambda: attention(qkv, cu_seqlens, tiles=tiles, out=out)


def fa3(qkv: Tensor, lengths: list[int]):
    module = pytest.importorskip("fa3_fwd_interface")
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    q, k, v = qkv.unbind(1)
    longest = max(lengths)
    return lambda: module.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest)


def sdpa(qkv: Tensor, lengths: list[int], backend: SDPBackend):
    if len(set(lengths)) > 1:
        pytest.skip("SDPA takes one length")
    q, k, v = qkv.unflatten(0, (len(lengths), lengths[0])).permute(2, 0, 3, 1, 4)

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return run


def check_against_float32(run, qkv: Tensor, lengths: list[int]) -> None:
    result, start = run(), 0
    for length in lengths:
        rows = slice(start, start + length)
        q, k, v = qkv[rows].permute(1, 2, 0, 3).float()
        expected = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        error = (result[rows].float() - expected).norm() / expected.norm()
        assert error < 4e-3, f"relative error {error:.2g} from row {start}"
        start += length


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", CASES)
def test_attention(case, library, measure):
    lengths = CASES[case]
    qkv = random_qkv(sum(lengths))
    if library == "fa3":
        baseline = fa3(qkv, lengths)
    else:
        backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        baseline = sdpa(qkv, lengths, backends[library.removeprefix("sdpa_")])
    run = ours(qkv, lengths)
    measure(
        f"attention {case}, {library}",
        run,
        baseline=baseline,
        baseline_name=library,
        flops=useful_flops(lengths),
        bytes=qkv.nbytes * 4 // 3,
        check=lambda: check_against_float32(run, qkv, lengths),
    )


def test_empty_capacity(measure):
    """The same rows in four times the capacity, 64 sequence slots instead of 8."""
    lengths = [1024] * 8
    exact, roomy = random_qkv(8192), random_qkv(32768)
    run = ours(roomy, lengths, slots=64)
    measure(
        "attention 8x1024 in 32768 rows, 64 slots",
        run,
        baseline=ours(exact, lengths),
        baseline_name="exact capacity",
        flops=useful_flops(lengths),
        bytes=exact.nbytes * 4 // 3,
        check=lambda: check_against_float32(run, roomy, lengths),
    )


def test_tile_table(measure):
    """Once per forward: 8 sequences in 64 slots."""
    cu_seqlens = torch.tensor([0, *[1024] * 8, *[0] * 56]).cumsum(0).to("cuda", torch.int32)
    config = attention_config(32768, 64, HEAD_DIM, torch.bfloat16, torch.device("cuda"))
    measure("attention tile table", lambda: attention_tiles(cu_seqlens, 32768, HEADS, config))
