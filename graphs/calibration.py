"""Choose how one capacity is computed by measuring, once, before its graph is captured: on GPUs
that the tables of vitgraph.kernels were not made for.

Providers that read the number of rows on the device cost what the rows cost; cuBLAS always computes
the whole capacity. Where budgets are powers of two, a replay fills half of its budget or more: a
layer is timed with half of the rows and with all of them, and the smaller sum wins.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor, nn

from vitgraph.encoder import Qwen3VLVisionEncoder
from vitgraph.encoder.attention.backends import BACKENDS, capability
from vitgraph.encoder.attention.flash import describe
from vitgraph.encoder.modules import Block
from vitgraph.encoder.operations import FP8_LAYERS, LAYERS, Plan
from vitgraph.kernels.launch import hopper_tier_unavailable, side_stream
from vitgraph.kernels.linear import Activation, Provider, linear, linear_providers

LAUNCHES, ROUNDS = 10, 5
TYPICAL_SEQUENCE = 1024  # patches of a 512x512 image


@dataclass(frozen=True)
class Layer:
    """A layer in LAYERS: its modules of all blocks (or mergers), and what they are called with."""

    modules: Sequence[nn.Linear]
    activation: Activation | None = None
    per_token: bool = False
    has_residual: bool = False


def is_measured(encoder: Qwen3VLVisionEncoder) -> bool:
    """Whether plans are measured here. On a Hopper GPU with its kernels, in 16 bits, the tables
    serve: they lose less than 2 % against measured plans on the batches of `vitgraph bench`
    (bench/plans.py), and nothing has to be timed before a capture."""
    if encoder.device.type != "cuda" or encoder.ops.name != "triton" or encoder.batch_invariant:
        return False
    return encoder.dtype == torch.float32 or hopper_tier_unavailable(encoder.device) is not None


def calibrate(encoder: Qwen3VLVisionEncoder, num_patches: int, max_sequences: int) -> Plan:
    """Measure the candidates of every layer, and of the attention where it may be chosen (the
    encoder's `attention` is "auto").

    Args:
        num_patches: capacity in pixel rows.
        max_sequences: capacity in attention sequences.

    Returns:
        The plan, its `microseconds` telling what was measured for each candidate.
    """
    measured: dict[str, dict[str, float]] = {}
    providers: dict[str, Provider] = {}
    every_block_is_fp8 = (
        len(encoder.fp8_blocks) == encoder.config.depth and num_patches >= encoder.fp8_min_patches
    )
    for name in LAYERS:
        if name in FP8_LAYERS and every_block_is_fp8:
            continue
        times = _time_layer(encoder, name, num_patches)
        if len(times) > 1:
            measured[name] = dict(times.items())
            providers[name] = min(times, key=times.__getitem__)
    plan = replace(encoder.plan, providers=providers)
    if encoder.auto_attention:
        backends, left_out = _time_attention(encoder, num_patches, max_sequences)
        measured["attention"] = backends
        plan = replace(plan, attention=min(backends, key=backends.__getitem__), left_out=left_out)
    return replace(plan, microseconds=measured)


def _time_layer(
    encoder: Qwen3VLVisionEncoder, name: str, num_patches: int
) -> dict[Provider, float]:
    """Microseconds of each provider: the mean of a half full and a full capacity."""
    layer = layer_of(encoder, name)
    rows = num_patches // encoder.config.spatial_merge_size**2 if layer.per_token else num_patches
    weight = layer.modules[0].weight
    dtype = encoder.pixel_dtype if name == "embed" else encoder.dtype
    providers = linear_providers(encoder.device, dtype, rows, *weight.shape)
    if len(providers) == 1:
        return {providers[0]: 0.0}
    x = _random(encoder, dtype, rows, weight.shape[1])
    out = _random(encoder, encoder.dtype, rows, weight.shape[0])
    num_rows = torch.empty(1, dtype=torch.int32, device=encoder.device)
    times: dict[Provider, float] = {}
    for provider in providers:
        turns = cycle(layer.modules)  # as in a forward, weights come from memory, not from L2

        def call(provider: Provider = provider, turns: Iterator[nn.Linear] = turns) -> None:
            module = next(turns)
            linear(
                x,
                module.weight,
                module.bias,
                activation=layer.activation,
                # cuBLAS takes one more kernel for it here, what the next norm does in a forward
                residual=out if layer.has_residual else None,
                num_rows=num_rows,
                out=out,
                provider=provider,
            )

        times[provider] = _microseconds(call, num_rows, (rows // 2, rows)) / 2
    return times


def layer_of(encoder: Qwen3VLVisionEncoder, name: str) -> Layer:
    """A layer in LAYERS."""
    blocks = [block for block in encoder.blocks if isinstance(block, Block)]
    mergers = [encoder.merger, *encoder.deepstack_merger_list]
    layers: dict[str, Layer] = {
        "embed": Layer([encoder.patch_embed.proj]),
        "qkv": Layer([block.attn.qkv for block in blocks]),
        "proj": Layer([block.attn.proj for block in blocks], has_residual=True),
        "fc1": Layer([block.mlp.linear_fc1 for block in blocks], "gelu_tanh"),
        "fc2": Layer([block.mlp.linear_fc2 for block in blocks], has_residual=True),
        "merger_fc1": Layer([merger.linear_fc1 for merger in mergers], "gelu", per_token=True),
        "merger_fc2": Layer([merger.linear_fc2 for merger in mergers], per_token=True),
    }
    return layers[name]


def _time_attention(
    encoder: Qwen3VLVisionEncoder, num_patches: int, max_sequences: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds of each backend that serves: one item that fills the capacity, and items of
    512x512. And why the others were left out: a library may raise whatever it likes."""
    config, merge = encoder.config, encoder.config.spatial_merge_size
    qkv = _random(encoder, encoder.dtype, num_patches, 3, config.num_heads, config.head_dim)
    short = max(min(TYPICAL_SEQUENCE, num_patches), num_patches // max_sequences)
    grids = [[[1, merge, num_patches // merge]], [[num_patches // short, merge, short // merge]]]
    layouts = [
        encoder.make_layout(
            torch.tensor(grid, dtype=torch.int32, device=encoder.device),
            num_patches,
            max_sequences,
        )
        for grid in grids
    ]
    times: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for name, build in BACKENDS.items():
        try:
            serves = capability(name, encoder.heads, encoder.device)
            if not (serves.ok and serves.capturable and serves.isolates):
                left_out[name] = serves.reason
                continue
            times[name] = 0.0
            for layout in layouts:
                attend = build(layout, encoder.heads)
                best = min((us for other, us in times.items() if other != name), default=math.inf)
                times[name] += _microseconds(partial(attend, qkv), give_up=3 * best + 2000)
        except Exception as error:
            if name == "triton":  # nothing else is sure to serve
                raise
            times.pop(name, None)
            left_out[name] = describe(error)
    return times, left_out


def _random(encoder: Qwen3VLVisionEncoder, dtype: torch.dtype, *shape: int) -> Tensor:
    """From a generator of its own: the caller's stays as it is."""
    rng = torch.Generator(encoder.device).manual_seed(0)
    return torch.randn(shape, generator=rng, device=encoder.device, dtype=dtype)


def _microseconds(
    call: Callable[[], object],
    num_rows: Tensor | None = None,
    rows: Sequence[int] = (0,),
    give_up: float = math.inf,
) -> float:
    """Median time of one call inside a replayed graph, summed over the row counts. A call that
    takes longer than `give_up` is measured once, eagerly."""
    stream = side_stream(torch.device("cuda", torch.cuda.current_device()))
    stream.wait_stream(torch.cuda.current_stream())
    total = 0.0
    try:
        with torch.cuda.stream(stream):
            if num_rows is not None:
                num_rows.fill_(rows[0])
            call()
            if give_up < math.inf and (once := _elapsed(call)) > give_up:
                return once
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(LAUNCHES):
                    call()
            for count in rows:
                if num_rows is not None:
                    num_rows.fill_(count)
                times = sorted(_elapsed(graph.replay) for _ in range(ROUNDS))
                total += times[ROUNDS // 2] / LAUNCHES
    finally:  # also where a library raised: what it launched may still write
        torch.cuda.current_stream().wait_stream(stream)
    return total


def _elapsed(call: Callable[[], object]) -> float:
    """Microseconds of one call on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
