"""Every row of the tile table compiles for its GPUs without one and spills nothing; the number of
rows is specialised on nowhere. (One compiling process an architecture, as in test_compile.py.)"""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# (out, in) features and epilogue: qkv, projection, fc1, fc2, the mergers
LAYERS = [
    (3456, 1152, None, False),
    (1152, 1152, None, True),
    (4304, 1152, "gelu_tanh", False),
    (1152, 4304, None, True),
    (4608, 4608, "gelu", False),
    (4096, 4608, None, False),
]


def launch_layer(layer, dtype, capacity, normalization=None):
    """With every provider of ours."""
    from vitgraph.kernels.linear import linear, linear_providers

    out_features, in_features, activation, residual = layer
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


def launch_table() -> None:
    from vitgraph.kernels.linear_triton import PixelNormalization

    half = PixelNormalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    launch_layer((1152, 1536, None, False), torch.bfloat16, 6144, half)
    for layer in LAYERS:
        for capacity in (64, 256, 6144):  # a row of the table each, where it has so many
            launch_layer(layer, torch.bfloat16, capacity)
    for layer in LAYERS[2:5]:  # each activation
        launch_layer(layer, torch.float16, 6144)
    launch_layer(LAYERS[2], torch.float32, 6144)


def launch_many_capacities() -> None:
    for capacity in (513, 1024, 4000, 6144, 16384, 30001):
        launch_layer(LAYERS[3], torch.bfloat16, capacity)


@functools.cache
def compiled(arch: str, launches: str) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, arch, launches]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_spills(arch):
    kernels = compiled(arch, "launch_table")
    assert len(kernels) >= 17
    assert [k for k in kernels if k["stack_bytes"]] == []


def test_hopper_tier_is_offered():
    import triton

    from vitgraph.kernels.launch import GLUON_RELEASES

    if not triton.__version__.startswith(GLUON_RELEASES):
        pytest.skip(f"Gluon was not tested with Triton {triton.__version__}")
    names = {k["name"] for k in compiled("sm_90", "launch_table")}
    assert names == {"linear_kernel", "linear_sm90_kernel"}


def test_capacities_are_not_specialised():
    kernels = compiled("sm_90", "launch_many_capacities")
    assert len({k["name"] for k in kernels}) == len(kernels)


if __name__ == "__main__":
    from dataclasses import asdict

    from vitgraph.kernels.offline import compiling_for

    with compiling_for(sys.argv[1]) as kernels:
        globals()[sys.argv[2]]()
    json.dump([{k: v for k, v in asdict(x).items() if k != "cubin"} for x in kernels], sys.stdout)
