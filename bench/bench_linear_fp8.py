"""linear_fp8 on the layers of the 8B tower, against our own linear in bf16 and, on rows of their
own, against its portable kernel (itself, where that serves) and torch._scaled_mm (scales of rows
and channels, bf16 out) with separate operations: cuBLAS writes no e4m3, so its fc1 is not followed
by what fc2 would need. Weights rotate.
"""

import pytest

from vitgraph.bench.tune_linear_fp8 import LAYERS, Problem

# (real rows, capacity)
ROWS = [
    (400, 400),
    (1024, 1024),
    (2048, 2048),
    (4096, 4096),
    (8160, 8160),
    (16384, 16384),
    (8400, 16384),
]


@pytest.mark.parametrize(("real", "capacity"), ROWS)
@pytest.mark.parametrize("name", LAYERS)
def bench_linear_fp8(measure, rotate, name, real, capacity):
    problem = Problem(name, real, capacity)
    buffers = rotate(problem.layer)
    n, k = problem.out_features, problem.in_features
    wide = 1 if problem.activation else 2  # bytes of an output
    bytes = real * (k + n * (wide + 2 * (problem.residual is not None))) + n * k
    filled = f"{real}" if real == capacity else f"{real} of {capacity}"
    for label, suffix, baseline in (
        ("bf16 linear", "", problem.bf16),
        ("portable kernel", "/portable", problem.portable),
        ("_scaled_mm + ops", "/cuBLAS", problem.cublas),
    ):
        measure(
            f"fp8 {name} {filled}{suffix}",
            problem.fp8, baseline=baseline, baseline_name=label,
            check=lambda: problem.check(buffers[0]), buffers=buffers,
            flops=2 * real * n * k, bytes=bytes,
        )  # fmt: skip
