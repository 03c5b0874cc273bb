"""`vitgraph doctor`: what works on this machine, why not, and what is installed.

It is called where something is broken: nothing is imported before the line that needs it, and a
line that cannot be answered says what went wrong.
"""

import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from vitgraph.encoder.attention.trial import Capability

NUM_HEADS, HEAD_DIM = 16, 72  # of the large towers
HOPPER = (9, 0)
MODULES = {  # distribution -> what it is imported as
    "vitgraph": "vitgraph",
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "huggingface_hub": "huggingface_hub",
    "vllm": "vllm",
    "sglang": "sglang",
    "flash-attn": "flash_attn",
    "flash-attn-4": "flash_attn.cute",
    "fa3-fwd": "fa3_fwd_interface",
    "flashinfer-python": "flashinfer",
    "nvidia-cudnn-frontend": "cudnn",
    "prometheus-client": "prometheus_client",
    "av": "av",
}
Rows = Iterable[Sequence[str]]


def doctor(console: Console) -> int:
    """Print what was found; the exit status is always 0."""
    _section(console, "devices", ("device", "what", "kernels"), devices)
    title = f"attention, heads of {HEAD_DIM}"
    _section(console, title, ("backend", "package", "works here", "remarks"), attention)
    console.print(f"Hopper tier: {attempt(hopper)}", highlight=False, markup=False)
    console.print(f"graphs: {attempt(graphs)}", "", sep="\n", highlight=False, markup=False)
    _section(console, "vLLM", (), vllm)
    _section(console, "SGLang", (), sglang)
    _section(console, "installed", ("package", "version"), installed)
    return 0


def attempt(find: Callable[[], Any]) -> str:
    """The result, or the error."""
    try:
        return str(find())
    except Exception as error:
        return f"unknown: {type(error).__name__}: {error}"


def _section(console: Console, title: str, header: Sequence[str], find: Callable[[], Rows]) -> None:
    table = Table(*header, title=title, title_justify="left", box=None, show_header=bool(header))
    try:
        for row in find():
            table.add_row(*map(Text, row))  # as text: what others write may look like markup
    except Exception as error:
        console.print(
            f"{title}: unknown: {type(error).__name__}: {error}", highlight=False, markup=False
        )
    console.print(table, "")


def devices() -> Rows:
    """The CPU and every GPU, with the kernels that serve there."""
    yield "cpu", platform.processor() or platform.machine(), "torch"
    import torch

    for index in range(torch.cuda.device_count()):
        yield f"cuda:{index}", attempt(partial(_gpu, index)), attempt(partial(tier, index))


def _gpu(index: int) -> str:
    import torch

    gpu = torch.cuda.get_device_properties(index)
    memory = gpu.total_memory / 2**30
    return f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {memory:.0f} GiB"


def tier(index: int) -> str:
    """Which of our kernels serve on a GPU."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) != HOPPER:
        return f"portable tier: the Hopper tier is for compute capability 9.0, not {major}.{minor}"
    from vitgraph.kernels.launch import hopper_tier_unavailable

    reason = hopper_tier_unavailable(torch.device("cuda", index))
    return f"portable tier: {reason}" if reason else "Hopper tier"


def gluon(release: str) -> Literal["tested", "tried", "absent"]:
    """What the Hopper tier, which is written in Gluon, is to a release of triton."""
    from vitgraph.kernels.launch import GLUON_RELEASES

    if release.startswith(GLUON_RELEASES):
        return "tested"
    try:
        import triton.experimental.gluon  # noqa: F401
    except ImportError:
        return "absent"
    return "tried"


def hopper() -> str:
    """Whether this triton has the Hopper tier tested, tried or not at all; needs no GPU."""
    import triton

    release = triton.__version__
    return {
        "tested": f"tested with triton {release}; used on compute capability 9.0",
        "tried": f"triton {release} is untested: tried on first use on a Hopper GPU",
        "absent": f"triton {release} has no Gluon: the portable tier serves everywhere",
    }[gluon(release)]


def graphs() -> str:
    """Whether CUDA graphs can be captured here."""
    import torch

    if torch.cuda.is_available():
        return "captured and replayed"
    return "torch sees no CUDA GPU; the same packs run without capture"


def attention() -> Rows:
    """Packages of each attention backend: the dtypes they serve here, or why none."""
    import torch

    from vitgraph.encoder.attention.backends import DTYPES, capabilities
    from vitgraph.encoder.attention.trial import Heads

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    by_dtype = [capabilities(Heads(NUM_HEADS, HEAD_DIM, dtype), device) for dtype in DTYPES]
    for answers in zip(*by_dtype, strict=True):
        yield answers[0].backend, answers[0].package, *_serves(answers, names)


def _serves(answers: Sequence["Capability"], names: Sequence[str]) -> tuple[str, str]:
    """What one package answers for each dtype: those it serves, and a remark or the reasons."""
    served = [name for answer, name in zip(answers, names, strict=True) if answer.ok]
    remarks = dict.fromkeys(a.reason for a in answers if a.ok == bool(served) and a.reason)
    if served:
        return ", ".join(served), "; ".join(remarks)
    return "no", next(iter(remarks))


def vllm() -> Rows:
    """Whether vLLM would use the plugin."""
    from vitgraph.graphs.vllm_plugin.report import report

    return report().items()


def sglang() -> Rows:
    """Whether SGLang would use the plugin."""
    from vitgraph.graphs.sglang_plugin.report import report

    return report().items()


def installed() -> Rows:
    """Versions, of the modules in use where they have been imported."""
    yield "python", platform.python_version()
    for distribution, module in MODULES.items():
        yield distribution, attempt(partial(version_of, distribution, module))


def version_of(distribution: str, module: str) -> str:
    """The imported module's version, and its metadata's where that is another; "-" for neither."""
    used = getattr(sys.modules.get(module), "__version__", None)
    try:
        recorded = version(distribution)
    except PackageNotFoundError:
        recorded = None
    if used and recorded and used.partition("+")[0] != recorded.partition("+")[0]:
        return f"{used} (its metadata says {recorded})"
    return used or recorded or "-"
