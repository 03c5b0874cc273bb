"""`vitgraph precompile` fills the cache without a GPU, and a second start finds everything
there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def precompile(cache, *arguments: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "vitgraph.graphs.cli", "precompile", *arguments]
    return subprocess.run(
        command,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def hopper_cache(tmp_path_factory) -> Path:
    """One for all runs of this architecture: most of their kernels are the same."""
    return tmp_path_factory.mktemp("hopper")


def test_a_second_run_finds_every_kernel_of_the_8b_tower(tmp_path) -> None:
    """That none spills, on any architecture, is test_compile.py's."""
    arguments = ("--arch", "sm_80", "--geometry", "8b", "--budgets", "64", "2048")
    run = precompile(tmp_path, *arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    for kernel in ("attention_kernel", "linear_kernel", "layout_kernel", "rotary_kernel"):
        assert kernel in run.stdout
    binaries = sorted(tmp_path.rglob("*.cubin"))
    assert len(binaries) >= 10
    stamps = [file.stat().st_mtime_ns for file in binaries]
    assert precompile(tmp_path, *arguments).returncode == 0
    assert sorted(tmp_path.rglob("*.cubin")) == binaries
    assert [file.stat().st_mtime_ns for file in binaries] == stamps


def test_the_kernels_of_hopper_are_among_them(hopper_cache) -> None:
    run = precompile(hopper_cache, "--arch", "sm_90", "--geometry", "8b", "--budgets", "64")
    assert run.returncode == 0, run.stdout + run.stderr
    for kernel in ("attention_sm90_kernel", "linear_sm90_kernel", "linear_kernel"):
        assert kernel in run.stdout


def test_the_kernels_of_fp8_are_among_them_where_there_is_fp8(hopper_cache) -> None:
    arguments = ("--geometry", "8b", "--budgets", "64", "1024", "--linear-dtype", "fp8")
    run = precompile(hopper_cache, "--arch", "sm_90", *arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    for kernel in ("linear_fp8_sm90_kernel", "quantize_kernel", "layer_norm_kernel"):
        assert kernel in run.stdout
    run = precompile(hopper_cache, "--arch", "sm_86", *arguments)
    assert run.returncode == 2
    assert "--arch sm_86 has no FP8, sm_89 is the first" in " ".join(run.stderr.split())


START = """
import torch
from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager
encoder = Qwen3VLVisionEncoder.random(GEOMETRIES["2b"], device="cuda", dtype=torch.bfloat16)
EncoderCudaGraphManager(encoder, CompilationConfig(True, (64, 512), 8)).capture()
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_a_precompiled_start_compiles_nothing(tmp_path) -> None:
    major, minor = torch.cuda.get_device_capability()
    arguments = ("--arch", f"sm_{major}{minor}", "--geometry", "2b", "--budgets", "64", "512")
    run = precompile(tmp_path, *arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    binaries = sorted(tmp_path.rglob("*.cubin"))
    assert len(binaries) >= 10
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", START], env=environment, check=True)
    new = [file.name for file in sorted(tmp_path.rglob("*.cubin")) if file not in binaries]
    assert not new


def test_mistakes(tmp_path) -> None:
    run = precompile(tmp_path, "--arch", "sm_75")
    assert run.returncode == 2
    assert "--arch sm_75 is none of sm_80" in run.stderr
