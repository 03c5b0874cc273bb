"""Towers that vLLM would quantise, or that a checkpoint holds in FP8: built with plain layers, so
that our encoder can serve.

vLLM chooses for each layer how it is quantised. The tower's layers get the choice for those that
are not, and weights in e4m3 become values times scales on their way from the checkpoint to the
parameters. From then on such a tower is like any other, in the model's dtype: vLLM loads, reloads
and offloads it, and there is no copy that could become stale.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vitgraph.encoder.quantized import IGNORED, SCALES, SUPPORTED, dequantize
from vitgraph.graphs.vllm_plugin.names import attempt, logger

# Of layers in vLLM, and of tensors in checkpoints; Cosmos3's have no prefix.
_TOWER = re.compile(r"(?:^|\.)visual\.|^(?:blocks|merger|deepstack_merger_list)\.")
# vLLM's configurations whose layers are e4m3 in the checkpoint, or plain and quantised by vLLM.
_READ = {"Fp8Config", "ModelOptFp8Config", "OnlineQuantizationConfig"}
_SCHEMES = {"CompressedTensorsW8A8Fp8", "CompressedTensorsW8A16Fp8"}  # others are int4, say


@contextmanager
def plain_tower(quant_config: Any) -> Iterator[list[str]]:
    """Wherever a model is built, the layers of its tower are plain ones.

    Args:
        quant_config: vLLM's, or None to leave everything as it is.

    Yields:
        Names of the layers that would have been quantised, which fills up.
    """
    names: list[str] = []
    classes, _ = attempt(_layer_classes)  # a later vLLM may have others: then nothing is changed
    if quant_config is None or classes is None:
        yield names
        return
    own, (LinearBase, UnquantizedLinearMethod) = quant_config.get_quant_method, classes
    before = vars(quant_config).get("get_quant_method")

    def choose(layer: Any, prefix: str) -> Any:
        method = own(layer, prefix)
        if not isinstance(layer, LinearBase) or isinstance(method, UnquantizedLinearMethod):
            return method
        if not _TOWER.search(prefix) or not _is_read(quant_config, layer, method):
            return method
        vars(layer).pop("scheme", None)
        names.append(prefix)
        return UnquantizedLinearMethod()

    quant_config.get_quant_method = choose
    try:
        yield names
    finally:
        del quant_config.get_quant_method
        if before is not None:
            quant_config.get_quant_method = before
    if names:
        logger.info(
            "vitgraph: %d layers of the vision tower, which vLLM would have quantised (%s), are "
            "held in the model's dtype: values times scales where the checkpoint has FP8",
            len(names),
            type(quant_config).__name__,
        )


def _layer_classes() -> tuple[type, type]:
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    return LinearBase, UnquantizedLinearMethod


def _is_read(quant_config: Any, layer: Any, method: Any) -> bool:
    """Whether a layer's weights come plain, or in a format that `plain_weights` reads."""
    if type(method).__name__ == "CompressedTensorsLinearMethod":  # another one rotates inputs
        return type(getattr(layer, "scheme", None)).__name__ in _SCHEMES
    return type(quant_config).__name__ in _READ


def plain_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors, the tower's in e4m3 as values times scales, in float32. Scales of
    layers in another format, which vLLM kept, go on as they are.

    Raises:
        ValueError: a weight without its scale, or with another than are read, by name.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    read: set[str] = set()
    for name, tensor in weights:
        layer, _, part = name.rpartition(".")
        quantized = part == "weight" and tensor.is_floating_point() and tensor.itemsize == 1
        if not _TOWER.search(name) or not (quantized or part in {*SCALES, IGNORED}):
            yield name, tensor
            continue
        if part == IGNORED:
            continue
        if quantized and tensor.dtype != torch.float8_e4m3fn:
            raise _unread(layer, f"the weight is {tensor.dtype}; {SUPPORTED}")
        parts = waiting.setdefault(layer, {})
        parts[part] = tensor.clone()  # loaders may write the next tensor to the same memory
        scales = [scale for scale in SCALES if scale in parts]
        if layer in read or len(scales) > 1:
            raise _unread(layer, f"the checkpoint has both {' and '.join(SCALES)}")
        if "weight" in parts and scales:
            del waiting[layer]
            read.add(layer)
            yield f"{layer}.weight", _product(layer, parts["weight"], parts[scales[0]])
    for layer, parts in waiting.items():
        if "weight" in parts:
            raise _unread(layer, "the checkpoint has its weight in e4m3 without a scale")
        yield from ((f"{layer}.{part}", tensor) for part, tensor in parts.items())


def _product(layer: str, weight: Tensor, scale: Tensor) -> Tensor:
    try:
        return dequantize(weight, scale)
    except ValueError as error:
        raise _unread(layer, str(error)) from None


def _unread(layer: str, reason: str) -> ValueError:
    return ValueError(f"vitgraph: {layer}: {reason}; VITGRAPH_DISABLE=1 keeps vLLM's tower")
