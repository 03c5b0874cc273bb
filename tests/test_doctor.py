"""`vitgraph doctor`, line by line, and where things are broken."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton
from rich.console import Console

from vitgraph.encoder.attention import backends
from vitgraph.encoder.attention.trial import LEAKS, Capability
from vitgraph.graphs.cli import doctor
from vitgraph.graphs.vllm_plugin import metrics, report
from vitgraph.kernels import launch


def test_attention_table(monkeypatch) -> None:
    """Backend, package, dtypes that work here, and why the others do not."""

    def capabilities(heads, device):
        half = heads.dtype != torch.float32
        needs = "" if half else "needs CUDA and bf16 or fp16"
        missing = "not installed" if half else needs
        no_fp16 = "no fp16" if heads.dtype == torch.float16 else needs
        return [
            Capability("triton", "vitgraph", True),
            Capability("flash_attn", "fa3-fwd", not no_fp16, no_fp16 or LEAKS, isolates=False),
            Capability("flash_attn", "torch", half, needs),
            Capability("flashinfer", "flashinfer-python", False, missing),
        ]

    monkeypatch.setattr(backends, "capabilities", capabilities)
    assert list(doctor.attention()) == [
        ("triton", "vitgraph", "bfloat16, float16, float32", ""),
        ("flash_attn", "fa3-fwd", "bfloat16", LEAKS),
        ("flash_attn", "torch", "bfloat16, float16", ""),
        ("flashinfer", "flashinfer-python", "no", "not installed"),
    ]


@pytest.fixture
def releases(monkeypatch):
    """Sets what is tested, and which triton this is."""

    def choose(release: str) -> None:
        monkeypatch.setattr(launch, "GLUON_RELEASES", ("3.6.", "3.7."))
        monkeypatch.setattr(triton, "__version__", release)

    return choose


@pytest.mark.parametrize(
    ("release", "line"),
    [
        ("3.7.1", "tested with triton 3.7.1; used on compute capability 9.0"),
        ("3.10.0", "triton 3.10.0 is untested: tried on first use on a Hopper GPU"),
    ],
)
def test_tier_of_this_triton(release, line, releases) -> None:
    releases(release)
    assert doctor.hopper() == line


def test_a_triton_without_gluon(releases, monkeypatch) -> None:
    releases("3.2.0")
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    assert doctor.hopper() == "triton 3.2.0 has no Gluon: the portable tier serves everywhere"


@pytest.fixture
def gpus(monkeypatch):
    """GPUs by compute capability; the third one is broken."""
    found = [("H200", 9, 0), ("RTX 4090", 8, 9), ("lost", 9, 0)]

    def properties(index: int) -> SimpleNamespace:
        name, major, minor = found[index]
        if name == "lost":
            raise RuntimeError("GPU is lost")
        return SimpleNamespace(name=name, major=major, minor=minor, total_memory=24 * 2**30)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: found[i][1:])


@pytest.mark.parametrize("reason", [None, "its trial failed"])
def test_devices(gpus, reason, monkeypatch) -> None:
    monkeypatch.setattr(launch, "hopper_tier_unavailable", lambda device: reason)
    cpu, hopper, ada, lost = doctor.devices()
    served = f"portable tier: {reason}" if reason else "Hopper tier"
    assert (cpu[0], cpu[2]) == ("cpu", "torch")
    assert hopper == ("cuda:0", "H200, compute capability 9.0, 24 GiB", served)
    other = "portable tier: the Hopper tier is for compute capability 9.0, not 8.9"
    assert ada == ("cuda:1", "RTX 4090, compute capability 8.9, 24 GiB", other)
    assert lost[1] == "unknown: RuntimeError: GPU is lost"


def test_graphs(monkeypatch) -> None:
    for available, line in [
        (True, "captured and replayed"),
        (False, "torch sees no CUDA GPU; the same packs run without capture"),
    ]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda answer=available: answer)
        assert doctor.graphs() == line


@pytest.mark.parametrize(
    ("used", "recorded", "said"),
    [
        ("2.14.0+cu130", "2.14.0", "2.14.0+cu130"),
        ("2.14.0", "2.13.0", "2.14.0 (its metadata says 2.13.0)"),
        ("2.14.0", None, "2.14.0"),
        (None, "2.13.0", "2.13.0"),
        (None, None, "-"),
    ],
)
def test_versions_are_those_of_the_modules_in_use(used, recorded, said, monkeypatch) -> None:
    """Another copy of a package may come first on the path: the metadata of one beside it lies."""

    def metadata(distribution: str) -> str:
        if recorded is None:
            raise doctor.PackageNotFoundError(distribution)
        return recorded

    monkeypatch.setattr(doctor, "version", metadata)
    if used is None:
        monkeypatch.delitem(sys.modules, "package", raising=False)
    else:
        module = ModuleType("package")
        module.__version__ = used
        monkeypatch.setitem(sys.modules, "package", module)
    assert doctor.version_of("a-package", "package") == said


def test_installed() -> None:
    rows = dict(doctor.installed())
    assert rows["torch"] == torch.__version__
    assert rows["triton"] == triton.__version__
    assert rows["python"] == sys.version.split()[0]


@pytest.mark.parametrize(
    ("names", "plugins", "disabled", "reason"),
    [
        (["vitgraph"], None, "0", None),
        (["vitgraph"], "vitgraph", "0", None),
        (["vitgraph"], "a,vitgraph", "0", None),
        (["vitgraph"], "a, vitgraph", "0", "VLLM_PLUGINS='a, vitgraph' does not name vitgraph"),
        (["vitgraph"], "", "0", "VLLM_PLUGINS='' does not name vitgraph"),
        (["vitgraph"], None, "1", "VITGRAPH_DISABLE is set"),
        ([], None, "0", "the plugin's entry point is not installed"),
    ],
)
def test_what_keeps_vllm_from_the_plugin(names, plugins, disabled, reason, monkeypatch) -> None:
    entries = [SimpleNamespace(name=name, value=report.PLUGIN) for name in names]
    other = SimpleNamespace(name="a", value="a:register")
    monkeypatch.setattr(report, "entry_points", lambda group: [other, *entries])
    monkeypatch.setenv("VITGRAPH_DISABLE", disabled)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    assert report.why_not_loaded() == reason


def test_a_vllm_that_is_broken(monkeypatch) -> None:
    """Imported, it has no version, no registry, no models."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(metrics, "publish", lambda: None)
    monkeypatch.setattr(report, "why_not_loaded", lambda: None)
    lines = report.report()
    assert lines["vLLM"].startswith("AttributeError: ")
    assert lines["tower"].startswith("vLLM's own: ImportError: ")
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert report.report() == {"vLLM": "not installed"}


def test_metrics_without_prometheus_client(monkeypatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert report._metrics() == "none: prometheus_client is not installed"


def test_a_section_that_fails_is_a_line(capsys) -> None:
    """Errors and names may hold what looks like markup, even a wrong one."""

    def rows():
        yield "[/red]", "[bold]x"
        raise RuntimeError("[/broken]")

    doctor._section(Console(width=100), "devices", ("one", "two"), rows)
    printed = capsys.readouterr().out
    assert "devices: unknown: RuntimeError: [/broken]" in printed
    assert "[/red]" in printed
    assert "[bold]x" in printed


@pytest.mark.parametrize("broken", ["torch", "triton", "transformers", "numpy", "vitgraph.encoder"])
def test_it_never_crashes(broken) -> None:
    """A module that cannot be imported: what does not need it is said all the same."""
    code = (
        f"import sys; sys.modules[{broken!r}] = None; "
        "from vitgraph.graphs.cli.main import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Hopper tier: " in done.stdout
    assert "python" in done.stdout
    if broken in ("torch", "triton"):
        assert "unknown: " in done.stdout
