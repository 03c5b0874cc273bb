"""The forward pass: pixels and layout in, embeddings out; what a graph holds.

Nothing here reads a value of a tensor on the host.

Legend: P patches, T tokens, C hidden, H heads, D head_dim.
"""

from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vitgraph.encoder.attention.backends import BACKENDS, fixed
from vitgraph.encoder.attention.trial import Attend, Heads
from vitgraph.encoder.branches import Beside, branching
from vitgraph.encoder.config import VisionConfig
from vitgraph.encoder.modules import Block, Merger, PatchEmbed
from vitgraph.encoder.operations import Operations, Plan
from vitgraph.kernels.fp8.linear_fp8 import scales_of
from vitgraph.kernels.fp8.quantize import E4M3
from vitgraph.kernels.layer_norm import normalized_scale
from vitgraph.kernels.layout import Layout
from vitgraph.kernels.linear import PixelNormalization, adds_apart


class Residual:
    """The residual stream [P, C], and what its next norm adds to it: taken once, as it is memory
    that is wanted again."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.added: Tensor | None = None

    def take(self) -> Tensor | None:
        added, self.added = self.added, None
        return added


class Tower(Protocol):
    """What the forward reads of an encoder."""

    config: VisionConfig
    ops: Operations
    normalization: PixelNormalization
    frequencies: Tensor
    fp8_blocks: range
    fp8_min_patches: int
    patch_embed: PatchEmbed
    pos_embed: nn.Embedding
    blocks: nn.ModuleList
    merger: Merger
    deepstack_merger_list: nn.ModuleList

    @property
    def heads(self) -> Heads:
        """What attention needs to know."""


def forward(
    tower: Tower,
    pixels: Tensor,
    layout: Layout,
    out: Tensor,
    plan: Plan,
    attend: Attend | None = None,
    whole: int | None = None,
) -> Tensor:
    """Run the forward pass.

    Args:
        pixels: [P, 1536] in the tower's dtype or uint8; rows past the layout's may hold anything.
        layout: where the real rows are, for the same capacity P.
        out: [P / 4, output_width], written up to the real tokens: the merger's columns, then those
            of each deepstack level.
        plan: how this capacity is computed.
        attend: attention where it is not the plan's, which knows these rows alone.
        whole: capacity of the batch that these rows are a share of.
    """
    config, ops = tower.config, tower.ops
    rows, coords = layout.num_patches, layout.coords
    merged, *levels = out.split(config.out_hidden_size, dim=1)
    if attend is None:
        build = fixed if plan.batch_invariant else BACKENDS[plan.attention]
        attend = build(layout, tower.heads)
    normalization = tower.normalization if pixels.dtype == torch.uint8 else None

    def linear(name: str, layer: nn.Linear, x: Tensor, **options: Any) -> Tensor:
        options.setdefault("num_rows", rows)
        provider = plan.providers.get(name)
        return ops.linear(x, layer.weight, layer.bias, provider=provider, **options)

    def layer_norm(
        norm: nn.LayerNorm, x: Tensor, added: Tensor | None, num_rows: Tensor = rows
    ) -> Tensor:
        return ops.layer_norm(x, norm.weight, norm.bias, norm.eps, num_rows, added)

    def linear_fp8(
        layer: nn.Linear,
        norm: nn.LayerNorm | None,
        x: Tensor,
        scale: float | Tensor,
        **options: Any,
    ) -> Tensor:
        # In every forward, and so in every replay: weights that change in place are never stale.
        # vLLM and SGLang write them through `.data`, which no version counter of torch's sees.
        # It reads 2 bytes a weight and writes 1, for the 27 blocks of the 8B tower 1.1 GB: by bytes
        # about 0.26 ms of an H200 (not measured), and 81 launches. Where once is enough, keep what
        # `quantize` returns here, by layer.
        folded = () if norm is None else (norm.weight, norm.bias)
        quantized = ops.quantize(layer.weight, layer.bias, *folded)
        return ops.linear_fp8(x, scale, quantized, num_rows=rows, **options)

    def qkv_of(layer: Block, residual: Residual, fp8: bool) -> Tensor:
        if fp8:
            y = ops.layer_norm_e4m3(residual.x, layer.norm1.eps, rows, residual.take())
            return linear_fp8(layer.attn.qkv, layer.norm1, y, constant, out=qkv_buffer)
        y = layer_norm(layer.norm1, residual.x, residual.take())
        return linear("qkv", layer.attn.qkv, y, out=qkv_buffer)

    def mlp(layer: Block, residual: Residual, fp8: bool) -> None:
        fc1, fc2, x = layer.mlp.linear_fc1, layer.mlp.linear_fc2, residual.x
        if fp8:
            scales = scales_of(len(x), config.intermediate_size, x.device)
            into = {"activation": "gelu_tanh", "out": inner_fp8, "out_scale": scales}
            y = ops.layer_norm_e4m3(x, layer.norm2.eps, rows, residual.take())
            linear_fp8(fc1, layer.norm2, y, constant, **into)
            residual.x = linear_fp8(fc2, None, inner_fp8, scales, residual=x, out=x)
            return
        y = layer_norm(layer.norm2, x, residual.take())
        weights = fc1.weight, fc1.bias, fc2.weight, fc2.bias
        providers = plan.providers.get("fc1"), plan.providers.get("fc2")
        target = None if apart["fc2"] else x
        y = ops.mlp(y, *weights, target, rows, inner=inner, providers=providers)
        residual.x, residual.added = (x, y) if apart["fc2"] else (y, None)

    def block(layer: Block, residual: Residual, fp8: bool) -> None:
        # One name: what is no longer needed is freed before attention takes its scratch.
        y = qkv_of(layer, residual, fp8)
        y = y.view(-1, 3, config.num_heads, config.head_dim)
        y = attend(ops.rotary(y, table, rows))
        proj, x = layer.attn.proj, residual.x
        if apart["proj"]:
            residual.added = linear("proj", proj, y)
        else:
            residual.x = linear("proj", proj, y, residual=x, out=x)
        mlp(layer, residual, fp8)

    def merge(
        merger: Merger, residual: Residual, columns: Tensor, beside: Beside = nullcontext
    ) -> None:
        """The 2x2 shuffle is a view: the patches of a token are consecutive rows. Only the norm
        reads the residual, which the next block changes."""
        tokens, width = layout.num_tokens, merger.linear_fc1.in_features
        x, added = residual.x, residual.take()
        if merger.norm.normalized_shape[0] == width:
            added = None if added is None else added.view(-1, width)
            y = layer_norm(merger.norm, x.view(-1, width), added, tokens)
        else:
            y = layer_norm(merger.norm, x, added).view(-1, width)
        with beside(y):
            y = linear("merger_fc1", merger.linear_fc1, y, activation="gelu", num_rows=tokens)
            linear("merger_fc2", merger.linear_fc2, y, num_rows=tokens, out=columns)

    # qkv and the MLP's activations are never alive together: one allocation serves both.
    wide = pixels.new_empty(
        len(pixels) * max(3 * config.hidden_size, config.intermediate_size), dtype=out.dtype
    )
    qkv_buffer, inner = (
        wide[: len(pixels) * width].view(len(pixels), width)
        for width in (3 * config.hidden_size, config.intermediate_size)
    )
    inner_fp8 = wide.view(E4M3)[: inner.numel()].view(inner.shape)
    constant = normalized_scale(config.hidden_size)
    x = linear("embed", tower.patch_embed.proj, pixels, normalization=normalization)
    ops.position_embedding(x, tower.pos_embed.weight, coords, rows)
    table = ops.rotary_table(coords, tower.frequencies, rows)
    first = tower.blocks[0]  # its layers have the shapes of all
    assert isinstance(first, Block)
    apart = {
        name: ops.name == "triton" and adds_apart(x, layer.weight, plan.providers.get(name))
        for name, layer in (("proj", first.attn.proj), ("fc2", first.mlp.linear_fc2))
    }
    residual = Residual(x)
    del x
    fp8_blocks = tower.fp8_blocks if (whole or len(pixels)) >= tower.fp8_min_patches else ()
    with branching(pixels.device, plan.branches) as beside:
        for depth, layer in enumerate(tower.blocks):
            assert isinstance(layer, Block)
            block(layer, residual, depth in fp8_blocks)
            if depth in config.deepstack_visual_indexes:
                level = config.deepstack_visual_indexes.index(depth)
                merger = tower.deepstack_merger_list[level]
                assert isinstance(merger, Merger)
                merge(merger, residual, levels[level], beside)
        merge(tower.merger, residual, merged)
    return out
