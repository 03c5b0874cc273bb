"""What our subclasses of vLLM's models do differently: the tower, and how graphs are fed."""

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vitgraph.encoder import VisionConfig
from vitgraph.encoder.attention.backends import FREE_OF_EMPTY_SEQUENCES
from vitgraph.encoder.inputs import Grids, check_grids, check_pixels
from vitgraph.encoder.sharing import why_not_shareable
from vitgraph.graphs.linears import choose_linears
from vitgraph.graphs.qwen3_vl import KEYS
from vitgraph.graphs.vllm_plugin.backends import counterpart
from vitgraph.graphs.vllm_plugin.names import attempt, describe, is_invariant, logger
from vitgraph.graphs.vllm_plugin.protocol import ReleaseShape, VllmModel, detect_shape
from vitgraph.graphs.vllm_plugin.quantized import plain_tower, plain_weights
from vitgraph.graphs.vllm_plugin.ranks import replicate_tower, share_rows, why_not_served
from vitgraph.graphs.vllm_plugin.tower import SharedEncoder, adopt


class VisionTowerWrapper(VllmModel):
    """First base of our models, before vLLM's class.

    Where our tower cannot serve, `encoder` is None, every method is vLLM's own, and the log says
    why.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        # A later vLLM may lack a field that is read here: then its own tower serves.
        can = getattr(type(self), "supports_encoder_tp_data", False)
        ranks, failed = attempt(replicate_tower, vllm_config, can)
        asked, unknown = attempt(why_not_served, vllm_config)
        reason = failed or unknown or asked
        quantization = None if reason else getattr(vllm_config, "quant_config", None)
        with plain_tower(quantization) as plain:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._vitgraph_plain = bool(plain)
        encoder: SharedEncoder | None = None
        try:
            shape = detect_shape()
            if reason is None:
                encoder = _adopt(self.visual, vllm_config, shape)
                encoder.share_rows(share_rows(self, vllm_config, encoder.batch_invariant))
        except Exception as error:
            reason = describe(error)
        self.vitgraph = encoder
        self._vitgraph_declined = False
        no_graphs, failed = attempt(why_no_graphs, vllm_config, encoder)
        if encoder is not None:
            no_graphs = no_graphs or failed
        elif not hasattr(self.visual, "prepare_encoder_metadata"):
            no_graphs = "this model of vLLM's has none"
        compilation = vllm_config.compilation_config
        if no_graphs is not None and getattr(compilation, "cudagraph_mm_encoder", False):
            compilation.cudagraph_mm_encoder = False  # the runner asks after the model was built
            logger.warning("vitgraph: no encoder graphs: %s", no_graphs)
        if encoder is None:
            slow = getattr(getattr(self.visual, "attn_backend", None), "name", "") == "TRITON_ATTN"
            logger.warning(
                "vitgraph: vLLM's own vision tower serves %s: %s%s",
                type(self).__name__,
                reason,
                "; TRITON_ATTN is vLLM's own then, and slow" if slow else "",
            )
            return
        if getattr(compilation, "compile_mm_encoder", False):
            logger.warning("vitgraph: compile_mm_encoder has no effect: nothing here is compiled")
        encoder.graphs_off = not compilation.cudagraph_mm_encoder
        logger.info(
            "vitgraph serves the vision tower of %s: %s, %d rank%s, encoder graph protocol of "
            "vLLM %s",
            type(self).__name__,
            encoder.describe(),
            ranks,
            "" if ranks == 1 else f"s, weights replicated and {encoder.shared} shared out",
            encoder.shape.releases,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """vLLM's; a tower of plain layers gets plain weights."""
        return super().load_weights(plain_weights(weights) if self._vitgraph_plain else weights)

    def get_encoder_cudagraph_config(self) -> Any:
        """vLLM's, with two captured tensors."""
        config = super().get_encoder_cudagraph_config()
        return config if self.vitgraph is None else self.vitgraph.shape.config(config)

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        """The items' pixels, without a copy where they are neighbours."""
        if self.vitgraph is None or not indices:
            return super().select_encoder_cudagraph_items(mm_kwargs, indices)
        return self.vitgraph.model.select_encoder_cudagraph_items(
            _host_grids(mm_kwargs, self.visual.spatial_merge_size), indices
        )

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        *path_and_axes: Any,
        **keywords: Any,
    ) -> Any:
        """Static pixels and grids of one budget."""
        budget = (token_budget, max_batch_size, max_frames_per_batch, device)
        if self.vitgraph is None:
            return super().prepare_encoder_cudagraph_capture_inputs(
                *budget, dtype, *path_and_axes, **keywords
            )
        return self.vitgraph.shape.capture_inputs(*self.vitgraph.capture_buffers(*budget))

    def prepare_encoder_cudagraph_replay_buffers(
        self,
        mm_kwargs: dict[str, Any],
        max_batch_size: int,
        max_frames_per_batch: int,
        *path: Any,
        **keywords: Any,
    ) -> Any:
        """Pixels and grids of one pack.

        vLLM has no way to decline a replay here. For a pack that the graph cannot serve, an empty
        one is replayed, and `postprocess_encoder_output` encodes the pack eagerly.
        """
        if self.vitgraph is None:
            return super().prepare_encoder_cudagraph_replay_buffers(
                mm_kwargs, max_batch_size, max_frames_per_batch, *path, **keywords
            )
        pixel_key, grid_key = _keys(mm_kwargs)
        pixels = mm_kwargs[pixel_key]
        grids = check_grids(mm_kwargs[grid_key], self.visual.spatial_merge_size)
        check_pixels(pixels, grids, self.vitgraph.encoder.config.patch_width)
        self._vitgraph_declined = False
        if reason := self.vitgraph.why_not_replayable(pixels, grids):
            if not self.vitgraph.shape.item_specs:
                raise RuntimeError(f"vitgraph: {reason}")
            _warn_once(reason)
            self._vitgraph_declined = True
            pixels, grids = None, Grids()
        else:
            self.vitgraph.start_replay(grids, max_batch_size)
            if not self.vitgraph.shape.item_specs:  # nothing is called after the replay
                self.vitgraph.metrics.end_replay(timed=False)
        return self.vitgraph.shape.replay_buffers(
            pixels, self.vitgraph.replay_grids(grids, max_batch_size)
        )

    def encoder_cudagraph_forward(
        self, inputs: dict[str, Any], buffers: dict[str, Any] | None = None, **path: Any
    ) -> Tensor:
        """The captured forward."""
        if self.vitgraph is None:
            arguments = (inputs,) if buffers is None else (inputs, buffers)
            return super().encoder_cudagraph_forward(*arguments, **path)
        return self.vitgraph.captured_forward(*ReleaseShape.captured(inputs, buffers))

    def postprocess_encoder_output(
        self, output: Any, *arguments: Any, batch_mm_kwargs: Any = None, **keywords: Any
    ) -> None:
        """vLLM's; a pack that was declined is encoded first.

        Raises:
            RuntimeError: after a declined pack, without one to encode.
        """
        declined, self._vitgraph_declined = self._vitgraph_declined, False
        if self.vitgraph is not None and declined:
            if not batch_mm_kwargs:
                raise RuntimeError("vitgraph: vLLM did not hand back the pack that was declined")
            # As it is handed back: whatever it is, its own rows are right.
            pixel_key, grid_key = _keys(batch_mm_kwargs)
            pack = batch_mm_kwargs[pixel_key], batch_mm_kwargs[grid_key]
            served = self.vitgraph.refresh()
            rows = self.vitgraph.encode(*pack, "declined") if served else self.visual(*pack)
            output = self.vitgraph.shape.outputs(rows)
        elif self.vitgraph is not None:
            self.vitgraph.metrics.end_replay()
        super().postprocess_encoder_output(
            output, *arguments, batch_mm_kwargs=batch_mm_kwargs, **keywords
        )


