"""What an installation puts where (README: nothing called kernels, encoder or graphs at the top
level).
"""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_kernels_has_no_init() -> None:
    """A regular package `kernels` on sys.path would shadow the one that transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("start", ["import sys; sys.path.insert(0, {root!r}); ", ""])
def test_transformers_imports_beside_the_repository(start) -> None:
    code = start.format(root=str(ROOT)) + "import transformers.models.qwen3_vl.modeling_qwen3_vl"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_importing_the_package_is_light(tmp_path) -> None:
    """No model library and no plotting at import, whatever of it is used."""
    code = (
        "import sys, vitgraph.graphs, vitgraph.graphs.media, vitgraph.encoder; "
        "assert all(getattr(vitgraph.graphs, name) for name in vitgraph.graphs.__all__); "
        "assert all(getattr(vitgraph.graphs.media, n) for n in vitgraph.graphs.media.__all__); "
        "heavy = {'transformers', 'vllm', 'matplotlib', 'av', 'ray'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_wheel_contents(wheel) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"vitgraph", f"vitgraph-{VERSION}.dist-info"}
    plugin = "graphs/vllm_plugin/models.py"
    for name in (
        "kernels/layout.py",
        "encoder/py.typed",
        "graphs/cli/photos/cat.jpg",
        plugin,
        "graphs/sglang_plugin/models.py",
        "encoder/attention/trial.py",
        "graphs/media/loader.py",
        "bench/systems.py",
        "__init__.py",
        "__main__.py",
    ):
        assert f"vitgraph/{name}" in names


def test_the_sdist_holds_what_its_tests_need(tmp_path) -> None:
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for folder in ("tests", "bench", "kernels", "encoder", "graphs", "top"):
        files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        kept = {path for path in files if not {"__pycache__"} & set(path.parts)}
        assert kept and not [path for path in kept if not (unpacked / path).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_readme.py"]
    environment = os.environ | {"PYTEST_ADDOPTS": "-p no:cacheprovider"}
    done = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_packages_are_a_namespace_without_top(tmp_path) -> None:
    """Links to the root folders in a folder `vitgraph` work without an installation."""
    (tmp_path / "vitgraph").mkdir()
    for package in ("kernels", "encoder", "graphs", "bench"):
        (tmp_path / "vitgraph" / package).symlink_to(ROOT / package)
    code = (
        "import vitgraph, vitgraph.kernels.layout, vitgraph.bench.systems; "
        "from vitgraph.graphs.cli.__main__ import main; "
        "assert vitgraph.__spec__.origin is None and not hasattr(vitgraph, '__version__'); "
        "main()"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code, "--version"]
    printed = subprocess.check_output(command, text=True, cwd=ROOT, env=environment)
    assert printed.startswith("vitgraph ")


def test_a_wheel_in_an_empty_place(wheel, tmp_path) -> None:
    """All packages come from the wheel, the editable installation aside, wherever one stands."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import vitgraph, vitgraph.kernels.layout as layout, vitgraph.encoder.attention.trial, "
        "vitgraph.graphs.media; vitgraph.graphs.media.MediaLoader; "
        "print(vitgraph.__file__, layout.__file__, *vitgraph.__path__, sep='\\n')"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for start in (ROOT, tmp_path):
        command = [sys.executable, "-c", code]
        printed = subprocess.check_output(command, text=True, cwd=start, env=environment)
        assert all(line.startswith(str(tmp_path)) for line in printed.splitlines())
