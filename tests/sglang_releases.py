"""Run the plugin against the Python of real SGLang releases, on a machine without a GPU.

    python tests/sglang_releases.py [RELEASE ...]        all of them by default, engines included

A release's wheel is downloaded, its *.py files are kept outside the repository
(VITGRAPH_SGLANG_CACHE, ~/.cache/vitgraph/sglang by default) and the rest is deleted. SGLang then
runs as it is, on the CPU and without its compiled kernels: model classes, layers, loader, registry
and hooks, and in an engine all its processes.
"""

import os
import subprocess
import sys
import tempfile
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RELEASES = ("0.5.16", "0.5.23")
CI_RELEASES = ("0.5.23",)

# What SGLang imports; torchvision is the release that belongs to the torch of the tests.
PACKAGES = """
    aiohappyeyeballs aiohttp aiosignal annotated-doc annotated-types apache-tvm-ffi attrs
    charset-normalizer compressed-tensors dill distro einops fastapi frozenlist gguf jiter
    loguru msgspec multidict openai==2.8.0 opentelemetry-api orjson partial_json_parser
    propcache psutil pybase64 pydantic pydantic-core pyzmq requests sentencepiece setproctitle
    sniffio starlette torchvision==0.28.0 typing-inspection urllib3 uvicorn uvloop watchfiles
    xgrammar yarl
"""
ENGINE_PACKAGES = "decord"  # reads video files
# What the tests have is too new for it.
TRANSFORMERS = {"0.5.16": "transformers==5.12.1 tokenizers==0.22.1"}
# Imported on a CPU and never called: a kernel, and what notebooks show.
STAND_INS = {
    "vllm": (),
    "vllm._custom_ops": ("rotary_embedding",),
    "IPython": (),
    "IPython.display": ("HTML", "display"),
}
TESTS = Path(__file__).parent


def cache() -> Path:
    """Where releases are kept."""
    return Path(os.environ.get("VITGRAPH_SGLANG_CACHE", "~/.cache/vitgraph/sglang")).expanduser()


def is_cached(release: str) -> bool:
    """Whether the contract of a release can be run without a download."""
    return (cache() / release).exists() and (cache() / "packages").exists()


def fetch(release: str, engine: bool = False) -> list[Path]:
    """Folders of a release's Python and of the packages it needs.

    Raises:
        OSError: pip could not download, with the end of what it said.
    """
    wanted = {cache() / "packages": PACKAGES, cache() / release: f"sglang=={release}"}
    if release in TRANSFORMERS:
        wanted[cache() / f"{release}-transformers"] = TRANSFORMERS[release]
    if engine:
        wanted[cache() / "engine"] = ENGINE_PACKAGES
    with ThreadPoolExecutor() as pool:
        list(pool.map(_fetch, *zip(*wanted.items(), strict=True)))
    return list(wanted)


def _fetch(folder: Path, names: str) -> None:
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        download = _fetch_wheel if names.startswith("sglang==") else _fetch_packages
        download(Path(work), *names.split())
        (Path(work) / "kept").rename(folder)


def _fetch_packages(work: Path, *names: str) -> None:
    _pip("install", "--no-deps", "--no-compile", "--target", str(work / "kept"), *names)


def _fetch_wheel(work: Path, wanted: str) -> None:
    _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(work), wanted)
    (wheel,) = work.glob("sglang-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        kept = (".py", ".cuh", ".dist-info/METADATA")  # the folders of headers are looked for
        archive.extractall(work / "kept", [n for n in archive.namelist() if n.endswith(kept)])


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"pip {arguments[0]} failed: {done.stderr.strip()[-500:]}")


def run(release: str, *pytest_arguments: str, engine: bool = False) -> int:
    """Run the tests against a release, in a process of its own."""
    folders = [TESTS / "sglang_site", *fetch(release, engine), TESTS]
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes a minute, and the tower is tiny
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    names = ["contract", *(["engine"] if engine else [])]
    files = [str(TESTS / f"sglang_{name}.py") for name in names]
    command = [sys.executable, "-m", "pytest", *files, *pytest_arguments]
    return subprocess.run(command, env=environment, cwd=TESTS.parent).returncode


def install() -> None:
    """Make `import sglang` work in this process, before it is imported: stand-ins for what is
    compiled."""
    import torch

    boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms"):  # compiled for another torch
        torch.library.define(f"torchvision::{name}", boxes)
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # there is nothing to copy it to
    for name, contents in STAND_INS.items():
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(dict.fromkeys(contents))


def main() -> int:
    """Returns the number of releases that failed."""
    failed = []
    for release in sys.argv[1:] or RELEASES:
        print(f"SGLang {release}", flush=True)
        if run(release, "-q", engine=True):
            failed.append(release)
    print(f"failed: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
