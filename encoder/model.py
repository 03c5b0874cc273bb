"""The Qwen3-VL vision encoder, with deepstack or without, as a PyTorch module.

Legend: P patches, T tokens, C hidden, H heads, D head_dim.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from vitgraph.encoder.attention.backends import resolve_backend
from vitgraph.encoder.attention.trial import Heads
from vitgraph.encoder.checkpoint import PATCH_EMBED, load_vision_weights, open_checkpoint, our_name
from vitgraph.encoder.config import VisionConfig
from vitgraph.encoder.forward import forward
from vitgraph.encoder.inputs import (
    Grids,
    check_channels,
    check_fp8,
    check_grids,
    check_invariant,
    check_options,
    check_pixels,
    host_grids,
    outlives,
)
from vitgraph.encoder.modules import VisionModules
from vitgraph.encoder.operations import OpsName, Plan, fixed_plan, resolve_operations
from vitgraph.encoder.sequence_parallel import SequenceParallel
from vitgraph.encoder.sharing import config_of, why_not_shareable, why_not_transformers
from vitgraph.encoder.structure import Structure, why_not_plain
from vitgraph.kernels.launch import on_device
from vitgraph.kernels.layout import Layout
from vitgraph.kernels.linear import PixelNormalization
from vitgraph.kernels.rotary import rotary_frequencies


class Qwen3VLVisionEncoder(VisionModules):
    """Pixels and grids in, embeddings out; inference only.

    Args:
        config: geometry.
        device, dtype: of the parameters; dtype is float32, bfloat16, float16 or, with torch
            operations, float64.
        attention: "auto" or a backend of `encoder.attention`, by our name or vLLM's.
        ops: "triton" kernels, plain "torch" operations, or "auto": Triton on a GPU.
        pixel_dtype: what a manager takes and captures for: None for `dtype`, or torch.uint8 for
            patches that are normalised on load; the encoder itself takes both.
        batch_invariant: an item gives the same bits alone, in any pack, eagerly and in a graph.
            Triton kernels only, in one tiling; slower, small batches the most.
        linear_dtype: "same", or "fp8" for qkv, fc1 and fc2 of the blocks, in forwards with a
            capacity of at least `fp8_min_patches`: smaller ones are faster in `dtype`.
        fp8_skip_blocks: the first so many blocks stay in `dtype`, for accuracy.

    Weights are uninitialised until `from_pretrained`, `from_transformers`, `random` or
    `load_state_dict` fill them.
    """

    fp8_min_patches = 2049

    def __init__(
        self,
        config: VisionConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        attention: str = "auto",
        ops: OpsName = "auto",
        pixel_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
        linear_dtype: str = "same",
        fp8_skip_blocks: int = 0,
    ) -> None:
        with torch.device("meta"):
            super().__init__(config)
        check_options(config, device, dtype, pixel_dtype)
        if batch_invariant:
            check_invariant(attention, ops)
        self.fp8_blocks = check_fp8(config, linear_dtype, fp8_skip_blocks, batch_invariant)
        self.normalization = PixelNormalization((0.5,) * 3, (0.5,) * 3)
        self.takes_bytes = pixel_dtype == torch.uint8
        self.batch_invariant = batch_invariant
        self._requested = ("triton", "triton") if batch_invariant else (attention, ops)
        self._settled_for: tuple[torch.device, torch.dtype] | None = None
        self._structure: Structure | None = None
        self.to(dtype).to_empty(device=device).requires_grad_(False)
        self._settle()

    def _settle(self) -> None:
        """Choose what depends on where the parameters live, and in which dtype."""
        device, (attention, ops) = self.device, self._requested
        if device.type == "meta" or self._settled_for == (device, self.dtype):
            return
        frequencies = rotary_frequencies(self.config.head_dim, self.config.rope_theta, device)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.ops = resolve_operations(ops, device, self.dtype, fp8=bool(self.fp8_blocks))
        backend = resolve_backend(attention, self.heads, device)
        self.plan = fixed_plan() if self.batch_invariant else Plan(backend)
        self._settled_for = (device, self.dtype)

    def check_modules(self) -> None:
        """Look for what is on the submodules that the forward reads past, and settle where the
        weights are now. Costs next to nothing where no submodule changed.

        Raises:
            ValueError: naming the submodule or weight, what is on it, and what to do.
        """
        self._settle()
        if self._structure is not None and self._structure.unchanged():
            return
        reason = why_not_plain(self, "the encoder's") or why_not_shareable(self, self.config)
        if reason is not None:
            raise ValueError(reason)
        self._structure = Structure(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """What .to(), .cuda() and .half() come down to; the choices follow."""
        frequencies = self._buffers.get("frequencies")
        super()._apply(fn, recurse)
        if frequencies is not None:  # neither rounded nor emptied; made anew on another device
            self.frequencies = frequencies
        self._settle()
        return self

    @classmethod
    def from_pretrained(
        cls, model: str | Path, *, revision: str | None = None, **kwargs: Any
    ) -> Self:
        """Load the vision tower of a checkpoint; weights in e4m3 become values times scales.

        Args:
            model: local directory or hub repository id; only the shards that hold the tower are
                read.
            revision: of the hub repository.
            kwargs: device, dtype and the other options of an encoder.

        Raises:
            ValueError: what is no checkpoint, or does not fit its own config, by name.
        """
        checkpoint = open_checkpoint(model, revision)
        encoder = cls(VisionConfig.from_pretrained(model, revision), **kwargs)
        kernel = (encoder.config.in_channels, encoder.config.temporal_patch_size)
        load_vision_weights(encoder, checkpoint, kernel)
        image, _ = checkpoint.processor_settings()
        # Of bytes, which have three channels.
        if encoder.config.in_channels == 3 and image and {"image_mean", "image_std"} <= set(image):
            try:
                mean, std = image["image_mean"], image["image_std"]
                encoder.normalization = PixelNormalization.of(mean, std)
            except ValueError as error:
                raise ValueError(f"{checkpoint.name}: the image processor's {error}") from None
        return encoder

    @classmethod
    def from_transformers(cls, vision_model: Any, **options: Any) -> Self:
        """Wrap a vision tower of transformers, an instance of one of `encoder.config.TOWERS`; the
        weights are shared, not copied.

        Args:
            options: of an encoder; device and dtype are the tower's.

        Raises:
            ValueError: another kind of tower, or what is on it that the encoder does not compute,
                by name.
        """
        config = config_of(vision_model)
        if reason := why_not_transformers(vision_model, config):
            raise ValueError(reason)
        dtype = vision_model.patch_embed.proj.weight.dtype
        encoder = cls(config, device="meta", dtype=dtype, **options)
        encoder.share_weights(vision_model)
        return encoder

    def share_weights(self, vision_model: Any) -> None:
        """Use the parameters of transformers' or vLLM's tower, wherever they are now; nothing is
        copied but the norms' eps."""
        theirs = {our_name(name): p.detach() for name, p in vision_model.named_parameters()}
        shared = theirs | {PATCH_EMBED: theirs[PATCH_EMBED].reshape(-1, self.config.patch_width)}
        self.load_state_dict(shared, assign=True)
        self.requires_grad_(False)
        modules = {our_name(name): module for name, module in vision_model.named_modules()}
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = modules[name].eps
        self._settle()

    @classmethod
    def random(cls, config: VisionConfig, *, seed: int = 0, **kwargs: Any) -> Self:
        """Build with random weights: matrices and tables N(0, 0.02), norms around 1; for demos and
        benchmarks."""
        encoder = cls(config, **kwargs)
        generator = torch.Generator(encoder.device).manual_seed(seed)
        for name, parameter in encoder.named_parameters():
            parameter.normal_(std=0.02, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
        return encoder

    @property
    def pixel_dtype(self) -> torch.dtype:
        """What graphs are captured for: `dtype`, or torch.uint8."""
        return torch.uint8 if self.takes_bytes else self.dtype

    @property
    def heads(self) -> Heads:
        """What attention needs to know."""
        return Heads(self.config.num_heads, self.config.head_dim, self.dtype)

    @property
    def requested_attention(self) -> str:
        """The attention backend that was asked for, "auto" among them."""
        return self._requested[0]

    @property
    def auto_attention(self) -> bool:
        """Whether a capture may choose the attention backend."""
        return self.requested_attention == "auto"

    @property
    def attention(self) -> str:
        """The attention backend in use."""
        return self.plan.attention

    @torch.no_grad()
    def forward(
        self, pixel_values: Tensor, grid_thw: Any, *, parallel: SequenceParallel | None = None
    ) -> Tensor:
        """Encode items eagerly.

        Args:
            pixel_values: [patches, 1536], floating point or uint8, on any device; patches of an
                item are consecutive and in spatial-merge order, as Qwen's processors write them.
                Pinned host memory must stay as it is until the result is there.
            grid_thw: [items, 3] integers (t, h, w) in patches, in any form (list, array, tensor).
            parallel: the ranks that compute this batch together; all of them call this.

        Returns:
            [tokens, (1 + levels) * out_hidden_size]: the merger's columns, then each deepstack
            level's.

        Raises:
            ValueError: naming the item that does not fit, or what is on the encoder's modules that
                would be left out, before anything runs.
        """
        self.check_modules()
        pixels, grids = self.check_inputs(pixel_values, grid_thw)
        if self.batch_invariant and not self.takes_bytes and pixels.dtype == torch.uint8:
            pixels = self.normalization.normalize(pixels.to(self.device), self.dtype)  # as managers
        dtype = torch.uint8 if pixels.dtype == torch.uint8 else self.dtype
        pixels = pixels.to(self.device, non_blocking=outlives(pixels, self.device))
        pixels = pixels.to(dtype).contiguous()
        tokens = len(pixels) // self.config.spatial_merge_size**2
        out = torch.empty(tokens, self.config.output_width, dtype=self.dtype, device=self.device)
        if len(grids) == 0:
            return out
        grid_tensor = host_grids(grids, len(grids), self.device).to(self.device, non_blocking=True)
        with on_device(self.device):
            layout = self.make_layout(grid_tensor, len(pixels), len(grids.seqlens), grids.seqlens)
            return self.encode(pixels, layout, out, parallel=parallel)

    def check_inputs(self, pixel_values: Any, grid_thw: Any) -> tuple[Tensor, Grids]:
        """The arguments of `forward`, checked.

        Raises:
            ValueError: naming the item that does not fit, or bytes that have not three channels.
        """
        grids = check_grids(grid_thw, self.config.spatial_merge_size)
        pixels = check_pixels(pixel_values, grids, self.config.patch_width)
        if pixels.dtype == torch.uint8:
            check_channels(self.config)
        return pixels, grids

    def make_layout(
        self,
        grid_thw: Tensor,
        num_patches: int,
        max_sequences: int,
        seqlens: tuple[int, ...] | None = None,
    ) -> Layout:
        """Derive where the rows of a batch are; see `vitgraph.kernels.layout`."""
        merge = self.config.spatial_merge_size
        return self.ops.layout(grid_thw, num_patches, max_sequences, merge, seqlens)

    def encode(
        self,
        pixels: Tensor,
        layout: Layout,
        out: Tensor,
        plan: Plan | None = None,
        parallel: SequenceParallel | None = None,
    ) -> Tensor:
        """`vitgraph.encoder.forward`, with the encoder's own plan where none is given, in the dtype
        of the weights: autocast does not reach it. With `parallel`, of all ranks together."""
        run = forward if parallel is None else parallel.forward
        if not torch.is_autocast_enabled(self.device.type):
            return run(self, pixels, layout, out, plan or self.plan)
        with torch.autocast(self.device.type, enabled=False):
            return run(self, pixels, layout, out, plan or self.plan)
