"""FP8 layers as an operator asks for them: the environment variables of the vLLM and the SGLang
plugin.

What cannot be had costs the option, not the tower: ours serves in its own dtype, which is the more
accurate one, and the log says why.
"""

import logging
import os
from typing import NamedTuple

import torch

from vitgraph.encoder import VisionConfig
from vitgraph.encoder.inputs import check_fp8
from vitgraph.kernels.fp8.quantize import why_no_e4m3

LINEAR_DTYPE, FP8_SKIP_BLOCKS = "VITGRAPH_LINEAR_DTYPE", "VITGRAPH_FP8_SKIP_BLOCKS"


class Linears(NamedTuple):
    """Options of an encoder, which says what they are."""

    linear_dtype: str = "same"
    fp8_skip_blocks: int = 0

    def said(self, dtype: torch.dtype) -> str:
        """What they add to a line of the log, in an encoder of `dtype`: nothing without FP8."""
        if self.linear_dtype == "same":
            return ""
        name, skipped = str(dtype).removeprefix("torch."), self.fp8_skip_blocks
        blocks = "block" if skipped == 1 else f"{skipped} blocks"
        return f", fp8 (first {blocks} in {name})" if skipped else ", fp8"


SAME = Linears()


def read_linears(config: VisionConfig, device: torch.device, batch_invariant: bool) -> Linears:
    """As VITGRAPH_LINEAR_DTYPE ("same" or "fp8") and VITGRAPH_FP8_SKIP_BLOCKS ask for them.

    Raises:
        ValueError: naming the variable: another value, more blocks than the tower has, a GPU
            without e4m3, or batch-invariant results, which have none.
    """
    asked = {name: os.environ.get(name, "").strip() for name in (LINEAR_DTYPE, FP8_SKIP_BLOCKS)}
    skipped = asked[FP8_SKIP_BLOCKS] or "0"
    try:
        if not skipped.isdecimal():
            raise ValueError(f"{skipped!r} is no number of blocks")
        found = Linears(asked[LINEAR_DTYPE].lower() or "same", int(skipped))
        blocks = check_fp8(config, *found, batch_invariant)
        if blocks and device.type == "cuda" and (reason := why_no_e4m3(device)):
            raise ValueError(reason)
    except ValueError as error:
        given = " ".join(f"{name}={value}" for name, value in asked.items() if value)
        raise ValueError(f"{given}: {error}") from None
    return found


def choose_linears(
    config: VisionConfig, device: torch.device, batch_invariant: bool, logger: logging.Logger
) -> Linears:
    """`read_linears`; where these cannot be had, the defaults and a warning."""
    try:
        return read_linears(config, device, batch_invariant)
    except ValueError as error:
        logger.warning("vitgraph: no FP8, the layers keep the tower's dtype: %s", error)
        return SAME


def report_linears(batch_invariant: bool = False) -> str:
    """For `vitgraph doctor`: what the large towers would have here, or why not what was asked."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own = "in the tower's dtype"
    try:
        found = read_linears(VisionConfig(), device, batch_invariant)
    except ValueError as error:
        return f"{own}: {error}"
    return found.said(torch.bfloat16).removeprefix(", ") or f"{own}; {LINEAR_DTYPE}=fp8 for FP8"
