"""Our encoder on the weights of vLLM's vision tower.

vLLM builds, loads, reloads, offloads and names its tower as ever; the tower only gets another
`forward`. Nothing is copied: our parameters are views of vLLM's, and follow them when they move.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from vitgraph.encoder import Qwen3VLVisionEncoder, VisionConfig
from vitgraph.encoder.attention.backends import FREE_OF_EMPTY_SEQUENCES
from vitgraph.encoder.inputs import Grids, host_grids, outlives
from vitgraph.encoder.sequence_parallel import SequenceParallel
from vitgraph.encoder.sharing import why_not_shareable
from vitgraph.encoder.structure import Structure, why_not_plain
from vitgraph.graphs.addresses import Addresses
from vitgraph.graphs.linears import SAME, Linears
from vitgraph.graphs.qwen3_vl import Qwen3VLGraphModel
from vitgraph.graphs.vllm_plugin.metrics import TowerMetrics
from vitgraph.graphs.vllm_plugin.names import logger
from vitgraph.graphs.vllm_plugin.protocol import GRIDS, PIXELS, ReleaseShape, VllmTower
from vitgraph.kernels.linear import PixelNormalization

# Where the classes of vLLM's tower come from; its LoRA layers do not.
ORIGINS = ("torch.nn.modules.", "vllm.model_executor.")


class SharedEncoder:
    """Eager and captured forwards of one adopted tower.

    Args:
        tower: vLLM's, its parameters as yet unloaded.
        vision_config: Hugging Face's.
        attention: name of our backend.
        shape: of the running release's encoder graph protocol.
        batch_invariant: an image's bits do not depend on what it is encoded with.
        linears: options of the blocks' layers.
    """

    def __init__(
        self,
        tower: Any,
        vision_config: Any,
        attention: str,
        shape: ReleaseShape,
        batch_invariant: bool = False,
        linears: Linears = SAME,
    ) -> None:
        self.batch_invariant, self.linears = batch_invariant, linears
        self.tower, self.vision_config, self.attention = tower, vision_config, attention
        self.shape = shape
        self.pixel_normalization = _normalization(getattr(tower, "input_norm", None))
        self.captured = False
        self._moved = False
        self._model: Qwen3VLGraphModel | None = None
        self._addresses: Addresses | None = None
        self._structure: Structure | None = None
        self.unshareable: str | None = None
        self._max_sequences = 0
        self._captures: dict[int, dict[str, Any]] = {}
        self.graphs_off = False
        self.metrics = TowerMetrics(on_gpu=tower.device.type == "cuda")
        self.parallel: SequenceParallel | None = None

    @property
    def model(self) -> Qwen3VLGraphModel:
        """The encoder as of the last `refresh`, as a model of a graph manager."""
        if self._model is None:
            self.refresh()
        if self._model is None:
            raise RuntimeError(f"vitgraph: {self.unshareable}; set VITGRAPH_DISABLE=1")
        return self._model

    @property
    def encoder(self) -> Qwen3VLVisionEncoder:
        """The encoder as of the last `refresh`."""
        return self.model.module

    def share_rows(self, parallel: SequenceParallel | None) -> None:
        """Encode together with other ranks from now on."""
        self.parallel = parallel
        if parallel is not None and parallel.rank:
            self.metrics.file = None  # every rank sees every item: the first one counts

    @property
    def shared(self) -> str:
        """What several ranks share out."""
        if self.parallel is None:
            return "items"
        return f"rows from {self.parallel.min_patches // self.tower.spatial_merge_size**2} tokens"

    def describe(self) -> str:
        """What the log says of it: attention, pixels, graphs and options."""
        pixels = "uint8" if self.pixel_normalization is not None else "normalised"
        return (
            f"attention {self.attention} (vLLM chose {self.tower.attn_backend.name}), {pixels} "
            f"pixels, graphs {'off' if self.graphs_off else 'on'}"
            f"{', batch-invariant' if self.batch_invariant else ''}"
            f"{self.linears.said(self.tower.dtype)}"
        )

    def refresh(self) -> bool:
        """Follow parameters that moved or were replaced; False where ours cannot use them."""
        same = self._structure is not None and self._structure.unchanged()
        still = self._addresses is not None and self._addresses.unchanged()
        if self._model is not None and self.unshareable is None and same and still:
            return True
        config = VisionConfig.from_dict(self.vision_config.to_dict())
        reason = why_not_plain(self.tower, "the tower's", ORIGINS)
        if reason := reason or why_not_shareable(self.tower, config):
            if self.unshareable is None:
                logger.error("vitgraph: after loading, %s: vLLM's own tower serves", reason)
            self.unshareable = reason  # the model of before still tells sizes
            return False
        # What is on the modules may be gone again, and eps is another: graphs hold what was.
        self._moved = self._moved or (self.captured and not (same and still))
        if not same:
            self._structure = Structure(self.tower)
        self._addresses = Addresses(self.tower, buffers=False)  # vLLM's forward makes some anew
        self._model, self.unshareable = Qwen3VLGraphModel(self._bind(), self.parallel), None
        return True

    @torch.no_grad()
    def encode(self, pixels: Tensor, grid_thw: Any, reason: str | None = None) -> Tensor:
        """Encode eagerly, after `refresh`; the arguments of vLLM's tower, and why not replayed."""
        with self.metrics.eager(len(grid_thw), reason or self._miss_reason()):
            return self._encode(self.encoder, pixels, grid_thw)

    def _miss_reason(self) -> str:
        """As in `EncoderCudaGraphManager`."""
        if self.graphs_off:
            return "graphs_off"
        return "too_large" if self.captured else "not_captured"

    def _encode(self, encoder: Qwen3VLVisionEncoder, pixels: Tensor, grid_thw: Any) -> Tensor:
        if self.pixel_normalization is None:
            pixels = pixels.to(encoder.device, non_blocking=outlives(pixels, encoder.device)).to(
                encoder.dtype
            )
        elif pixels.dtype != torch.uint8:  # 0..255 all the same
            pixels = pixels.to(encoder.device, non_blocking=outlives(pixels, encoder.device))
            pixels = self.tower.input_norm(pixels, encoder.dtype)
        return encoder(pixels, grid_thw, parallel=self.parallel)

    def capture_buffers(
        self, budget: int, max_items: int, max_frames: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Static pixels and grids of one budget; the plan of the forward is kept here."""
        if not self.refresh():
            raise RuntimeError(f"vitgraph: {self.unshareable}; set VITGRAPH_DISABLE=1")
        encoder = self.encoder
        if not self.shape.merged_values:
            _name_memory(self.model.estimate_encoder_memory(budget), budget)
        if not self._captures:  # vLLM's fallback is our eager forward: it compiles now or never
            with torch.no_grad():
                self.model.warm_up_encoder_eager()
        free = encoder.auto_attention or encoder.attention in FREE_OF_EMPTY_SEQUENCES
        # vLLM packs by tokens and items only. A sequence has at least one token.
        self._max_sequences = max(max_items, max_frames)
        slots = budget if free else self._max_sequences
        inputs = self.model.prepare_encoder_cudagraph_capture_inputs(
            budget, max_items, slots, device, encoder.dtype
        )
        self._captures[budget] = {
            "plan": inputs.mm_kwargs["plan"],
            "max_sequences": inputs.mm_kwargs["max_sequences"],
        }
        if free:
            self._max_sequences = max(self._captures)
        if device.type == "cuda":  # vLLM measures what a capture takes, not what calibration took
            torch.cuda.empty_cache()
        self.captured, self._moved = True, False
        return inputs.mm_kwargs[PIXELS], inputs.buffers[GRIDS]

    def captured_forward(self, pixels: Tensor, grid_thw: Tensor) -> Tensor:
        """What a graph holds. vLLM copies the result to where it is read from."""
        encoder = self.encoder
        budget = len(pixels) // encoder.config.spatial_merge_size**2
        out = torch.empty(
            budget, encoder.config.output_width, dtype=encoder.dtype, device=pixels.device
        )
        return self.model.encoder_cudagraph_forward(
            {PIXELS: pixels, **self._captures[budget]}, {GRIDS: grid_thw, "output": out}
        )

    def why_not_replayable(self, pixels: Tensor, grids: Grids) -> str | None:
        """What keeps a pack out of the graph that was chosen for it, or None."""
        if not self.refresh():
            return self.unshareable
        encoder = self.encoder
        if self._moved:
            return "the weights moved after the graphs were captured"
        if pixels.dtype != encoder.pixel_dtype and torch.uint8 in (
            pixels.dtype,
            encoder.pixel_dtype,
        ):
            return f"graphs were captured for {encoder.pixel_dtype} pixels, not {pixels.dtype}"
        frames = sum(t for t, _, _ in grids)
        if frames > self._max_sequences:
            return f"{frames} frames are more than the {self._max_sequences} of a replay"
        return None

    def start_replay(self, grids: Grids, max_items: int) -> None:
        """Tell the metrics that vLLM is about to replay a pack, in the smallest budget it fits; and
        the log, once, where only the number of items kept it small."""
        tokens = sum(grids.num_patches) // self.encoder.config.spatial_merge_size**2
        budget = min((budget for budget in self._captures if budget >= tokens), default=tokens)
        self.metrics.start_replay(len(grids), tokens, budget)
        if len(grids) == max_items and 2 * tokens <= (largest := max(self._captures, default=0)):
            _say_items(max_items, largest)

    def replay_grids(self, grids: Grids, max_items: int) -> Tensor:
        """[max_items, 3] on the tower's device, unused slots zero."""
        device = self.encoder.device
        # vLLM's own copy would wait for the replay before.
        return host_grids(grids, max_items, device).to(device, non_blocking=True)

    def _bind(self) -> Qwen3VLVisionEncoder:
        tower = self.tower
        encoder = Qwen3VLVisionEncoder(
            VisionConfig.from_dict(self.vision_config.to_dict()),
            device="meta",
            dtype=tower.patch_embed.proj.weight.dtype,
            attention=self.attention,
            batch_invariant=self.batch_invariant,
            pixel_dtype=torch.uint8 if self.pixel_normalization is not None else None,
            **self.linears._asdict(),
        )
        encoder.share_weights(tower)
        # Anew: its buffers may have been loaded since.
        if (normalization := _normalization(getattr(tower, "input_norm", None))) is not None:
            encoder.normalization = normalization
        return encoder


class AdoptedTower(VllmTower):
    """Mixed into the class of vLLM's tower; `vitgraph` is its `SharedEncoder`."""

    vitgraph: SharedEncoder

    def forward(
        self, x: Tensor, grid_thw: Any, *, encoder_metadata: dict[str, Any] | None = None
    ) -> Tensor:
        """Encode with our kernels; with vLLM's own metadata, as vLLM would."""
        if encoder_metadata is not None:
            return super().forward(x, grid_thw, encoder_metadata=encoder_metadata)
        if not self.vitgraph.refresh():
            return super().forward(x, torch.as_tensor(grid_thw))  # Qwen3-Omni's takes no list
        return self.vitgraph.encode(x, grid_thw)


def adopt(
    tower: Any,
    vision_config: Any,
    attention: str,
    shape: ReleaseShape,
    batch_invariant: bool = False,
    linears: Linears = SAME,
) -> SharedEncoder:
    """Give vLLM's tower our forward; its parameters, attributes and loading stay its own."""
    theirs = type(tower)
    tower.__class__ = type(f"Vitgraph{theirs.__name__}", (AdoptedTower, theirs), {})
    shared = SharedEncoder(tower, vision_config, attention, shape, batch_invariant, linears)
    tower.vitgraph = shared
    logger.debug("vitgraph: adopted %s", theirs.__name__)
    return shared


@functools.lru_cache(maxsize=64)
def _name_memory(needed: int, budget: int) -> None:
    """vLLM 0.23 and later capture on trial before they size the KV cache; earlier ones do not."""
    logger.info(
        "vitgraph: the graph of %d tokens, captured after the KV cache was sized, takes about "
        "%.2f GiB: --gpu-memory-utilization has to leave that free",
        budget,
        needed / 2**30,
    )


@functools.lru_cache(maxsize=1)
def _say_items(max_items: int, largest: int) -> None:
    logger.info(
        "vitgraph: a replay held %d items, as many as it may, and less than half of %d tokens: "
        "larger batches would take fewer replays with a higher "
        "encoder_cudagraph_max_vision_items_per_batch (said once)",
        max_items,
        largest,
    )


def _normalization(input_norm: Any) -> PixelNormalization | None:
    """vLLM's on-device normalisation of bytes, in our terms: x * weight + bias."""
    if input_norm is None or getattr(input_norm, "input_dtype", None) is None:
        return None
    std = [1 / (255 * weight) for weight in input_norm.weight.tolist()]
    mean = [-bias * s for bias, s in zip(input_norm.bias.tolist(), std, strict=True)]
    return PixelNormalization(tuple(mean), tuple(std))
