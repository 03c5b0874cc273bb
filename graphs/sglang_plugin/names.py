"""Logger, environment variable and hooks of the plugin."""

import logging
from importlib.util import find_spec
from pkgutil import resolve_name

# SGLang configures the root logger: its handlers and level apply.
logger = logging.getLogger("vitgraph.sglang")

PLUGIN = "vitgraph.graphs.sglang_plugin:register"
GROUP = "sglang.srt.plugins"
BUDGETS = "VITGRAPH_SGLANG_BUDGETS"

# Called with the loaded model before the KV cache is sized: from 0.5.18 on, and before.
AFTER_LOADING = (
    "sglang.srt.model_executor.model_runner_components.load_model_utils."
    "maybe_precompile_model_kernels_after_loading"
)
LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
TARGETS = (AFTER_LOADING, LOAD_MODEL)


def find_target() -> str | None:
    """The first of `TARGETS` that this SGLang has. It is imported, as SGLang does itself when it
    applies a hook."""
    for target in TARGETS:
        try:
            resolve_name(target)
        except (ImportError, AttributeError):
            continue
        return target
    return None


def has_hooks() -> bool:
    """Whether this SGLang loads plugins at all: 0.5.11 and later."""
    try:
        return find_spec(GROUP) is not None
    except ModuleNotFoundError:
        return False
