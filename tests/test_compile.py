"""Every kernel compiles for every supported GPU without one, spills nothing, and is specialised on
the model alone. (One compiling process an architecture: in this one kernels may be interpreted.)"""

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from vitgraph.kernels.isolate import isolate
from vitgraph.kernels.layer_norm import layer_norm
from vitgraph.kernels.layout import layout
from vitgraph.kernels.offline import compiling_for
from vitgraph.kernels.position_embedding import position_embedding
from vitgraph.kernels.rotary import rotary, rotary_frequencies, rotary_table

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def launch_row_kernels(device, dtype, rows, slots, hidden, head_dim, heads=16):
    """What one forward launches of these kernels, for a batch in `rows` rows and `slots` slots."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device=device)

    grid_thw = torch.zeros(slots, 3, dtype=torch.int32, device=device)
    batch = layout(grid_thw, rows, max_sequences=slots)
    table = empty(48 * 48, hidden)
    position_embedding(empty(rows, hidden), table, batch.coords, batch.num_patches)
    frequencies = rotary_frequencies(head_dim, device=device)
    table = rotary_table(batch.coords, frequencies, batch.num_patches)
    qkv = empty(rows, 3, heads, head_dim)
    rotary(qkv, table, batch.num_patches)
    isolate(qkv, batch.num_patches, 256)
    for width, count in ((hidden, batch.num_patches), (4 * hidden, batch.num_tokens)):
        layer_norm(empty(rows, width), empty(width), empty(width), num_rows=count)


def launch_everything(device) -> None:
    """Every specialisation that is to compile: add new kernels here."""
    for dtype in DTYPES:
        launch_row_kernels(device, dtype, rows=64, slots=4, hidden=1024, head_dim=64)
        launch_row_kernels(device, dtype, rows=64, slots=4, hidden=1152, head_dim=72)
    launch_row_kernels(device, torch.bfloat16, rows=64, slots=256, hidden=1280, head_dim=80)


def launch_many_batches(device) -> None:
    """One model, one dtype, batches of all sizes: 1 and multiples of 16 are what Triton singles
    out."""
    for rows in (4, 16, 36, 64, 1024, 1028):
        for slots in (1, 3, 16, 64):
            launch_row_kernels(device, torch.bfloat16, rows, slots, hidden=1152, head_dim=72)


@functools.cache
def compiled(arch: str, launches: str) -> list[dict]:
    """Name, registers, stack and shared bytes of what `launches` needs."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, arch, launches]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_spills(arch):
    kernels = compiled(arch, "launch_everything")
    assert len(kernels) > 20
    assert [k for k in kernels if k["stack_bytes"]] == []


def test_batch_sizes_are_not_specialised():
    names = Counter(k["name"] for k in compiled("sm_90", "launch_many_batches"))
    assert names == {
        "layout_kernel": 1,
        "position_embedding_kernel": 1,
        "rotary_table_kernel": 1,
        "rotary_kernel": 1,
        "isolate_kernel": 1,
        "layer_norm_kernel": 2,  # patches and tokens
    }


def test_refuses_to_compile_what_is_interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), compiling_for("sm_90"):
        pass


@pytest.mark.gpu
def test_random_batches_compile_nothing(device, rng):
    """On the GPU: 50 random batches after a first one of the same model."""
    import triton

    launch_row_kernels(device, torch.bfloat16, 64, 4, hidden=1152, head_dim=72)
    compilations = []
    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda **event: compilations.append(event["src"].name)
    try:
        for _ in range(50):
            rows, slots = torch.randint(1, 65, (2,), generator=rng, device=device).tolist()
            launch_row_kernels(device, torch.bfloat16, 4 * rows, slots, hidden=1152, head_dim=72)
    finally:
        triton.knobs.compilation.listener = before
    assert compilations == []


if __name__ == "__main__":
    with compiling_for(sys.argv[1]) as kernels:
        globals()[sys.argv[2]](torch.device("cpu"))
    json.dump([{k: v for k, v in asdict(x).items() if k != "cubin"} for x in kernels], sys.stdout)
