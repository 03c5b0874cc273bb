"""Shared by all tests: Triton's interpreter where there is no GPU, seeded random numbers, the error
bound of a kernel, and a tiny tower in transformers and in vitgraph with the same weights."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():  # before any kernel module is imported
    os.environ["TRITON_INTERPRET"] = "1"

from vitgraph.encoder import GEOMETRIES, Qwen3VLVisionEncoder
from vitgraph.kernels.fp8 import quantize


def _mend_e4m3() -> None:
    """Triton's interpreter truncates where GPUs round to e4m3, and knows no NaN in it, up to 3.9 at
    least: torch converts instead."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    bits = {tl.float16: (torch.float16, np.uint16), tl.float32: (torch.float32, np.uint32)}
    convert = interpreter._convert_float

    def mended(data, source, target, rounding):
        if tl.float8e4nv not in (source, target) or not {source, target} & bits.keys():
            return convert(data, source, target, rounding)
        data = torch.from_numpy(np.array(data, order="C"))
        if target == tl.float8e4nv:
            values = data.view(bits[source][0]).float().clamp(-448, 448).to(torch.float8_e4m3fn)
            return values.view(torch.uint8).numpy()
        dtype, unsigned = bits[target]
        return data.view(torch.float8_e4m3fn).to(dtype).numpy().view(unsigned)

    interpreter._convert_float = mended


if os.environ.get("TRITON_INTERPRET") == "1":
    _mend_e4m3()
    quantize.INTERPRETER_IS_MENDED = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def fp8_of_any_size(monkeypatch) -> None:
    """Batches of tests are small."""
    monkeypatch.setattr(Qwen3VLVisionEncoder, "fp8_min_patches", 0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny work: on a busy machine, threads that wait for each other take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def rng(device: torch.device) -> torch.Generator:
    """Seeded generator on `device`."""
    return torch.Generator(device).manual_seed(0)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` returns NaN (the smallest integer, for integers): what a kernel leaves
    unwritten shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs) -> Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).min)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def assert_as_exact_as() -> Callable[..., None]:
    """The error of a kernel against the truth, bounded by torch's own in the same dtype.

    Called as (actual, torch_result, truth, factor=1.1), each [rows, ...]: the maximum, the root
    mean square, and the relative error of the worst row are compared. Rows that are wrong among
    thousands that are right show in the last only; it may be `ROW_FACTOR` times torch's.
    """

    def check(actual: Tensor, torch_result: Tensor, truth: Tensor, factor: float = 1.1) -> None:
        assert actual.shape == torch_result.shape == truth.shape
        truth = truth.double()
        ours, theirs = ((x.double() - truth).abs() for x in (actual, torch_result))
        # Where torch happens to be exact, half a unit in the last place is still rounding; in
        # float32 the order of a sum is worth a few.
        slack = torch.finfo(actual.dtype).eps * (4 if actual.dtype == torch.float32 else 0.5)
        sizes = truth.flatten(1).norm(dim=1)
        # a row of zeros, or nearly, is measured by its neighbours
        sizes = sizes.clamp_min(1e-3 * _rms(sizes)).clamp_min(torch.finfo(truth.dtype).tiny)

        def worst_row(x: Tensor) -> Tensor:
            return (x.flatten(1).norm(dim=1) / sizes).amax()

        for name, norm, times, size in (
            ("maximum", _maximum, factor, _maximum(truth)),
            ("rms", _rms, factor, _rms(truth)),
            ("worst row", worst_row, ROW_FACTOR * factor, 1.0),
        ):
            bound = times * norm(theirs) + slack * size
            assert norm(ours) <= bound, f"{name} error {norm(ours):.3g}, bound {bound:.3g}"

    return check


ROW_FACTOR = 4


def _maximum(x: Tensor) -> Tensor:
    return x.abs().amax()


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


TINY = GEOMETRIES["tiny"].to_dict()


def make_reference(device: str = "cpu", **geometry) -> torch.nn.Module:
    """transformers' tower with every parameter random, biases and norms included."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3VLVisionModel(Qwen3VLVisionConfig(**(geometry or TINY))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.05)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model


def reference_rows(model: torch.nn.Module, pixels: torch.Tensor, grids) -> torch.Tensor:
    """transformers' output in vitgraph's form: merger and levels side by side."""
    with torch.no_grad():
        output = model(
            pixels.to(model.dtype), torch.tensor(grids, dtype=torch.int64, device=pixels.device)
        )
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)


def patches_of(grids) -> int:
    """Pixel rows of a batch."""
    return sum(t * h * w for t, h, w in grids)


@pytest.fixture(scope="session")
def reference() -> torch.nn.Module:
    """transformers' tiny tower, float32, CPU."""
    return make_reference()


@pytest.fixture(scope="session")
def tools():
    """The helpers above, for tests that cannot import this file under importlib mode."""
    return SimpleNamespace(
        make_reference=make_reference,
        reference_rows=reference_rows,
        patches_of=patches_of,
        tiny=TINY,
    )


@pytest.fixture(scope="session")
def encoder(reference):
    """Our tiny tower with the reference's weights."""
    from vitgraph.encoder import Qwen3VLVisionEncoder

    return Qwen3VLVisionEncoder.from_transformers(reference)


@pytest.fixture
def batch():
    """Random pixels for grids, fresh each call."""

    def make(grids, *, device="cpu", dtype=torch.float32) -> dict:
        pixels = torch.randn(patches_of(grids), 1536, device=device).to(dtype)
        return {"pixel_values": pixels, "image_grid_thw": grids}

    return make


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, str | None]]]:
    """What went wrong with the cases of a test file, by world size, rank and case (ranks.py)."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, Path(__file__).with_name("ranks.py"), request.path, folder]
    subprocess.run(command, env=environment, timeout=300, check=True)
    return {
        int(world.name): [json.loads(path.read_text()) for path in sorted(world.glob("*.json"))]
        for world in folder.iterdir()
        if world.is_dir()
    }
