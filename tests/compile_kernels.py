"""Compile every kernel for a GPU that is not there, under a release of Triton.

    python tests/compile_kernels.py ARCH GROUP [NVDISASM]   JSON: what each kernel needs

`compiled` runs this in a process of its own with a release first on the path, as in the process of
the tests kernels may be interpreted. Other releases than the installed one are downloaded to
VITGRAPH_TRITON_CACHE (~/.cache/vitgraph/triton).
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# (out, in) features and epilogue: qkv, projection, fc1, fc2, the mergers
LAYERS = [
    (3456, 1152, None, False),
    (1152, 1152, None, True),
    (4304, 1152, "gelu_tanh", False),
    (1152, 4304, None, True),
    (4608, 4608, "gelu", False),
    (4096, 4608, None, False),
]
HEADS = 16


def cache() -> Path:
    """Where releases are kept."""
    return Path(os.environ.get("VITGRAPH_TRITON_CACHE", "~/.cache/vitgraph/triton")).expanduser()


def fetch(release: str) -> Path:
    """Folder of a release.

    Raises:
        OSError: pip could not download it, with the end of what it said.
    """
    folder = cache() / release
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            command += ["--no-compile", "--target", f"{work}/kept", f"triton=={release}"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"pip install failed: {done.stderr.strip()[-500:]}")
            Path(work, "kept").rename(folder)
    return folder


@functools.cache
def compiled(arch: str, group: str, release: str | None = None) -> list[dict[str, Any]]:
    """Name, registers, stack and shared bytes of each kernel of a group of launches, and what
    wgmma_hazard.py finds in those of the Hopper tier."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    if release is not None:
        path = [str(fetch(release)), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
    command = [sys.executable, __file__, arch, group]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{group} for {arch}, triton {release}: {done.stderr[-3000:]}")
    return json.loads(done.stdout)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count())


@functools.cache
def in_background(arch: str, group: str, release: str | None) -> "Future[list[dict[str, Any]]]":
    """`compiled`, beside others; ask for many before waiting for one."""
    return _pool().submit(compiled, arch, group, release)


