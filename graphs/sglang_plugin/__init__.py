"""SGLang plugin: the vision towers of Qwen3-VL and its relatives through vitgraph.

SGLang calls `register` in each of its processes (entry point group `sglang.srt.plugins`), once.
Nothing heavy is imported here: one hook is registered, and where a model has been loaded, it puts
our forward on the model's vision tower. `VITGRAPH_DISABLE=1` leaves SGLang as it is.

Encoder-only servers load no plugins; `SGLANG_EXTERNAL_MODEL_PACKAGE=vitgraph.graphs.sglang_plugin`
makes them take their models from `models` here, which do the same.
"""

from typing import Any

from vitgraph.graphs.sglang_plugin.names import find_target, logger
from vitgraph.graphs.vllm_plugin.names import is_disabled


def register() -> None:
    """Ask SGLang to call `after_loading`; never raises."""
    if is_disabled():
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        if (target := find_target()) is None:
            logger.warning("vitgraph: SGLang's own vision tower serves: this release has no hook")
            return
        HookRegistry.register(target, after_loading, HookType.AFTER)
    except Exception as error:
        logger.warning(
            "vitgraph: SGLang's own vision tower serves: %s: %s", type(error).__name__, error
        )


def after_loading(result: Any, model_or_runner: Any, *_: Any, **__: Any) -> None:
    """The hook: what SGLang has loaded, or the runner that did; the result is left as it is."""
    try:
        from vitgraph.graphs.sglang_plugin.serve import serve
    except Exception as error:
        logger.warning(
            "vitgraph: cannot be imported, SGLang's own vision tower serves (%s: %s)",
            type(error).__name__,
            error,
        )
        return
    serve(
        getattr(model_or_runner, "model", None) if _is_runner(model_or_runner) else model_or_runner
    )


def _is_runner(thing: Any) -> bool:
    """A model has a `model`, too: its language model."""
    return hasattr(thing, "load_model")
