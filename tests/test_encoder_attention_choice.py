"""Which attention backend is taken, and why not the others; trials are told what to find."""

import functools

import pytest
import torch

from vitgraph.encoder.attention import backends, flash, flashinfer
from vitgraph.encoder.attention.trial import GUARDED, LEAKS, Heads, Trial

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
HEADS = Heads(2, 72, torch.float32)
PACKAGES = {package.name: package for package in flash.PACKAGES}


@pytest.fixture
def libraries(monkeypatch):
    """Which packages are installed, and what a trial of each does."""
    trials: dict[str, Trial | Exception] = {}

    def try_package(build, heads, device) -> Trial:
        result = trials["flashinfer" if isinstance(build, functools.partial) else build]
        if isinstance(result, Exception):
            raise result
        return result

    names = {package.module: package.name for package in PACKAGES.values()}
    names |= {"flashinfer": "flashinfer", "cudnn": "flashinfer"}
    for module in (flash, flashinfer):
        monkeypatch.setattr(module, "is_installed", lambda module: names[module] in trials)
        monkeypatch.setattr(module, "try_out", try_package)
    monkeypatch.setattr(flash, "build_with", lambda package: package.name)
    caches = flash.probe, flashinfer.serving
    for cache in caches:
        cache.cache_clear()
    yield trials
    for cache in caches:
        cache.cache_clear()


BF16 = Heads(16, 72, torch.bfloat16)
SERVES, NEEDS_GUARD = Trial(False), Trial(True)


def test_the_first_that_serves_is_taken(libraries) -> None:
    libraries.update({"torch": SERVES, "fa3-fwd": NEEDS_GUARD, "vllm": RuntimeError("no\nimage")})
    chosen = backends.capability("flash_attn", BF16, CUDA)
    assert (chosen.ok, chosen.package, chosen.guard, chosen.isolates) == (
        True,
        "fa3-fwd",
        True,
        True,
    )
    assert chosen.reason == GUARDED
    reasons = {one.package: one.reason for one in backends.capabilities(BF16, CUDA)}
    assert reasons["vllm"] == "RuntimeError: no"
    assert reasons["flash-attn"] == reasons["flash-attn-4"] == "not installed"
    assert reasons["flashinfer-python"] == "flashinfer-python is not installed"


def test_one_that_leaks_behind_the_guard_says_so(libraries) -> None:
    libraries["torch"] = Trial(True, "nan in q changes others")
    chosen = backends.capability("flash_attn", BF16, CUDA)
    assert chosen.ok and not chosen.isolates
    assert chosen.reason == f"{GUARDED}; {LEAKS} (nan in q changes others)"


def test_a_library_is_tried_once(libraries) -> None:
    libraries["torch"] = SERVES
    assert backends.capability("flash_attn", BF16, CUDA).package == "torch"
    libraries["torch"] = RuntimeError("a second trial")
    assert backends.capability("flash_attn", BF16, CUDA).package == "torch"


def test_asking_for_what_cannot_serve_says_why(libraries) -> None:
    libraries["torch"] = RuntimeError("torch was built without it")
    libraries["flashinfer"] = ArithmeticError("its error is 3")
    with pytest.raises(ValueError, match=r"'flash_attn': vllm: not installed; .*torch: Runtime"):
        backends.resolve_backend("flash_attn", BF16, CUDA)
    with pytest.raises(ValueError, match="'flashinfer': ArithmeticError: its error is 3"):
        backends.resolve_backend("FLASHINFER", BF16, CUDA)
    for name in ("flash_attn", "flashinfer"):
        with pytest.raises(ValueError, match=f"'{name}': needs CUDA, not cpu"):
            backends.resolve_backend(name, BF16, CPU)
        with pytest.raises(ValueError, match=f"'{name}': needs bf16 or fp16, not torch.float32"):
            backends.resolve_backend(name, HEADS, CUDA)
    with pytest.raises(ValueError, match="head_dim that is a multiple of 8 from 16 on, not 20"):
        backends.resolve_backend("triton", Heads(2, 20, torch.float32), CUDA)


def test_flashinfer_copies_where_views_fail(libraries, monkeypatch) -> None:
    tried = []

    def try_views(build, heads, device) -> Trial:
        tried.append(build.keywords["copies"])
        if not tried[-1]:
            raise RuntimeError("strides")
        return SERVES

    libraries["flashinfer"] = SERVES
    monkeypatch.setattr(flashinfer, "try_out", try_views)
    answer = backends.capability("flashinfer", BF16, CUDA)
    assert (answer.ok, answer.reason, answer.isolates) == (True, "q and k are copied", True)
    assert tried == [False, True]


def test_names(libraries) -> None:
    libraries.update({"torch": SERVES, "flashinfer": SERVES})
    for theirs, ours in backends.VLLM_NAMES.items():
        assert backends.resolve_backend(theirs, BF16, CUDA) == ours
        assert backends.resolve_backend(ours, BF16, CUDA) == ours
    assert backends.resolve_backend("auto", BF16, CUDA) == "triton"
    assert backends.resolve_backend("auto", BF16, CPU) == "sdpa"
    for unknown in ("flash", "Flash_Attn", "torch_sdpa", ""):
        with pytest.raises(ValueError, match=f"backend '{unknown}' is none of auto, triton, .*"):
            backends.resolve_backend(unknown, BF16, CUDA)
