"""Gluon under one set of names, those of Triton 3.9; the kernels import what moved from here.

until 3.6   `barrier` is `thread_barrier`
until 3.7   `tma.async_load` and `async_store` are `async_copy_global_to_shared` and the reverse;
            `aggregate` is private
until 3.8   `reinterpret` is private; in 3.8 it wants equal sizes, before and after it may shrink
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

__all__ = ["aggregate", "async_load", "async_store", "barrier", "reinterpret"]

aggregate = getattr(gluon, "aggregate", None) or core._aggregate
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_descriptor = gl.shared_memory_descriptor
# reinterpret(buffer, dtype, shape, layout)
reinterpret = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret
