"""What an installation puts where (README: nothing called kernels, encoder or graphs at the top
level).
"""

import subprocess
import sys
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
    bench = "graphs/benchmark/systems.py"
    for name in ("kernels/layout.py", "encoder/py.typed", "graphs/photos/cat.jpg", plugin, bench):
        assert f"vitgraph/{name}" in names
    assert {"vitgraph/__init__.py", "vitgraph/__main__.py"} <= set(names)
