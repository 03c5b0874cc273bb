"""The Qwen3-VL vision encoder on Triton kernels: `vitgraph.encoder`, `vitgraph.graphs`."""

from pathlib import Path

# An editable installation finds the packages beside this folder, but not one without __init__.py.
if (_here := Path(__file__).parent).name == "top":
    __path__.append(str(_here.parent))


def __getattr__(name: str) -> object:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("vitgraph")
