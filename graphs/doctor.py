"""`vitgraph doctor`: what is installed, what works on this machine, and why not."""

import platform
from importlib.metadata import PackageNotFoundError, entry_points, version

import torch
from rich.console import Console
from rich.table import Table

from vitgraph.encoder.attention import BACKENDS, resolve_backend

PACKAGES = (
    "vitgraph",
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "huggingface_hub",
    "vllm",
    "flash-attn",
    "fa3-fwd",
    "flashinfer-python",
    "av",
)


def doctor(console: Console) -> int:
    """Print three tables; the exit status is 0 as long as the CPU path works."""
    packages = Table("package", "version", title="installed", title_justify="left", box=None)
    packages.add_row("python", platform.python_version())
    for name in PACKAGES:
        packages.add_row(name, _version(name))
    console.print(packages, "")

    devices = Table("device", "what", title="devices", title_justify="left", box=None)
    devices.add_row("cpu", platform.processor() or platform.machine())
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        devices.add_row(
            f"cuda:{index}",
            f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, "
            f"{gpu.total_memory / 2**30:.0f} GiB",
        )
    console.print(devices, "")

    backends = Table("backend", "device", "dtype", "serves", title="attention", box=None)
    backends.title_justify = "left"
    names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for backend in BACKENDS:
        for device in names:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                backends.add_row(backend, device, str(dtype)[6:], _serves(backend, device, dtype))
    console.print(backends, "")
    console.print(f"graphs: {_graphs()}", f"vLLM: {_vllm()}", sep="\n", highlight=False)
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _serves(backend: str, device: str, dtype: torch.dtype) -> str:
    try:
        resolve_backend(backend, torch.device(device), dtype)
    except ValueError as error:
        return f"no: {error}"
    return "yes, eagerly" if backend == "sdpa" else "yes"


def _graphs() -> str:
    if torch.cuda.is_available():
        return "captured and replayed"
    return "torch sees no CUDA GPU; the same packs run without capture"


def _vllm() -> str:
    if _version("vllm") == "-":
        return "not installed"
    ours = [e for e in entry_points(group="vllm.general_plugins") if e.value.startswith("vitgraph")]
    if not ours:
        return (
            "installed, but this version of vitgraph has no plugin for it: vLLM's own tower serves"
        )
    return f"would load {ours[0].value}"
