"""The forward pass: pixels and layout in, embeddings out; what a graph holds.

Nothing here reads a value of a tensor on the host.

Legend: P patches, T tokens, C hidden, H heads, D head_dim.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vitgraph.encoder.attention.backends import BACKENDS, fixed
from vitgraph.encoder.attention.trial import Heads
from vitgraph.encoder.config import VisionConfig
from vitgraph.encoder.modules import Block, Merger, PatchEmbed
from vitgraph.encoder.operations import Operations, Plan
from vitgraph.kernels.layout import Layout
from vitgraph.kernels.linear import PixelNormalization


class Tower(Protocol):
    """What the forward reads of an encoder."""

    config: VisionConfig
    ops: Operations
    normalization: PixelNormalization
    frequencies: Tensor
    patch_embed: PatchEmbed
    pos_embed: nn.Embedding
    blocks: nn.ModuleList
    merger: Merger
    deepstack_merger_list: nn.ModuleList

    @property
    def heads(self) -> Heads:
        """What attention needs to know."""


def forward(tower: Tower, pixels: Tensor, layout: Layout, out: Tensor, plan: Plan) -> Tensor:
    """Run the forward pass.

    Args:
        pixels: [P, 1536] in the tower's dtype or uint8; rows past the layout's may hold anything.
        layout: where the real rows are, for the same capacity P.
        out: [P / 4, output_width], written up to the real tokens: the merger's columns, then those
            of each deepstack level.
        plan: how this capacity is computed.
    """
    config, ops = tower.config, tower.ops
    rows, coords = layout.num_patches, layout.coords
    merged, *levels = out.split(config.out_hidden_size, dim=1)
    build = fixed if plan.batch_invariant else BACKENDS[plan.attention]
    attend = build(layout, tower.heads)
    normalization = tower.normalization if pixels.dtype == torch.uint8 else None

    def linear(name: str, layer: nn.Linear, x: Tensor, **options: Any) -> Tensor:
        options.setdefault("num_rows", rows)
        provider = plan.providers.get(name)
        return ops.linear(x, layer.weight, layer.bias, provider=provider, **options)

    def layer_norm(norm: nn.LayerNorm, x: Tensor, num_rows: Tensor = rows) -> Tensor:
        return ops.layer_norm(x, norm.weight, norm.bias, norm.eps, num_rows)

    def block(layer: Block, x: Tensor) -> Tensor:
        # One name: what is no longer needed is freed before attention takes its scratch.
        y = layer_norm(layer.norm1, x)
        y = linear("qkv", layer.attn.qkv, y, out=qkv_buffer)
        y = y.view(-1, 3, config.num_heads, config.head_dim)
        y = attend(ops.rotary(y, table, rows))
        x = linear("proj", layer.attn.proj, y, residual=x, out=x)
        y = layer_norm(layer.norm2, x)
        fc1, fc2 = layer.mlp.linear_fc1, layer.mlp.linear_fc2
        providers = plan.providers.get("fc1"), plan.providers.get("fc2")
        return ops.mlp(
            y, fc1.weight, fc1.bias, fc2.weight, fc2.bias, x, rows, inner=inner, providers=providers
        )

    def merge(merger: Merger, x: Tensor, columns: Tensor) -> None:
        """The 2x2 shuffle is a view: the patches of a token are consecutive rows."""
        tokens, width = layout.num_tokens, merger.linear_fc1.in_features
        if merger.norm.normalized_shape[0] == width:
            y = layer_norm(merger.norm, x.view(-1, width), tokens)
        else:
            y = layer_norm(merger.norm, x).view(-1, width)
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
    x = linear("embed", tower.patch_embed.proj, pixels, normalization=normalization)
    ops.position_embedding(x, tower.pos_embed.weight, coords, rows)
    table = ops.rotary_table(coords, tower.frequencies, rows)
    for depth, layer in enumerate(tower.blocks):
        assert isinstance(layer, Block)
        x = block(layer, x)
        if depth in config.deepstack_visual_indexes:
            level = config.deepstack_visual_indexes.index(depth)
            merger = tower.deepstack_merger_list[level]
            assert isinstance(merger, Merger)
            merge(merger, x, levels[level])
    merge(tower.merger, x, merged)
    return out
