"""Older releases of transformers: the towers of all of its models, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The release of constraints.txt is what all other tests run with.
RELEASES = ("5.17.0",)
FILES = (
    "test_families.py",
    "test_tower.py",
    "test_tower_weights.py",
    "test_checkpoint.py",
    "test_config.py",
)
ASKED = os.environ.get("VITGRAPH_TRANSFORMERS_RELEASES")


@pytest.mark.parametrize("release", ASKED.split(",") if ASKED else RELEASES)
def test_towers_of_an_older_release(release, tmp_path) -> None:
    if not (ASKED or os.environ.get("CI")):
        pytest.skip("a download of 13 MB: CI=1, or VITGRAPH_TRANSFORMERS_RELEASES=5.17.0")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    package = f"transformers=={release}"
    done = subprocess.run(
        [*pip, "--no-deps", "--target", tmp_path, package], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"{package} cannot be downloaded: {done.stderr.strip()[-300:]}")
    # Before the one that is installed; the towers are tiny, and threads that wait would spin.
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == release
    files = [str(Path(__file__).parent / name) for name in FILES]
    tests = [sys.executable, "-m", "pytest", "-q", "--tb=short", *files]
    assert subprocess.run(tests, env=environment).returncode == 0
