"""Choose how one capacity is computed by measuring, once, before its graph is captured.

Providers that read the number of rows on the device cost what the rows cost; cuBLAS always computes
the whole capacity. Budgets come in steps of two, so a replay fills half of its budget or more: a
layer is timed with half of the rows and with all of them, and the smaller sum wins.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitgraph.encoder.attention import BACKENDS
from vitgraph.encoder.operations import LAYERS, Plan
from vitgraph.kernels.launch import side_stream
from vitgraph.kernels.linear import Provider, linear, linear_providers

if TYPE_CHECKING:
    from vitgraph.encoder.model import Qwen3VLVisionEncoder

LAUNCHES, ROUNDS = 10, 5
TYPICAL_SEQUENCE = 1024  # patches of a 512x512 image


def calibrate(
    encoder: "Qwen3VLVisionEncoder", num_patches: int, max_sequences: int, auto_attention: bool
) -> Plan:
    """Measure the candidates of every layer, and of the attention where it may be chosen.

    Args:
        num_patches: capacity in pixel rows.
        max_sequences: capacity in attention sequences.
        auto_attention: False keeps the encoder's attention backend.

    Returns:
        The plan, its `microseconds` telling what was measured for each candidate.
    """
    measured: dict[str, dict[str, float]] = {}
    providers: dict[str, Provider] = {}
    for name in LAYERS:
        times = _time_layer(encoder, name, num_patches)
        if len(times) > 1:
            measured[name] = times
            providers[name] = min(times, key=times.__getitem__)
    plan = replace(encoder.plan, providers=providers)
    if auto_attention:
        measured["attention"] = times = _time_attention(encoder, num_patches, max_sequences)
        plan = replace(plan, attention=min(times, key=times.__getitem__))
    return replace(plan, microseconds=measured)


def _time_layer(
    encoder: "Qwen3VLVisionEncoder", name: str, num_patches: int
) -> dict[Provider, float]:
    """Microseconds of each provider: the mean of a half full and a full capacity."""
    module, activation, per_token, has_residual = layer_of(encoder, name)
    rows = num_patches // encoder.config.spatial_merge_size**2 if per_token else num_patches
    weight, bias = module.weight, module.bias
    dtype = encoder.pixel_dtype if name == "embed" else encoder.dtype
    providers = linear_providers(encoder.device, dtype, rows, *weight.shape)
    if len(providers) == 1:
        return {providers[0]: 0.0}
    x = torch.randn(rows, weight.shape[1], device=encoder.device, dtype=dtype)
    out = torch.randn(rows, weight.shape[0], device=encoder.device, dtype=encoder.dtype)
    num_rows = torch.empty(1, dtype=torch.int32, device=encoder.device)
    times: dict[Provider, float] = {}
    for provider in providers:

        def call(provider: Provider = provider) -> None:
            linear(
                x,
                weight,
                bias,
                activation=activation,
                residual=out if has_residual else None,
                num_rows=num_rows,
                out=out,
                provider=provider,
            )

        times[provider] = _microseconds(call, num_rows, (rows // 2, rows)) / 2
    return times


def layer_of(encoder: "Qwen3VLVisionEncoder", name: str) -> tuple:
    """(module, activation, one row a token, residual) of a layer in LAYERS."""
    block, merger = encoder.blocks[0], encoder.merger
    return {
        "embed": (encoder.patch_embed.proj, None, False, False),
        "qkv": (block.attn.qkv, None, False, False),
        "proj": (block.attn.proj, None, False, True),
        "fc1": (block.mlp.linear_fc1, "gelu_tanh", False, False),
        "fc2": (block.mlp.linear_fc2, None, False, True),
        "merger_fc1": (merger.linear_fc1, "gelu", True, False),
        "merger_fc2": (merger.linear_fc2, None, True, False),
    }[name]


def _time_attention(
    encoder: "Qwen3VLVisionEncoder", num_patches: int, max_sequences: int
) -> dict[str, float]:
    """Microseconds of each backend: one item that fills the capacity, and items of 512x512."""
    config, merge = encoder.config, encoder.config.spatial_merge_size
    shape = num_patches, 3, config.num_heads, config.head_dim
    qkv = torch.randn(shape, device=encoder.device, dtype=encoder.dtype)
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
    half = encoder.dtype in (torch.float16, torch.bfloat16)
    times = {}
    for name in ("triton", "flash_attn") if half else ("triton",):
        calls = [BACKENDS[name](layout, encoder.heads) for layout in layouts]
        times[name] = sum(_microseconds(lambda call=call: call(qkv)) for call in calls)
    return times


def _microseconds(
    call: Callable[[], object], num_rows: Tensor | None = None, rows: Sequence[int] = (0,)
) -> float:
    """Median time of one call inside a replayed graph, summed over the row counts."""
    stream = side_stream(torch.device("cuda", torch.cuda.current_device()))
    stream.wait_stream(torch.cuda.current_stream())
    total = 0.0
    with torch.cuda.stream(stream):
        if num_rows is not None:
            num_rows.fill_(rows[0])
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(LAUNCHES):
                call()
        for count in rows:
            if num_rows is not None:
                num_rows.fill_(count)
            times = []
            for _ in range(ROUNDS):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
            total += 1e3 * sorted(times)[ROUNDS // 2] / LAUNCHES
    torch.cuda.current_stream().wait_stream(stream)
    return total
