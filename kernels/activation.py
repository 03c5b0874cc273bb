"""The activations of linear's epilogues, as functions of kernels."""

from typing import Literal

import triton
import triton.language as tl

Activation = Literal["gelu", "gelu_tanh"]


@triton.jit
def _tanh_approx(x):
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _gelu_16bit(x):
    """x * Phi(x) with an error of 1e-7: erfc by Abramowitz and Stegun, formula 7.1.26."""
    z = tl.abs(x) * 0.7071067811865476
    t = 1 / (1 + 0.3275911 * z)
    series = (((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t
    erfc = (series + 0.254829592) * t * tl.exp2(-1.4426950408889634 * z * z)  # log2(e)
    return tl.where(x > 0, x, 0.0) - 0.5 * tl.abs(x) * erfc


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Apply an activation to float32 values that will be rounded to `dtype`."""
    if ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * x * (1 + 0.044715 * x * x)
        if dtype == tl.bfloat16:  # one instruction; its 2^-11 are below this rounding only
            x = 0.5 * x * (1 + _tanh_approx(inner))
        else:
            x = x / (1 + tl.exp2(-2.8853900817779268 * inner))  # -2 * log2(e)
    elif ACTIVATION == "gelu":
        if dtype == tl.float32:
            x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
        else:
            x = _gelu_16bit(x)
    return x
