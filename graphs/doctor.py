"""`vitgraph doctor`: what is installed, what works on this machine, and why not."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

from vitgraph.encoder.attention import BACKENDS, resolve_backend
from vitgraph.graphs.vllm_plugin.report import report

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

    backends = Table("backend", "device", "serves", title="attention", box=None)
    backends.title_justify = "left"
    for backend in BACKENDS:
        for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
            backends.add_row(backend, device, _serves(backend, device))
    console.print(backends, "")
    console.print(f"Hopper tier of the kernels: {_hopper()}", highlight=False)
    console.print(f"graphs: {_graphs()}", "", sep="\n", highlight=False)
    plugin = Table(title="vLLM", title_justify="left", box=None, show_header=False)
    for name, value in report().items():
        plugin.add_row(name, value)
    console.print(plugin)
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _serves(backend: str, device: str) -> str:
    """The dtypes a backend serves on a device, or why it serves none."""
    served, reason = [], ""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        try:
            resolve_backend(backend, torch.device(device), dtype)
            served.append(str(dtype).removeprefix("torch."))
        except ValueError as error:
            reason = str(error)
    if not served:
        return f"no: {reason}"
    return ", ".join(served) + (" (eagerly)" if backend == "sdpa" else "")


def _hopper() -> str:
    """Whether the Gluon kernels serve here, or why not."""
    import triton

    from vitgraph.kernels.linear import HOPPER_TRITON_RELEASES

    if not triton.__version__.startswith(HOPPER_TRITON_RELEASES):
        tested = ", ".join(f"{release}x" for release in HOPPER_TRITON_RELEASES)
        return f"no: tested with triton {tested}, this is {triton.__version__}; portable kernels"
    if not torch.cuda.is_available():
        return "no: torch sees no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"no: compute capability {capability} is not (9, 0); portable kernels serve"
    return "yes"


def _graphs() -> str:
    if torch.cuda.is_available():
        return "captured and replayed"
    return "torch sees no CUDA GPU; the same packs run without capture"
