"""Trying the Hopper kernels under a release of Triton that they were not tested with.

In a process of its own (`python -m vitgraph.kernels.sm90.trial_cases`): a kernel that hangs or
writes out of bounds does not harm the caller. The first caller waits for the result.
"""

import functools
import logging
import os
import subprocess
import sys

import torch
import triton

logger = logging.getLogger(__name__)

SECONDS = 300
CASES = "vitgraph.kernels.sm90.trial_cases"
PASSED = "the Hopper kernels are right"  # must be said: the interpreter may be another program


@functools.cache
def failure(device: torch.device) -> str | None:
    """Why the Hopper kernels do not serve on `device` under this Triton; None if they passed."""
    logger.warning(
        "triton %s is untested with the Hopper kernels: trying them (up to %d s, once a process)",
        triton.__version__,
        SECONDS,
    )
    reason = _run(device.index or 0)
    if reason is not None:
        reason = f"tried with triton {triton.__version__}, untested: {reason}"
        logger.warning("the portable kernels serve: %s", reason)
    return reason


def _run(index: int) -> str | None:
    command = [sys.executable or "python", "-m", CASES, str(index)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, errors="replace", timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"not done after {SECONDS} s"
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode == 0 and PASSED in done.stdout:
        return None
    said = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
    return f"exit status {done.returncode}: {said[-1]}"
