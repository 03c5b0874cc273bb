"""vLLM plugin: the vision tower of Qwen3-VL and its kin through vitgraph.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`), possibly
twice. Nothing heavy is imported here: the models are registered by name, and vLLM imports them when
it serves one of them. `VITGRAPH_DISABLE=1` leaves vLLM as it is.
"""

from vitgraph.graphs.vllm_plugin.names import ARCHITECTURES, MODELS, is_disabled, logger


def register() -> None:
    """Put our classes in the place of vLLM's in its model registry, and what they will count on
    its `/metrics`; never raises."""
    if is_disabled():
        return
    try:
        from vitgraph.graphs.vllm_plugin.metrics import publish

        publish()
    except Exception as error:
        logger.warning("vitgraph: no metrics: %s: %s", type(error).__name__, error)
    try:
        from vllm import ModelRegistry

        theirs = ModelRegistry.models
        for architecture, (_, name) in ARCHITECTURES.items():
            # Of those that this release has; what was registered before is warned of at each.
            if getattr(theirs.get(architecture), "module_name", MODELS) != MODELS:
                entry = theirs.pop(architecture)
                try:
                    ModelRegistry.register_model(architecture, f"{MODELS}:{name}")
                finally:
                    theirs.setdefault(architecture, entry)
    except Exception as error:
        logger.warning(
            "vitgraph: not registered, vLLM's own vision tower serves (%s: %s)",
            type(error).__name__,
            error,
        )
