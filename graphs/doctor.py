"""`vitgraph doctor`: what is installed, what works on this machine, and why not."""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

from vitgraph.encoder.attention import DTYPES, capabilities
from vitgraph.encoder.attention_trial import Capability, Heads
from vitgraph.graphs.vllm_plugin.report import report
from vitgraph.kernels.launch import hopper_tier_unavailable

NUM_HEADS, HEAD_DIM = 16, 72  # of the large towers
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
PACKAGES = (
    "vitgraph",
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "huggingface_hub",
    "vllm",
    "flash-attn",
    "flash-attn-4",
    "fa3-fwd",
    "flashinfer-python",
    "nvidia-cudnn-frontend",
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

    console.print(_attention(torch.device("cuda" if torch.cuda.is_available() else "cpu")), "")
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


def _attention(device: torch.device) -> Table:
    """Providers of each attention backend: the dtypes they serve on a device, or why none."""
    title = f"attention on {device}, heads of {HEAD_DIM}"
    table = Table("backend", "provider", "works here", "remarks", title=title, box=None)
    table.title_justify = "left"
    by_dtype = [capabilities(Heads(NUM_HEADS, HEAD_DIM, dtype), device) for dtype in DTYPES]
    for answers in zip(*by_dtype, strict=True):
        table.add_row(answers[0].backend, answers[0].provider, *_serves(answers))
    return table


def _serves(answers: Sequence[Capability]) -> tuple[str, str]:
    """What one provider answers for `DTYPES`: those it serves, and a remark or the reasons."""
    served = [name for answer, name in zip(answers, DTYPE_NAMES, strict=True) if answer.ok]
    remarks = dict.fromkeys(a.reason for a in answers if a.ok == bool(served) and a.reason)
    if served:
        return ", ".join(served), "; ".join(remarks)
    return "no", next(iter(remarks))


def _hopper() -> str:
    """Whether the Gluon kernels serve here, or why not."""
    if not torch.cuda.is_available():
        return "no: torch sees no CUDA GPU"
    reason = hopper_tier_unavailable(torch.device("cuda", torch.cuda.current_device()))
    return f"no: {reason}; portable kernels serve" if reason else "yes"


def _graphs() -> str:
    if torch.cuda.is_available():
        return "captured and replayed"
    return "torch sees no CUDA GPU; the same packs run without capture"
