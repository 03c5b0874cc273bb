"""What keeps values that are not finite inside their item, for attention libraries that need it."""

import pytest
import torch

from vitgraph.encoder.attention.trial import TAIL
from vitgraph.kernels.isolate import isolate, isolate_reference


@pytest.mark.parametrize(("rows", "capacity"), [(400, 512), (8000, 8192), (8000, 32768)])
def bench_isolate(measure, rotate, rows, capacity):
    num_rows = torch.tensor([rows], dtype=torch.int32, device="cuda")

    buffers = rotate(
        lambda: (torch.randn(capacity, 3, 16, 72, device="cuda", dtype=torch.bfloat16),)
    )

    def check():
        qkv = torch.randn(capacity, 3, 16, 72, device="cuda", dtype=torch.bfloat16)
        qkv[100:200, 2] = float("nan")
        expected = isolate_reference(qkv.clone(), num_rows, TAIL)
        torch.testing.assert_close(
            isolate(qkv, num_rows, TAIL), expected, rtol=0, atol=0, equal_nan=True
        )

    measure(
        f"isolate {rows} rows in {capacity}",
        lambda qkv: isolate(qkv, num_rows, TAIL),
        baseline=lambda qkv: isolate_reference(qkv, num_rows, TAIL),
        bytes=2 * 16 * 72 * rows,
        check=check,
        buffers=buffers,
    )
