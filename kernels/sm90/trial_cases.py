"""The cases of the trial: every Hopper kernel against float64, on memory full of NaN.

python -m vitgraph.kernels.sm90.trial_cases [DEVICE]
"""

import sys

import torch
import triton
from torch import Tensor

from vitgraph.kernels.attention import attention, attention_reference, attention_schedule
from vitgraph.kernels.fp8.linear_fp8 import (
    dequantize,
    linear_fp8_reference,
    quantize_tiles,
    scales_of,
)
from vitgraph.kernels.fp8.linear_fp8_config import HOPPER
from vitgraph.kernels.fp8.quantize import E4M3, quantize_reference
from vitgraph.kernels.linear import linear_reference
from vitgraph.kernels.sm90.attention import CONFIGS
from vitgraph.kernels.sm90.linear import linear_sm90
from vitgraph.kernels.sm90.linear_fp8 import linear_fp8_sm90
from vitgraph.kernels.sm90.trial import PASSED

# One tile and a few rows, an empty sequence, exact tiles, more than one block of keys; the last is
# long enough that its items are split.
LENGTHS = (1, 37, 0, 192, 257, 1024, 3100)
ROWS = (1, 300, 2000, 4500)  # flat tiles, tall ones of 128 and of 192 columns, several a program
LAYERS = ((1152, 1152), (3456, 1152), (1152, 4304))
FP8_LAYERS = ((3456, 1152), (4304, 1152), (1152, 4304))  # qkv; fc1, in e4m3; fc2, from e4m3
TOLERANCE = 0.01  # relative; rounding to bf16 is 0.002
E4M3_TOLERANCE = 0.05  # rounding is 0.026


def try_all(device: torch.device) -> str | None:
    """Compare every variant with float64; the first difference, or None."""
    for name, config in CONFIGS.items():
        for head_dim in (72, 64):
            if problem := _try_attention(config, head_dim, device):
                return f"attention {name}, head_dim {head_dim}: {problem}"
    for attempt, layers in ((_try_linear, LAYERS), (_try_linear_fp8, FP8_LAYERS)):
        for layer in layers:
            for rows in ROWS:
                if problem := attempt(layer, rows, device):
                    return f"{attempt.__name__[5:]} {layer}, {rows} rows: {problem}"
    return None


def _try_attention(config: object, head_dim: int, device: torch.device) -> str | None:
    rows = sum(LENGTHS)
    qkv = _random(rows + 300, 3, 16, head_dim, device=device)
    qkv[rows:] = float("nan")
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
    schedule = attention_schedule(cu_seqlens, rows + 300, 16, config)
    results = []
    for _ in range(3):
        out = torch.full_like(qkv[:, 0].flatten(1), float("nan"))
        results.append(attention(qkv, cu_seqlens, schedule=schedule, out=out)[:rows])
    truth = attention_reference(qkv[:rows].double(), cu_seqlens)
    return _compare(results, truth, out[rows:])


def _try_linear(layer: tuple[int, int], rows: int, device: torch.device) -> str | None:
    x = _random(rows + 200, layer[1], device=device)
    x[rows:] = float("nan")
    weight, bias = _random(*layer, device=device), _random(layer[0], device=device)
    residual = _random(rows + 200, layer[0], device=device)
    num_rows = torch.tensor([rows], dtype=torch.int32, device=device)
    truth = linear_reference(
        x[:rows].double(), weight.double(), bias.double(), activation="gelu_tanh",
        residual=residual[:rows].double(),
    )  # fmt: skip
    results = []
    for _ in range(3):
        out = torch.full_like(residual, float("nan"))
        linear_sm90(x, weight, bias, "gelu_tanh", residual, num_rows, out)
        results.append(out[:rows])
    return _compare(results, truth, out[rows:])


def _try_linear_fp8(layer: tuple[int, int], rows: int, device: torch.device) -> str | None:
    capacity, (width, depth) = rows + 200, layer
    expands, reduces = width > 3 * depth, width < depth
    x = torch.empty(capacity, depth, dtype=E4M3, device=device)
    x_scale = scales_of(capacity, depth, device)
    quantize_tiles(_random(capacity, depth, device=device).float(), x, x_scale)
    x[rows:] = x_scale[:, rows:] = float("nan")
    quantized = quantize_reference(_random(*layer, device=device), _random(width, device=device))
    residual = _random(capacity, width, device=device) if reduces else None
    num_rows = torch.tensor([rows], dtype=torch.int32, device=device)
    activation = "gelu_tanh" if expands else None
    truth = linear_fp8_reference(
        x[:rows], x_scale[:, :rows] if reduces else 0.01, quantized, activation=activation,
        residual=residual[:rows].double() if reduces else None,
        out=torch.empty(rows, width, dtype=torch.float64, device=device),
    )  # fmt: skip
    results = []
    for _ in range(3):
        out = torch.full((capacity, width), float("nan"), dtype=torch.bfloat16, device=device)
        out_scale = None
        if expands:
            out = out.to(E4M3)
            out_scale = scales_of(capacity, width, device).fill_(float("nan"))
        linear_fp8_sm90(
            x, x_scale if reduces else 0.01, quantized, activation, residual, num_rows, out,
            out_scale, HOPPER,
        )  # fmt: skip
        past, values = out[rows:].float(), out
        if out_scale is not None:
            past = torch.cat([past.flatten(), out_scale[:, rows:].flatten()])
            values = dequantize(out, out_scale, torch.float32)
        results.append(values[:rows])
    return _compare(results, truth, past, E4M3_TOLERANCE if expands else TOLERANCE)


def _compare(
    results: list[Tensor], truth: Tensor, past: Tensor, tolerance: float = TOLERANCE
) -> str | None:
    """What is wrong with equal launches, or None. `past` are the rows that nothing may write."""
    error = (results[0].double() - truth).abs()
    row_errors = error.norm(dim=1) / truth.norm(dim=1)
    worst = row_errors.max().item()
    if not worst <= tolerance:  # NaN is no good either
        row = row_errors.nan_to_num(float("inf")).argmax().item()
        return f"row {row} is off by {worst:.3g}, more than {tolerance:g}"
    if not all(torch.equal(result, results[0]) for result in results):
        return "launches differ"
    return None if past.isnan().all() else "rows past the last are written"


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16)


def main(index: str = "0") -> int:
    """Print what differs; the exit status is 0 if nothing does."""
    device = torch.device("cuda", int(index))
    torch.cuda.set_device(device)
    problem = try_all(device)
    print(problem or f"{PASSED} under triton {triton.__version__}")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
