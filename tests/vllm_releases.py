"""Run the plugin against the Python of real vLLM releases, on a machine without a GPU.

    python tests/vllm_releases.py [RELEASE ...]        all of them by default

A release's wheel is downloaded, its *.py files are kept outside the repository
(VITGRAPH_VLLM_CACHE, ~/.cache/vitgraph/vllm by default) and the rest is deleted. vLLM then runs as
it is: its model classes, towers, loader, registry and graph manager. Not there are its compiled
extensions, the language model and the packages in `ABSENT`: the vision path calls none of them.
"""

import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

RELEASES = ("0.20.2", "0.22.1", "0.23.0", "0.26.0", "0.29.0", "0.33.0")
CI_RELEASES = ("0.26.0", "0.33.0")

# What vLLM needs to be imported and to build its configuration; any recent version.
PACKAGES = """
    annotated-types cachetools cbor2 cloudpickle einops msgspec psutil pydantic pydantic-core
    typing-inspection
"""
# Imported by vLLM, never used on the way to a vision tower.
ABSENT = """
    aiohttp anthropic blake3 compressed_tensors cpuinfo cv2 depyf distro fastapi gguf httpx
    httpx2 ijson jsonschema lark llguidance mcp mistral_common openai openai_harmony opentelemetry
    outlines_core partial_json_parser pybase64 pythonjsonlogger requests setproctitle sniffio
    starlette tiktoken torchvision tvm_ffi urllib3 uvicorn uvloop watchfiles xgrammar zmq
"""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 28, 31, 34, 35)]


def cache() -> Path:
    """Where releases are kept."""
    return Path(os.environ.get("VITGRAPH_VLLM_CACHE", "~/.cache/vitgraph/vllm")).expanduser()


def is_cached(release: str) -> bool:
    """Whether a release can be run without a download."""
    return (cache() / release).exists() and (cache() / "packages").exists()


def fetch(release: str) -> tuple[Path, Path]:
    """Folders of a release's Python and of the packages it needs.

    Raises:
        OSError: pip could not download, with the end of what it said.
    """
    source, packages = cache() / release, cache() / "packages"
    for folder, download in ((packages, _fetch_packages), (source, _fetch_wheel)):
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as work:
                download(Path(work), release)
                (Path(work) / "kept").rename(folder)
    return source, packages


def _fetch_packages(work: Path, release: str) -> None:
    _pip("install", "--no-deps", "--target", str(work / "kept"), *PACKAGES.split())


def _fetch_wheel(work: Path, release: str) -> None:
    arguments = [argument for name in PLATFORMS for argument in ("--platform", name)]
    _pip(
        *("download", "--no-deps", "--only-binary", ":all:", "--python-version", "3.12"),
        *(*arguments, "--dest", str(work), f"vllm=={release}"),
    )
    (wheel,) = work.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith((".py", ".dist-info/METADATA"))]
        archive.extractall(work / "kept", names)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"pip {arguments[0]} failed: {done.stderr.strip()[-500:]}")


def run(release: str, *pytest_arguments: str) -> int:
    """Run the contract tests against a release, in a process of its own."""
    source, packages = fetch(release)
    tests = Path(__file__).parent
    path = [str(source), str(packages), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",  # the tower is tiny, and threads that wait would spin
        "HF_HUB_OFFLINE": "1",
    }
    names = ("contract", "modes", "fp8", "quantized", "metrics", "bench")
    files = (str(tests / f"vllm_{name}.py") for name in names)
    command = [sys.executable, "-m", "pytest", "-p", "vllm_harness", *files, *pytest_arguments]
    return subprocess.run(command, env=environment, cwd=tests.parent).returncode


class _Names(type):
    """Attributes of a stand-in class are their own names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(types.ModuleType):
    """A module whose every attribute is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def schema(*_: object) -> object:
            from pydantic_core import core_schema

            return core_schema.any_schema()

        return _Names(name, (), {"__get_pydantic_core_schema__": classmethod(schema)})


class _AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ABSENT.split():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Make `import vllm` work in this process: absent packages, the CPU as platform, no pinned
    memory. Call it before vLLM is imported."""
    import torch
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # remembered: transformers is not to see the stand-in
    sys.meta_path.append(_AbsentPackages())

    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    import vllm.model_executor.models.qwen3_vl_moe
    import vllm.v1.worker.encoder_cudagraph

    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    for module in list(_vllm_modules()):
        if "PIN_MEMORY" in vars(module):
            module.PIN_MEMORY = False


def _vllm_modules() -> Iterator[types.ModuleType]:
    return (m for name, m in sys.modules.items() if name.partition(".")[0] == "vllm" and m)


def main() -> int:
    """Returns the number of releases that failed."""
    failed = []
    for release in sys.argv[1:] or RELEASES:
        print(f"vLLM {release}", flush=True)
        if run(release, "-q"):
            failed.append(release)
    print(f"failed: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
