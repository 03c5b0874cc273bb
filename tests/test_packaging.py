"""What an installation puts where (README: nothing called kernels, encoder or graphs at the top
level).
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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
        "import sys, vitgraph.graphs, vitgraph.encoder; "
        "assert all(getattr(vitgraph.graphs, name) for name in vitgraph.graphs.__all__); "
        "heavy = {'transformers', 'vllm', 'matplotlib', 'av'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_wheel_contents(tmp_path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"vitgraph", "vitgraph-0.1.0.dist-info"}
    plugin = "graphs/vllm_plugin/models.py"
    bench = "bench/systems.py"
    for name in (
        "kernels/layout.py",
        "encoder/py.typed",
        "graphs/cli/photos/cat.jpg",
        plugin,
        bench,
    ):
        assert f"vitgraph/{name}" in names
    assert "vitgraph/__init__.py" not in names


def test_the_sdist_holds_what_its_tests_need(tmp_path) -> None:
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for folder in ("tests", "bench", "kernels", "encoder", "graphs"):
        files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        kept = {path for path in files if not {"__pycache__"} & set(path.parts)}
        assert kept and not [path for path in kept if not (unpacked / path).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_readme.py"]
    environment = os.environ | {"PYTEST_ADDOPTS": "-p no:cacheprovider"}
    done = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
