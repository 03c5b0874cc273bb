"""vLLM's encoder graph protocol in its six shapes, told apart by what the running release has.

Most methods are inherited from vLLM's model and so fit by themselves. What differs for the ones we
replace: how captured tensors are handed over, and what `postprocess_encoder_output` is given.
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vitgraph.encoder.inputs import outlives

PIXELS, GRIDS = "pixel_values", "grid_thw"

if TYPE_CHECKING:  # what vLLM's classes have for `super()`; signatures differ between releases

    class VllmModel:
        """A model's."""

        visual: Any
        config: Any
        multimodal_config: Any
        get_encoder_cudagraph_config: Callable[..., Any]
        select_encoder_cudagraph_items: Callable[..., Any]
        prepare_encoder_cudagraph_capture_inputs: Callable[..., Any]
        prepare_encoder_cudagraph_replay_buffers: Callable[..., Any]
        encoder_cudagraph_forward: Callable[..., Any]
        postprocess_encoder_output: Callable[..., None]
        load_weights: Callable[..., Any]

        def __init__(self, *, vllm_config: Any, prefix: str) -> None: ...

    class VllmTower:
        """A vision tower's."""

        forward: Callable[..., Tensor]

else:
    VllmModel = VllmTower = object


@dataclass(frozen=True)
class ReleaseShape:
    """One shape of the protocol; the fields after the first are what it is recognised by.

    Attributes:
        releases: of vLLM.
        item_specs: one method describes all items, and outputs pass `postprocess_encoder_output`
            after a replay, which may replace them.
        merged_values: pixels and metadata are handed over in one dictionary, `values`.
        paths: methods take `path`.
        outputs_by_path: `postprocess_encoder_output` takes a dictionary of outputs by path.
        axis_keys: capture takes `axis_keys`.
    """

    releases: str
    item_specs: bool = True
    merged_values: bool = True
    paths: bool = True
    outputs_by_path: bool = True
    axis_keys: bool = True

    def config(self, config: Any) -> Any:
        """vLLM's own description of the graphs, with our two buffers in place of its seven."""
        if not self.merged_values:  # the pixels are known by `input_key_by_modality`
            return dataclasses.replace(config, buffer_keys=[GRIDS])
        logics = {**config.padding_logics, PIXELS: _copy_rows}
        return dataclasses.replace(config, buffer_keys=[PIXELS, GRIDS], padding_logics=logics)

    def capture_inputs(self, pixels: Tensor, grid_thw: Tensor) -> Any:
        """The static tensors of one capture."""
        from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphCaptureInputs as Inputs

        if self.merged_values:
            return Inputs(values={PIXELS: pixels, GRIDS: grid_thw})
        mm_kwargs = {PIXELS: pixels, "image_grid_thw": grid_thw.tolist()}
        return Inputs(mm_kwargs=mm_kwargs, buffers={GRIDS: grid_thw})

    def replay_buffers(self, pixels: Tensor | None, grid_thw: Tensor) -> Any:
        """What a replay copies; pixels None leaves the captured ones as they are."""
        from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphReplayBuffers as Buffers

        if self.merged_values:
            return Buffers(values={PIXELS: pixels, GRIDS: grid_thw})
        return Buffers(buffers={GRIDS: grid_thw})

    @staticmethod
    def captured(inputs: dict[str, Any], buffers: dict[str, Any] | None) -> tuple[Tensor, Tensor]:
        """Pixels and grids from the arguments of `encoder_cudagraph_forward`."""
        return inputs[PIXELS], (inputs if buffers is None else buffers)[GRIDS]

    def outputs(self, output: Tensor) -> Any:
        """An output in the form that `postprocess_encoder_output` takes."""
        return {"default": output} if self.outputs_by_path else output


SHAPES = (
    ReleaseShape("0.20-0.21", False, False, False, False, False),
    ReleaseShape("0.22", True, False, False, False, False),
    ReleaseShape("0.23", True, True, False, False, False),
    ReleaseShape("0.24-0.26", True, True, True, False, False),
    ReleaseShape("0.27-0.29", True, True, True, True, False),
    ReleaseShape("0.30-0.33", True, True, True, True, True),
)


def detect_shape() -> ReleaseShape:
    """The shape of the vLLM that is installed.

    Raises:
        ValueError: a combination that no release known to us has.
        ImportError: a vLLM without encoder graphs.
    """
    from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph as Protocol
    from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphCaptureInputs

    capture = _parameters(Protocol, "prepare_encoder_cudagraph_capture_inputs")
    found = (
        hasattr(Protocol, "get_encoder_cudagraph_item_specs"),
        any(f.name == "values" for f in dataclasses.fields(EncoderCudaGraphCaptureInputs)),
        "path" in capture,
        "outputs" in _parameters(Protocol, "postprocess_encoder_output"),
        "axis_keys" in capture,
    )
    for shape in SHAPES:
        if dataclasses.astuple(shape)[1:] == found:
            return shape
    names = [field.name for field in dataclasses.fields(ReleaseShape)[1:]]
    have = [name for name, present in zip(names, found, strict=True) if present]
    raise ValueError(f"vLLM's encoder graph protocol has an unknown shape: {have or 'no feature'}")


def _parameters(protocol: type, method: str) -> tuple[str, ...]:
    function = getattr(protocol, method, None)
    return tuple(inspect.signature(function).parameters) if function is not None else ()


def _copy_rows(buffer: Tensor, source: Tensor) -> None:
    """Rows past the source keep what they hold: the graph does not read them."""
    buffer[: len(source)].copy_(source, non_blocking=outlives(source, buffer.device))
