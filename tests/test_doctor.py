"""The table of attention backends in `vitgraph doctor`."""

import torch

from vitgraph.encoder.attention_trial import LEAKS, Capability
from vitgraph.graphs import doctor


def test_attention_table(monkeypatch) -> None:
    """Backend, provider, dtypes that work here, and why the others do not."""

    def capabilities(heads, device):
        half = heads.dtype != torch.float32
        needs = "" if half else "needs CUDA and bf16 or fp16"
        missing = "not installed" if half else needs
        no_fp16 = "no fp16" if heads.dtype == torch.float16 else needs
        return [
            Capability("triton", "vitgraph", True),
            Capability("flash_attn", "fa3-fwd", not no_fp16, no_fp16 or LEAKS, isolates=False),
            Capability("flash_attn", "torch", half, needs),
            Capability("flashinfer", "flashinfer-python", False, missing),
        ]

    monkeypatch.setattr(doctor, "capabilities", capabilities)
    table = doctor._attention(torch.device("cpu"))
    columns = [column.header for column in table.columns]
    assert columns == ["backend", "provider", "works here", "remarks"]
    assert list(zip(*(column.cells for column in table.columns), strict=True)) == [
        ("triton", "vitgraph", "bfloat16, float16, float32", ""),
        ("flash_attn", "fa3-fwd", "bfloat16", LEAKS),
        ("flash_attn", "torch", "bfloat16, float16", ""),
        ("flashinfer", "flashinfer-python", "no", "not installed"),
    ]
