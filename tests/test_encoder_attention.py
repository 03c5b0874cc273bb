"""Attention backends without a GPU: how each library is called and tried out."""

import importlib.machinery
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from vitgraph.encoder.attention import backends, flash, flashinfer
from vitgraph.encoder.attention.trial import LENGTHS as TRIAL_LENGTHS
from vitgraph.encoder.attention.trial import Heads, Trial, guarded, try_out
from vitgraph.kernels.layout import Layout

CPU = torch.device("cpu")
HEADS = Heads(2, 72, torch.float32)
FP16 = Heads(1, 72, torch.float16)
PACKAGES = {package.name: package for package in flash.PACKAGES}
LENGTHS = [5, 40, 0, 12]
SLOTS, ROWS = 6, 80


def make_layout(lengths: list[int], slots: int, rows: int, captured: bool = True) -> Layout:
    ends = torch.tensor([0, *lengths, *[0] * (slots - len(lengths))]).cumsum(0)
    offsets = ends.to(torch.int32)
    coords = torch.zeros(rows, 4, dtype=torch.int32)
    longest, seqlens = (rows, None) if captured else (max(lengths), tuple(lengths))
    count = torch.full_like(offsets[:1], slots)
    return Layout(offsets[-1:], offsets[-1:] // 4, count, offsets, coords, longest, seqlens)


def make_qkv(rows: int, heads: Heads = HEADS, real: int | None = None) -> Tensor:
    """Random; NaN from row `real` on."""
    qkv = torch.randn(rows, 3, heads.count, heads.dim).to(heads.dtype)
    if real is not None:
        qkv[real:] = float("nan")
    return qkv


def attend_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[L, H, D] each, non-causal."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1)


def varlen(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, tile: int = 1) -> Tensor:
    """A varlen FlashAttention in plain torch. Values are loaded `tile` rows at a time: a NaN in a
    row that is none of the sequence's is multiplied by zero."""
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    for start, end in itertools.pairwise(offsets.tolist()):
        if end > start:
            loaded = v[start : start + -(-(end - start) // tile) * tile]
            rows = slice(start, end)
            out[rows] = attend_rows(q[rows], k[rows], v[rows]) + 0 * loaded.sum(0)
    return out


class FakeFlashAttention:
    """The entry points of the libraries; remembers the longest lengths it was told."""

    def __init__(self) -> None:
        self.calls = []

    def attend(self, q, k, v, offsets, longest) -> Tensor:
        assert q.stride() == k.stride() == v.stride() == (3 * 144, 72, 1)  # views of qkv
        assert offsets.dtype == torch.int32 and offsets.shape == (SLOTS + 1,)
        assert offsets.diff().max() <= longest
        return varlen(q, k, v, offsets)

    def positional(self, q, k, v, cu_q, cu_k, max_q, max_k) -> Tensor:
        assert cu_q is cu_k
        self.calls.append((max_q, max_k))
        return self.attend(q, k, v, cu_q, max_q)

    def of_vllm(
        self, q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, *, out,
        fa_version, num_splits=0, causal=False, softmax_scale=None,
    ) -> Tensor:  # fmt: skip
        assert num_splits == 1  # KNOWN_FAILURES 46
        assert cu_seqlens_q is cu_seqlens_k and not causal and fa_version == 3
        assert out.shape == q.shape and out.is_contiguous()
        self.calls.append((max_seqlen_q, max_seqlen_k))
        return out.copy_(self.attend(q, k, v, cu_seqlens_q, max_seqlen_q))

    def of_cute(
        self, q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert qv is None and cu_seqlens_q is cu_seqlens_k
        self.calls.append((max_seqlen_q, max_seqlen_k))
        return self.attend(q, k, v, cu_seqlens_q, max_seqlen_q), None


@pytest.fixture
def install(monkeypatch):
    """Put a module, and packages above it, where `import` finds them."""

    def add(name: str, **contents) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            module = sys.modules.get(path) if end < len(parts) else None
            if module is None:
                module = ModuleType(path)
                module.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=True)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, path, module)
            if end > 1:
                parent = sys.modules[".".join(parts[: end - 1])]
                monkeypatch.setattr(parent, parts[end - 1], module, raising=False)
        for key, value in contents.items():
            monkeypatch.setattr(module, key, value, raising=False)

    flash.load.cache_clear()
    yield add
    flash.load.cache_clear()


def install_fake(name: str, fake: FakeFlashAttention, install, version: int | None = 3) -> None:
    if name == "vllm":
        install("vllm.vllm_flash_attn", flash_attn_varlen_func=fake.of_vllm)
        install(
            "vllm.v1.attention.backends.fa_utils",
            get_flash_attn_version=lambda head_size: version,
        )
    elif name == "sglang":
        install(
            "sglang.kernels.ops.attention.flash_attention", flash_attn_varlen_func=fake.positional
        )
    elif name == "fa3-fwd":
        install("fa3_fwd_interface", flash_attn_varlen_func=fake.positional)
    elif name == "flash-attn":
        install("flash_attn", flash_attn_varlen_func=fake.positional)
        install("flash_attn.flash_attn_interface")
    elif name == "flash-attn-4":
        install("flash_attn.cute", flash_attn_varlen_func=fake.of_cute)
    else:
        install("torch.nn.attention.varlen", varlen_attn=fake.positional)


@pytest.mark.parametrize("name", PACKAGES)
def test_each_flash_attention_is_called_as_it_wants(name, install) -> None:
    """Views of qkv, offsets as they are, the capacity as longest length; equal to `sdpa`."""
    fake, qkv, real = FakeFlashAttention(), make_qkv(ROWS), sum(LENGTHS)
    install_fake(name, fake, install)
    assert flash.is_installed(PACKAGES[name].module)
    attend = flash.build_with(PACKAGES[name])(make_layout(LENGTHS, SLOTS, ROWS), HEADS)
    out = attend(qkv)
    expected = backends.sdpa(make_layout(LENGTHS, 4, ROWS, captured=False), HEADS)(qkv)
    assert out.shape == (ROWS, 144)
    torch.testing.assert_close(out[:real], expected[:real])
    assert out[real:].isnan().all()
    assert fake.calls == [(ROWS, ROWS)]


def test_sglang_of_before_its_kernels_moved(install) -> None:
    fake = FakeFlashAttention()
    install("sglang.jit_kernel.flash_attention", flash_attn_varlen_func=fake.positional)
    attend = flash.build_with(PACKAGES["sglang"])(make_layout(LENGTHS, SLOTS, ROWS), HEADS)
    attend(make_qkv(ROWS))
    assert fake.calls == [(ROWS, ROWS)]


def test_vllm_without_a_version_for_this_gpu(install) -> None:
    install_fake("vllm", FakeFlashAttention(), install, version=None)
    with pytest.raises(ImportError, match="no FlashAttention for this GPU"):
        PACKAGES["vllm"].load(HEADS)


def test_installed_means_found(install, monkeypatch, tmp_path) -> None:
    """Broken is not absent: the trial then says what is wrong."""
    for name in ("no_such_package", "no_such_package.part", "torch.no_such_part"):
        assert not flash.is_installed(name)
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in (("broken_one", "import no_such_dependency"), ("broken_two", "1 / 0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
        assert flash.is_installed(f"{name}.part")


class FakeCudnnPrefill:
    """FlashInfer's function in plain torch: reads and writes where the offsets in elements say."""

    def __call__(
        self, q, k, v, scale, workspace, *, max_token_per_sequence, max_sequence_kv,
        actual_seq_lens_q, actual_seq_lens_kv, causal, return_lse, batch_offsets_q,
        batch_offsets_k, batch_offsets_v, batch_offsets_o, out,
    ):  # fmt: skip
        assert not causal and not return_lse and scale == 72**-0.5
        assert workspace.dtype == torch.uint8 and workspace.numel() == 128 << 20
        lengths = actual_seq_lens_q
        self.shape = self.slots, _, _, _ = tuple(lengths.shape)
        self.longest, self.workspace = max_token_per_sequence, workspace
        assert max_sequence_kv == max_token_per_sequence
        assert actual_seq_lens_kv.equal(lengths) and lengths.dtype == torch.int32
        for offsets in (batch_offsets_q, batch_offsets_k, batch_offsets_v, batch_offsets_o):
            assert offsets.shape == (self.slots + 1, 1, 1, 1) and offsets.dtype == torch.int32
        for slot, length in enumerate(lengths.flatten().tolist()):
            assert 0 <= length <= max_token_per_sequence

            def rows(x, offsets, slot=slot, length=length):
                start = x.storage_offset() + offsets.flatten()[slot].item()
                return x.as_strided((length, *x.shape[1:]), x.stride(), start)

            if length:
                inputs = ((q, batch_offsets_q), (k, batch_offsets_k), (v, batch_offsets_v))
                rows(out, batch_offsets_o).copy_(attend_rows(*(rows(*one) for one in inputs)))
        return out, None


@pytest.mark.parametrize("copies", [False, True], ids=["views", "copies"])
@pytest.mark.parametrize("sequences", [1, 8, 9, 64])
def test_flashinfer_is_called_as_it_wants(sequences, copies, install, poisoned_empty) -> None:
    """Offsets in elements of qkv and of the output; slots and lengths from a few values only, the
    slots never a multiple of 8; rows past the last sequence unwritten."""
    fake = FakeCudnnPrefill()
    install("flashinfer.prefill", cudnn_batch_prefill_with_kv_cache=fake)
    lengths = ([7, 0, 30, 1] * 16)[:sequences]
    real, rows = sum(lengths), sum(lengths) + 33
    qkv = make_qkv(rows, real=real)
    layout = make_layout(lengths, sequences, rows)
    out = flashinfer.build(layout, HEADS, copies)(qkv)
    expected = backends.sdpa(make_layout(lengths, sequences, rows, captured=False), HEADS)(qkv)
    torch.testing.assert_close(out[:real], expected[:real])
    assert out[real:].isnan().all()
    assert fake.shape == ({1: 9, 8: 9, 9: 17, 64: 65}[sequences] + copies, 1, 1, 1)
    assert fake.longest == 1024


def test_flashinfer_keeps_one_workspace_a_forward(install) -> None:
    fake = FakeCudnnPrefill()
    install("flashinfer.prefill", cudnn_batch_prefill_with_kv_cache=fake)
    attend = flashinfer.build(make_layout(LENGTHS, SLOTS, ROWS), HEADS)
    qkv, seen = make_qkv(ROWS), set()
    for _ in range(3):
        attend(qkv)
        seen.add(fake.workspace.data_ptr())
    assert len(seen) == 1


def test_flashinfer_refuses_rows_beyond_its_offsets(install) -> None:
    """KNOWN_FAILURES 14."""
    install("flashinfer.prefill", cudnn_batch_prefill_with_kv_cache=FakeCudnnPrefill())
    layout = SimpleNamespace(
        cu_seqlens=torch.zeros(2, dtype=torch.int32),
        coords=SimpleNamespace(shape=(621_379, 4)),
        max_seqlen=621_379,
    )
    with pytest.raises(ValueError, match=r"reaches 621378 rows .* got 621379"):
        flashinfer.build(layout, Heads(16, 72, torch.bfloat16))


def fake_build(tile: int = 1, scale: float = 1.0, spoil=None):
    """A library as `try_out` sees it; `spoil` changes what it is given."""

    def build(layout: Layout, heads: Heads):
        def attend(qkv: Tensor) -> Tensor:
            parts = (spoil(qkv) if spoil else qkv).unbind(1)
            return scale * varlen(*parts, layout.cu_seqlens, tile).flatten(1)

        return attend

    return build


def leak_of(part: int, value: str):
    """Every row gets a bit of what one part of every row holds, if it is `value`."""

    def spoil(qkv: Tensor) -> Tensor:
        real = qkv[: sum(TRIAL_LENGTHS), part]
        found = real.isnan() if value == "nan" else real.isinf()
        return qkv + 0.5 * found.any()

    return spoil


def test_a_trial_tells_who_isolates() -> None:
    assert try_out(fake_build(), FP16, CPU) == Trial(guard=False)
    assert try_out(fake_build(tile=128), FP16, CPU) == Trial(guard=True)


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("part", [0, 1])
def test_a_trial_sees_what_the_guard_does_not_stop(part, value) -> None:
    build = fake_build(tile=128, spoil=leak_of(part, value))
    assert try_out(build, FP16, CPU) == Trial(True, f"{value} in {'qkv'[part]} changes others")


def test_a_trial_sees_an_item_that_hides_its_nan() -> None:
    build = fake_build(spoil=lambda qkv: qkv.nan_to_num(0, 0, 0))
    assert try_out(build, FP16, CPU) == Trial(True, "nan in q is lost in some of its own rows")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_guard_keeps_an_item_to_itself(part, value, device) -> None:
    """KNOWN_FAILURES 29, for a library that loads whole tiles."""
    if device.type == "cuda":
        pytest.skip("the fake library runs on the CPU")
    layout, (first, second, *_) = make_layout(LENGTHS, SLOTS, ROWS), LENGTHS
    qkv = make_qkv(ROWS, real=sum(LENGTHS))
    attend = guarded(fake_build(tile=16))(layout, HEADS)
    clean = attend(qkv.clone())
    qkv[first + 1, part, 1] = float(value)
    right = fake_build()(layout, HEADS)(qkv)  # loads no row of another
    out = attend(qkv)
    real, others = slice(sum(LENGTHS)), [*range(first), *range(first + second, sum(LENGTHS))]
    assert not right[first + 1, 72:].isfinite().all()
    assert torch.equal(out[real].isfinite(), right[real].isfinite())
    assert torch.equal(out[others], clean[others])


def test_a_trial_refuses_wrong_results() -> None:
    with pytest.raises(ArithmeticError, match=r"eagerly, its error is 0\.1"):
        try_out(fake_build(scale=1.1), FP16, CPU)


def test_a_guard_clears_what_a_library_must_not_read(device) -> None:
    """KNOWN_FAILURES 1: rows past the last sequence are whatever the memory held."""
    if device.type == "cuda":
        pytest.skip("the fake library runs on the CPU")
    layout, real = make_layout(LENGTHS, SLOTS, ROWS), sum(LENGTHS)
    qkv = make_qkv(ROWS, real=real)
    unguarded = fake_build(tile=16)(layout, HEADS)(qkv.clone())
    assert unguarded[:real].isnan().any()
    out = guarded(fake_build(tile=16))(layout, HEADS)(qkv)
    assert out[:real].isfinite().all()
