"""One batch over several GPUs: each rank computes a share of the rows, weights are replicated.

    rank r: embeds, projects and merges its own rows; attends from them to the keys and values of
            all sequences they are part of, whoever computed those

For each layer, q, k and v of all ranks are gathered; after the last one, the output rows. Nothing
else is exchanged, and nothing is read on the host: the forward is captured with its collectives.

Legend: P patches, S capacity of a share in patches, H heads, D head_dim.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from vitgraph.encoder.attention.trial import Attend
from vitgraph.encoder.forward import Tower, forward
from vitgraph.encoder.operations import Plan
from vitgraph.kernels.attention import attention, attention_reference
from vitgraph.kernels.attention_config import attention_config
from vitgraph.kernels.attention_schedule import attention_schedule
from vitgraph.kernels.launch import cdiv
from vitgraph.kernels.layout import Layout
from vitgraph.kernels.share import Share, own_layout, share

# 512 tokens: below, a rank has too few rows to pay for a collective a layer.
MIN_PATCHES = 2048
# Its name from torch 2.13 on; the older one warns there.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SequenceParallel:
    """The ranks that compute every batch together.

    Args:
        group: a process group in which every rank has the same weights and gets the same batches,
            in the same order; the default group if None.
        min_patches: capacities below are computed whole by every rank, without a word between them.

    Attributes:
        collectives: how many were launched, captured ones at capture alone.

    Attention is ours whatever the encoder's backend: others cannot attend from a range of rows.

    Raises:
        ValueError: this process is not in the group.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, min_patches: int = MIN_PATCHES
    ) -> None:
        self.group, self.min_patches = group, min_patches
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group")
        self.collectives = 0

    def shares(self, num_patches: int) -> bool:
        """Whether batches of this capacity are shared."""
        return self.ranks > 1 and num_patches >= self.min_patches

    def forward(
        self, tower: Tower, pixels: Tensor, layout: Layout, out: Tensor, plan: Plan
    ) -> Tensor:
        """`vitgraph.encoder.forward` of all rows: `pixels`, `layout` and `out` are those of the
        whole batch, on every rank. A collective operation.

        Raises:
            ValueError: a batch-invariant encoder; shares cut sequences where the batch says.
        """
        if plan.batch_invariant:
            raise ValueError("batch_invariant: the rows of a sequence are not shared over ranks")
        if not self.shares(len(pixels)):
            return forward(tower, pixels, layout, out, plan)
        ops, merge = tower.ops, tower.config.spatial_merge_size
        capacity = cdiv(len(out), self.ranks) * merge**2
        own = share(layout, self.rank, self.ranks, merge)
        # Zeros: plain torch looks positions up for the rows behind a short share, too.
        coords = ops.take_rows(layout.coords, own.queries, layout.coords.new_zeros(capacity, 4))
        own_pixels = ops.take_rows(pixels, own.queries, pixels.new_empty(capacity, pixels.shape[1]))
        rows = out.new_empty(self.ranks, capacity // merge**2, out.shape[1])
        attend = self._attend(tower, layout, own, capacity)
        layout = own_layout(layout, own, coords, merge)
        forward(tower, own_pixels, layout, rows[self.rank], plan, attend, whole=len(pixels))
        self._gather(rows, rows[self.rank])
        return ops.collect_rows(rows, own.tokens_per_rank, own.tokens, out)

    def _gather(self, parts: Tensor, own: Tensor) -> None:
        """[S, C] of every rank into [ranks, S, C]."""
        self.collectives += 1
        all_gather(parts.flatten(0, 1), own, group=self.group)

    def _attend(self, tower: Tower, layout: Layout, own: Share, capacity: int) -> Attend:
        """Attention of a rank's queries, [S, 3, H, D] in and [S, H * D] out."""
        ops, heads, offsets = tower.ops, tower.heads, layout.cu_seqlens
        num_patches, width = len(layout.coords), heads.count * heads.dim

        def buffer(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=heads.dtype, device=offsets.device)

        parts = buffer(self.ranks, capacity, 3 * width)
        qkv = buffer(num_patches, 3, heads.count, heads.dim)
        own_attended, schedule = buffer(capacity, width), None
        if ops.name == "triton":
            expected = len(layout.seqlens) if layout.seqlens is not None else 1
            config = attention_config(
                capacity, expected, heads.count, heads.dim, heads.dtype, offsets.device
            )
            schedule = attention_schedule(
                offsets, num_patches, heads.count, config, layout.num_sequences, own.queries
            )

        def attend(own_qkv: Tensor) -> Tensor:
            self._gather(parts, own_qkv.flatten(1))
            ops.collect_rows(parts, own.per_rank, own.keys, qkv.view(num_patches, -1))
            if schedule is not None:
                attended = attention(qkv, offsets, schedule=schedule)
            else:
                attended = attention_reference(qkv, offsets, own.queries)
            return ops.take_rows(attended, own.queries, own_attended)

        return attend
