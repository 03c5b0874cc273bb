"""The Qwen3-VL vision encoder on Triton kernels: `vitgraph.encoder`, `vitgraph.graphs`."""

from importlib.metadata import version
from pathlib import Path

__version__ = version("vitgraph")

# An editable installation finds the packages beside this folder, but not one without __init__.py.
if (_here := Path(__file__).parent).name == "top":
    __path__.append(str(_here.parent))
