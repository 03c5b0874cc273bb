"""The classes vLLM imports, under the names of its own; each is made when it is asked for.

If anything of ours fails to import, they are vLLM's own classes and one line of the log says why.
"""

import importlib
import types
from typing import Any

from vitgraph.graphs.vllm_plugin.names import ARCHITECTURES, logger

_MODULES = {name: module for module, name in ARCHITECTURES.values()}


def __getattr__(name: str) -> Any:
    """vLLM's class of that name with our vision tower."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    theirs = getattr(importlib.import_module(_MODULES[name]), name)
    try:
        found = _with_our_tower(theirs)
    except Exception as error:
        logger.warning(
            "vitgraph: cannot be imported, vLLM's own vision tower serves (%s: %s)",
            type(error).__name__,
            error,
        )
        found = theirs
    return globals().setdefault(name, found)


def _with_our_tower(theirs: type) -> type:
    from vllm.model_executor.models.interfaces import supports_encoder_cudagraph

    from vitgraph.graphs.vllm_plugin.wrapper import VisionTowerWrapper

    bases: tuple[type, ...] = (VisionTowerWrapper, theirs)
    if not supports_encoder_cudagraph(theirs):
        from vitgraph.graphs.vllm_plugin.omni import OmniWrapper, graph_methods

        methods, protocol = graph_methods()
        bases = (OmniWrapper, VisionTowerWrapper, methods, theirs, protocol)
    namespace = {
        "__module__": __name__,
        "__doc__": f"vLLM's {theirs.__name__} with our vision tower.",
    }
    return types.new_class(theirs.__name__, bases, exec_body=lambda body: body.update(namespace))
