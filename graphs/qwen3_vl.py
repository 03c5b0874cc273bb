"""Qwen3-VL's encoder as a model of the graph manager (`vitgraph.graphs.SupportsEncoderCudaGraph`).

The graph has two inputs, the pixels and the grids (unused slots are zero); the rest is derived on
the device, the number of real rows included. Nothing is zeroed between replays.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitgraph.encoder import Qwen3VLVisionEncoder, VisionConfig
from vitgraph.encoder.attention.backends import FREE_OF_EMPTY_SEQUENCES
from vitgraph.encoder.branches import BRANCH_ROWS
from vitgraph.encoder.inputs import Grid, Grids, check_grids, host_grids
from vitgraph.encoder.operations import Plan
from vitgraph.encoder.sequence_parallel import SequenceParallel
from vitgraph.graphs.budgets import estimate_memory
from vitgraph.graphs.calibration import calibrate, is_measured
from vitgraph.graphs.protocol import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
)

# modality -> (key of the pixels, key of the grids)
KEYS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}

# One batch for each way that tiles, attention and layout are chosen by size, of patches and of
# tokens; the last has more items than 64.
EAGER_SHAPES: tuple[list[Grid], ...] = (
    *([(1, side, side)] for side in (2, 22, 32, 44)),
    [(1, 48, 64)],
    [(8, 20, 20)],
    [(8, 40, 40)],
    [(1, 2, 2)] * 65,
)


def as_model(encoder: Any) -> Any:
    """An encoder of ours as a model of the manager; any other model as it is."""
    return Qwen3VLGraphModel(encoder) if isinstance(encoder, Qwen3VLVisionEncoder) else encoder


class Qwen3VLGraphModel:
    """The ten protocol methods for an encoder, and some optional ones. A batch (`mm_kwargs`) has
    the keys of images, of videos (`KEYS`), or of both, the images before the videos.

    Args:
        encoder: the module.
        parallel: the ranks that capture, and encode every batch, together; None for this one alone.

    Attributes:
        module: the encoder.
        plans: how each captured budget is computed, with what was measured, if anything was.

    Raises:
        ValueError: an encoder without weights, or with something on its modules that its forward
            would leave out.
    """

    def __init__(
        self, encoder: Qwen3VLVisionEncoder, parallel: SequenceParallel | None = None
    ) -> None:
        encoder.check_modules()
        self.module, self.parallel = encoder, parallel
        self.plans: dict[int, Plan] = {}
        self._measured: dict[tuple, Plan] = {}

    @property
    def config(self) -> VisionConfig:
        """The encoder's."""
        return self.module.config

    @property
    def device(self) -> torch.device:
        """The encoder's."""
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the encoder and of the outputs."""
        return self.module.dtype

    @property
    def pixel_dtype(self) -> torch.dtype:
        """What graphs are captured for: the encoder's `pixel_dtype`."""
        return self.module.pixel_dtype

    def check_encoder_inputs(self, mm_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Validate a batch once, and return it with host grids so that no later method reads the
        device.

        Raises:
            ValueError: unknown or missing keys, or an item that does not fit its pixels.
        """
        on_encoder = self.module._forward_hooks, self.module._forward_pre_hooks
        if any(on_encoder) or "forward" in vars(self.module):
            raise ValueError(
                "the encoder has forward hooks or a forward of its own, which no graph runs: "
                "remove them, or call the encoder without a manager"
            )
        if not isinstance(mm_kwargs, Mapping):
            kind = type(mm_kwargs).__name__
            raise ValueError(f"a batch is a dictionary of pixels and grids, got a {kind}")
        # A processor's output may be handed in whole: text is not ours.
        given = [[key for key in keys if mm_kwargs.get(key) is not None] for keys in KEYS.values()]
        parts = [keys for keys in given if keys]
        if not parts or min(map(len, parts)) < 2:
            expected = " or ".join(f"{pixels} and {grids}" for pixels, grids in KEYS.values())
            got = sorted(str(key) for key, value in mm_kwargs.items() if value is not None)
            raise ValueError(f"a batch has {expected}, got {got!r:.100}")
        checked = [self._check(mm_kwargs[pixels], mm_kwargs[grids]) for pixels, grids in parts]
        if len(checked) == 1:
            return dict(zip(parts[0], checked[0], strict=True))
        # Images and videos are the same to the encoder: one batch, one copy.
        pixels = torch.cat([pixels.to(self.device, self.pixel_dtype) for pixels, _ in checked])
        return {"pixel_values": pixels, "image_grid_thw": Grids(g for _, gs in checked for g in gs)}

    def _check(self, pixel_values: Any, grid_thw: Any) -> tuple[Tensor, Grids]:
        pixels, grids = self.module.check_inputs(pixel_values, grid_thw)
        given_bytes, captured_bytes = pixels.dtype == torch.uint8, self.module.takes_bytes
        if given_bytes and not captured_bytes:
            pixels = self.module.normalization.normalize(pixels.to(self.device), self.pixel_dtype)
        elif captured_bytes and not given_bytes:
            raise ValueError(
                f"pixels have dtype {pixels.dtype}, but this encoder's graphs take uint8 patches "
                f"(pixel_dtype=torch.uint8)"
            )
        return pixels, grids

    def estimate_encoder_memory(self, token_budget: int) -> int:
        """Bytes of a captured budget."""
        return estimate_memory(self.module, token_budget, gathered=self.parallel is not None)

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """Describe the graph's inputs."""
        return EncoderCudaGraphConfig(
            modalities=tuple(KEYS),
            input_key_by_modality={modality: pixels for modality, (pixels, _) in KEYS.items()},
            buffer_keys=("grid_thw",),
            out_hidden_size=self.config.output_width,
            zero_buffers=False,
            sequences_are_free=self.module.auto_attention
            or self.module.plan.attention in FREE_OF_EMPTY_SEQUENCES,
        )

    def get_encoder_cudagraph_budget_range(self, config: Any = None) -> tuple[int, int]:
        """Smallest and largest budget worth a graph, in tokens: a 256x256 image, a 3840x2160
        one."""
        return 64, 8192

    def get_encoder_cudagraph_num_items(self, mm_kwargs: dict[str, Any]) -> int:
        """Items of the batch."""
        return len(self.grids_of(mm_kwargs))

    def get_encoder_cudagraph_per_item_output_tokens(self, mm_kwargs: dict[str, Any]) -> list[int]:
        """Output rows of each item."""
        unit = self.config.spatial_merge_size**2
        return [patches // unit for patches in self.grids_of(mm_kwargs).num_patches]

    def get_encoder_cudagraph_per_item_input_sizes(self, mm_kwargs: dict[str, Any]) -> list[int]:
        """Pixel rows of each item."""
        return self.grids_of(mm_kwargs).num_patches

    def get_encoder_cudagraph_per_item_sequences(self, mm_kwargs: dict[str, Any]) -> list[int]:
        """Attention sequences of each item: its frames."""
        return [t for t, _, _ in self.grids_of(mm_kwargs)]

    def make_encoder_inputs(self, grids: list[Grid]) -> dict[str, Any]:
        """A batch of random images, to warm up with."""
        patches = sum(t * h * w for t, h, w in grids)
        rng = torch.Generator(self.device).manual_seed(0)  # the caller's stays as it is
        shape = patches, self.config.patch_width
        pixels = torch.randn(shape, generator=rng, device=self.device)
        if self.pixel_dtype == torch.uint8:
            pixels = pixels.mul_(64).add_(128).clamp_(0, 255)
        return {"pixel_values": pixels.to(self.pixel_dtype), "image_grid_thw": list(grids)}

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        """The sub-batch of `indices`, in that order; a view of the pixels where the items are
        neighbours."""
        pixel_key, grid_key = self._keys(mm_kwargs)
        pixels, grids = mm_kwargs[pixel_key], self.grids_of(mm_kwargs)
        if indices == list(range(len(grids))):
            return mm_kwargs
        starts = [0]
        for patches in grids.num_patches:
            starts.append(starts[-1] + patches)
        runs: list[list[int]] = []
        for index in indices:
            if runs and runs[-1][1] == index:
                runs[-1][1] = index + 1
            else:
                runs.append([index, index + 1])
        slices = [pixels[starts[first] : starts[last]] for first, last in runs]
        return {
            pixel_key: slices[0] if len(slices) == 1 else torch.cat(slices),
            grid_key: Grids(grids[index] for index in indices),
        }

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> EncoderCudaGraphCaptureInputs:
        """Buffers of one budget: pixels, grids with one item that fills the budget, and the
        output."""
        self.module.check_modules()
        merge = self.config.spatial_merge_size
        patches = token_budget * merge**2
        grid_thw = host_grids([(1, merge, patches // merge)], max_batch_size, self.device)
        max_sequences = min(token_budget, max_frames_per_batch)
        plan = replace(self._plan(patches, max_sequences), branches=patches <= BRANCH_ROWS)
        self.plans[token_budget] = plan
        return EncoderCudaGraphCaptureInputs(
            mm_kwargs={
                "pixel_values": torch.zeros(
                    patches, self.config.patch_width, device=device, dtype=self.pixel_dtype
                ),
                "max_sequences": max_sequences,
                "plan": plan,
            },
            buffers={
                "grid_thw": grid_thw.to(device),
                "output": torch.zeros(
                    token_budget, self.config.output_width, device=device, dtype=dtype
                ),
            },
        )

    def _plan(self, patches: int, max_sequences: int) -> Plan:
        shared = self.parallel is not None and self.parallel.shares(patches)
        measured = is_measured(self.module) and not shared
        return self._measured_plan(patches, max_sequences) if measured else self.module.plan

    def _measured_plan(self, patches: int, max_sequences: int) -> Plan:
        """Measured once: vLLM captures twice, first to see how much memory that takes."""
        encoder = self.module
        key = encoder.device, encoder.dtype, patches, max_sequences, encoder.requested_attention
        if key not in self._measured:
            self._measured[key] = calibrate(encoder, patches, max_sequences)
        return self._measured[key]

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int
    ) -> EncoderCudaGraphReplayBuffers:
        """The grids of the batch on the host, all slots: unused ones are zero."""
        grids = self.grids_of(mm_kwargs)
        slots = host_grids(grids, max_batch_size, self.device)
        return EncoderCudaGraphReplayBuffers({"grid_thw": slots})

    @torch.no_grad()
    def encoder_cudagraph_forward(
        self, mm_kwargs: dict[str, Any], buffers: dict[str, Tensor]
    ) -> Tensor:
        """The capturable forward: static buffers in, `buffers["output"]` out."""
        pixels, grid_thw = mm_kwargs["pixel_values"], buffers["grid_thw"]
        out, max_sequences, seqlens = buffers["output"], mm_kwargs["max_sequences"], None
        if grid_thw.device.type == "cpu":
            # Nothing is captured on the CPU, and reading the grids is free: compute the real rows
            # only.
            grids = Grids(tuple(grid) for grid in grid_thw.tolist())
            seqlens, patches = grids.seqlens, sum(grids.num_patches)
            pixels, out = pixels[:patches], out[: patches // self.config.spatial_merge_size**2]
            max_sequences = len(seqlens)
        layout = self.module.make_layout(grid_thw, len(pixels), max_sequences, seqlens)
        return self.module.encode(pixels, layout, out, mm_kwargs["plan"], self.parallel)

    def warm_up_encoder_eager(self) -> None:
        """Run every kernel that an eager forward may choose, so that a miss compiles nothing."""
        if self.device.type == "cuda":
            for grids in EAGER_SHAPES:
                batch = self.make_encoder_inputs(grids)
                self.module(batch["pixel_values"], grids, parallel=self.parallel)
            torch.cuda.empty_cache()  # graphs use nothing of what these runs left behind

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any]) -> Tensor:
        """The forward for a batch that no graph serves."""
        pixel_key, grid_key = self._keys(mm_kwargs)
        pixels, grids = mm_kwargs[pixel_key], mm_kwargs[grid_key]
        return self.module(pixels, grids, parallel=self.parallel)

    @staticmethod
    def _keys(mm_kwargs: dict[str, Any]) -> tuple[str, str]:
        return KEYS["image" if "image_grid_thw" in mm_kwargs else "video"]

    def grids_of(self, mm_kwargs: dict[str, Any]) -> Grids:
        """Of a batch, in the order of its items."""
        return check_grids(mm_kwargs[self._keys(mm_kwargs)[1]], self.config.spatial_merge_size)
