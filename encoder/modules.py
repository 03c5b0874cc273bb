"""Parameters under the checkpoints' names; the forward pass is in forward.py."""

import torch
from torch import nn

from vitgraph.encoder.config import VisionConfig


class PatchEmbed(nn.Module):
    """Patches [P, 1536] to hidden rows, one matrix product."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.patch_width, config.hidden_size)


class Attention(nn.Module):
    """Packed qkv projection, and the projection after attention."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)


class MLP(nn.Module):
    """Two layers with tanh-GELU between them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.attn = Attention(config)
        self.mlp = MLP(config)


class Merger(nn.Module):
    """LayerNorm and two layers over the 2x2 patches of a token."""

    def __init__(self, config: VisionConfig, norm_after_shuffle: bool) -> None:
        super().__init__()
        width = config.hidden_size * config.spatial_merge_size**2
        self.norm = nn.LayerNorm(width if norm_after_shuffle else config.hidden_size, eps=1e-6)
        self.linear_fc1 = nn.Linear(width, width)
        self.linear_fc2 = nn.Linear(width, config.out_hidden_size)


class VisionModules(nn.Module):
    """The whole tower's parameters."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.merger = Merger(config, norm_after_shuffle=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(config, norm_after_shuffle=True) for _ in config.deepstack_visual_indexes
        )

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.pos_embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters and of the output."""
        return self.pos_embed.weight.dtype