def why_no_graphs(vllm_config: Any, encoder: SharedEncoder | None) -> str | None:
    """What forbids graphs, whichever tower serves, or None."""
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal.is_multimodal_pruning_enabled():
        return "video pruning post-processes what the encoder returns, and graphs bypass that"
    if getattr(vllm_config.lora_config, "enable_tower_connector_lora", False):
        return "packing reorders items after the adapters of the vision tower were mapped"
    fp8 = getattr(multimodal, "mm_encoder_attn_dtype", None) == "fp8"
    if fp8 and not getattr(multimodal, "mm_encoder_fp8_scale_path", None):
        return "dynamic fp8 scales change on the host, which a graph does not see"
    if vllm_config.model_config.enforce_eager:
        return "vLLM captures nothing with enforce_eager"
    new_runner = getattr(vllm_config, "use_v2_model_runner", False)
    if new_runner and not new_runner_has_graphs():
        return (
            "the V2 model runner of this vLLM has none, whichever the tower: set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    mode = vllm_config.compilation_config.cudagraph_mode
    if not new_runner and mode is not None and mode.name == "NONE":
        return (
            "this model runner of vLLM captures nothing, encoders included, in cudagraph_mode NONE"
        )
    if encoder is not None and (encoder.attention, encoder.tower.device.type) == ("sdpa", "cuda"):
        return "TORCH_SDPA reads sequence lengths on the host"
    return None


def new_runner_has_graphs() -> bool:
    """From vLLM 0.28 on; 0.26 takes that runner for dense models by itself."""
    try:
        from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
    except ImportError:
        return False
    return "cudagraph_manager" in inspect.signature(EncoderRunner).parameters


def _adopt(tower: Any, vllm_config: Any, shape: ReleaseShape) -> SharedEncoder:
    """Raises ValueError: what keeps our encoder from serving."""
    hf_config = vllm_config.model_config.hf_config
    vision_config = getattr(hf_config, "thinker_config", hf_config).vision_config
    if next(tower.parameters(), None) is None:  # a placeholder: no images and videos are allowed
        raise ValueError("this process has no vision tower")
    config = VisionConfig.from_dict(vision_config.to_dict())
    if reason := why_not_shareable(tower, config):
        raise ValueError(reason)
    if torch.version.hip is not None:
        raise ValueError("vitgraph is made for NVIDIA GPUs")
    heads, head_dim = vision_config.num_heads, vision_config.hidden_size // vision_config.num_heads
    attention = counterpart(tower.attn_backend.name, tower.device, tower.dtype, heads, head_dim)
    if not shape.item_specs and attention not in FREE_OF_EMPTY_SEQUENCES:
        # These releases cannot take a pack back that has more frames than a graph has slots.
        attention = "triton"
    invariant = is_invariant()
    if invariant and tower.device.type != "cuda":
        raise ValueError("VLLM_BATCH_INVARIANT needs kernels of a GPU")
    linears = choose_linears(config, tower.device, invariant, logger)
    attention = "triton" if invariant else attention
    return adopt(tower, vision_config, attention, shape, invariant, linears)


@functools.lru_cache(maxsize=64)
def _warn_once(reason: str) -> None:
    logger.warning("vitgraph: a pack is encoded eagerly: %s (said once)", reason)


def _keys(mm_kwargs: dict[str, Any]) -> tuple[str, str]:
    return KEYS["image" if "image_grid_thw" in mm_kwargs else "video"]


def _host_grids(mm_kwargs: dict[str, Any], merge_size: int) -> dict[str, Any]:
    pixel_key, grid_key = _keys(mm_kwargs)
    return {
        pixel_key: mm_kwargs[pixel_key],
        grid_key: check_grids(mm_kwargs[grid_key], merge_size),
    }