def row_kernels(
    rows: int, slots: int, hidden: int, head_dim: int, dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> None:  # fmt: skip
    """What one forward launches of these kernels, for a batch in `rows` rows and `slots` slots."""
    from vitgraph.kernels.isolate import isolate
    from vitgraph.kernels.layer_norm import layer_norm
    from vitgraph.kernels.layout import layout
    from vitgraph.kernels.position_embedding import position_embedding
    from vitgraph.kernels.rotary import rotary, rotary_frequencies, rotary_table
    from vitgraph.kernels.share import collect_rows, take_rows

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    grid_thw = torch.zeros(slots, 3, dtype=torch.int32, device=device)
    batch = layout(grid_thw, rows, max_sequences=slots)
    table = empty(48 * 48, hidden)
    position_embedding(empty(rows, hidden), table, batch.coords, batch.num_patches)
    frequencies = rotary_frequencies(head_dim, device=device)
    table = rotary_table(batch.coords, frequencies, batch.num_patches)
    qkv = empty(rows, 3, HEADS, head_dim)
    rotary(qkv, table, batch.num_patches)
    isolate(qkv, batch.num_patches, 256)
    between = torch.zeros(2, dtype=torch.int32, device=device)
    parts, flat = empty(2, rows // 2, qkv[0].numel()), qkv.view(rows, -1)
    collect_rows(parts, batch.num_tokens, between, flat)
    take_rows(flat, between, parts[1])
    for width, count in ((hidden, batch.num_patches), (4 * hidden, batch.num_tokens)):
        for added in (None, empty(rows, width)):
            layer_norm(empty(rows, width), empty(width), empty(width), num_rows=count, added=added)


def layer(shape: tuple, dtype: torch.dtype, capacity: int, normalization: Any = None) -> None:
    """One layer with every provider of ours."""
    from vitgraph.kernels.linear import linear, linear_providers

    out_features, in_features, activation, residual = shape
    x_dtype = torch.uint8 if normalization else dtype
    x = torch.empty(capacity, in_features, dtype=x_dtype)
    weight = torch.empty(out_features, in_features, dtype=dtype)
    bias = torch.empty(out_features, dtype=dtype)
    out = torch.empty(capacity, out_features, dtype=dtype)
    for provider in linear_providers(x.device, x_dtype, capacity, out_features, in_features):
        if provider != "cublas":
            linear(
                x, weight, bias, activation=activation, residual=out if residual else None,
                num_rows=torch.empty(1, dtype=torch.int32), out=out, normalization=normalization,
                provider=provider,
            )  # fmt: skip


def core() -> None:
    """What a tower in bf16 launches of the portable kernels, for small and for large capacities:
    add new kernels here."""
    row_kernels(64, 4, hidden=1152, head_dim=72)
    for one in LAYERS:
        for capacity in (64, 6144):
            layer(one, torch.bfloat16, capacity)
    for head_dim in (64, 72):
        for rows in (64, 4096):
            attention_of(rows, head_dim, torch.bfloat16)


def every_dtype() -> None:
    """The other dtypes and sizes of the portable kernels: add new kernels here."""
    from vitgraph.kernels.linear_triton import PixelNormalization

    for dtype in DTYPES:
        row_kernels(64, 4, hidden=1024, head_dim=64, dtype=dtype)
        row_kernels(64, 4, hidden=1152, head_dim=72, dtype=dtype)
    row_kernels(64, 256, hidden=1280, head_dim=80)
    half = PixelNormalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    layer((1152, 1536, None, False), torch.bfloat16, 6144, half)
    for one in LAYERS:
        layer(one, torch.bfloat16, 256)  # a row of the table of its own, where it has so many
    for one in LAYERS[2:5]:  # each activation
        layer(one, torch.float16, 6144)
    layer(LAYERS[2], torch.float32, 6144)
    for dtype in (torch.float32, torch.float16):
        attention_of(4096, 72, dtype)


def attention_of(rows: int, head_dim: int, dtype: torch.dtype, config: Any = None) -> None:
    """Attention with its table, as the architecture chooses or as `config` says."""
    from vitgraph.kernels.attention import attention, attention_schedule

    qkv = torch.empty(rows, 3, HEADS, head_dim, dtype=dtype)
    cu_seqlens = torch.zeros(3, dtype=torch.int32)
    schedule = attention_schedule(cu_seqlens, rows, HEADS, config) if config else None
    attention(qkv, cu_seqlens, schedule=schedule)
    if schedule is not None:  # of one rank's share
        queries = torch.zeros(2, dtype=torch.int32)
        attention_schedule(cu_seqlens, rows, HEADS, config, queries=queries)


def hopper() -> None:
    """The Hopper tier's attention; its linear is among the providers of `core`."""
    from vitgraph.kernels.sm90.attention import CONFIGS

    for config in CONFIGS.values():
        for head_dim in (64, 72):
            attention_of(256, head_dim, torch.bfloat16, config)
        attention_of(256, 72, torch.float16, config)


def fp8(dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> None:
    """What an FP8 tower launches besides: the 8B and the 2B one, small and large capacities."""
    from vitgraph.kernels.fp8.linear_fp8 import linear_fp8, scales_of
    from vitgraph.kernels.fp8.quantize import E4M3, QuantizedLinear, quantize
    from vitgraph.kernels.layer_norm import layer_norm_e4m3

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def one(rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        expands, reduces = out_features > 3 * in_features, out_features < in_features
        parts = empty(out_features, in_features, dtype=E4M3), *torch.empty(2, out_features)
        out = empty(rows, out_features, dtype=E4M3 if expands else dtype)
        linear_fp8(
            empty(rows, in_features, dtype=E4M3),
            scales_of(rows, in_features, out.device) if reduces else 0.1,
            QuantizedLinear(*parts),
            activation="gelu_tanh" if expands else None,
            residual=out if reduces else None,
            num_rows=empty(1, dtype=torch.int32),
            out=out,
            out_scale=scales_of(rows, out_features, out.device) if expands else None,
        )

    for hidden, inner in ((1152, 4304), (1024, 4096)):
        for dtype in dtypes:
            rows, count = empty(64, hidden, dtype=dtype), empty(1, dtype=torch.int32)
            for added in (None, rows):
                layer_norm_e4m3(rows, num_rows=count, added=added)
            norm = empty(hidden, dtype=dtype), empty(hidden, dtype=dtype)
            for shape in ((3 * hidden, hidden), (inner, hidden), (hidden, inner)):
                weight, bias = empty(*shape, dtype=dtype), empty(shape[0], dtype=dtype)
                quantize(weight, bias, *(norm if shape[1] == hidden else ()))
                for rows in (64, 6144):
                    one(rows, *shape, dtype)


def fp8_every_dtype() -> None:
    """The same around layers of other dtypes."""
    fp8(DTYPES)


def many_batches() -> None:
    """One model, one dtype, batches of all sizes: 1 and multiples of 16 are what Triton singles
    out."""
    for rows in (4, 16, 36, 64, 1024, 1028):
        for slots in (1, 3, 16, 64):
            row_kernels(rows, slots, hidden=1152, head_dim=72)


def many_capacities() -> None:
    """One layer for many row counts."""
    for capacity in (513, 1024, 4000, 6144, 16384, 30001):
        layer(LAYERS[3], torch.bfloat16, capacity)


def main(arch: str, group: str) -> None:
    """Print the kernels of a group as JSON."""
    from vitgraph.bench.offline import compiling_for

    # Under Triton 3.9 a launch that leaves `enable_fp_fusion` open warns, and 3.10 turns it off.
    warnings.simplefilter("error")
    with compiling_for(arch) as kernels:
        globals()[group]()
    rows = [
        {
            "name": kernel.name,
            "registers": kernel.registers,
            "stack_bytes": kernel.stack_bytes,
            "shared_bytes": kernel.shared_bytes,
            # The only kernel that gives a wgmma an operand in registers.
            "hazards": _hazards(kernel.cubin) if "attention_sm90" in kernel.name else [],
        }
        for kernel in kernels
    ]
    json.dump(rows, sys.stdout)


def _hazards(cubin: bytes) -> list[str] | None:
    """None where no nvdisasm at hand follows registers in code of this ptxas."""
    sys.path.insert(0, str(Path(__file__).parent))
    from wgmma_hazard import disassemble, find_hazards

    for nvdisasm in _disassemblers():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            try:
                return find_hazards(disassemble(nvdisasm, file.name))
            except subprocess.CalledProcessError:  # of another CUDA than ptxas
                continue
    return None


def _disassemblers() -> list[Path]:
    """The one of this Triton first, then those of the other releases."""
    import triton

    own = Path(triton.__file__).parent
    homes = [own, *(folder / "triton" for folder in sorted(cache().glob("3.*")))]
    return [home / "backends/nvidia/bin/nvdisasm" for home in homes]


if __name__ == "__main__":
    main(*sys.argv[1:])
