"""What the warps of sm90/attention.py share: sizes known when compiled, rings in shared memory."""

import functools

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vitgraph.kernels.sm90.gluon_names import aggregate, reinterpret

V_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
V_TAIL_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))


@functools.cache  # asked for before every launch
def box_layout(rows: int, columns: int, dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """Where TMA puts a box of one head's rows in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([1, rows, columns], dtype)


@aggregate
class Sizes:
    """What is known when the kernel is compiled."""

    HEADS: gl.constexpr
    HEAD_DIM: gl.constexpr
    TAIL: gl.constexpr  # columns beyond 64, padded to 16, or 0
    GROUPS: gl.constexpr  # wgmma groups of one product
    ROWS: gl.constexpr
    CONSUMERS: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    OVERLAP: gl.constexpr
    SCORES: gl.constexpr  # layout of a block of scores, and of half of one
    HALF_SCORES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, HEADS, HEAD_DIM, TAIL, ROWS, CONSUMERS, BLOCK_N, STAGES, OVERLAP):
        block_n = gl.constexpr(BLOCK_N).value
        self.HEADS = gl.constexpr(HEADS)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.TAIL = gl.constexpr(TAIL)
        self.GROUPS = gl.constexpr(2 if gl.constexpr(TAIL).value else 1)
        self.ROWS = gl.constexpr(ROWS)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.OVERLAP = gl.constexpr(OVERLAP)
        self.SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16]))
        self.HALF_SCORES = gl.constexpr(
            gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n // 2, 16])
        )


@aggregate
class Shared:
    """Rings in shared memory: two units of q with their messages, STAGES blocks of k and v."""

    q: gl.shared_memory_descriptor
    q_tail: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k_tail: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    v_tail: gl.shared_memory_descriptor
    messages: gl.shared_memory_descriptor
    unit_ready: gl.shared_memory_descriptor
    unit_empty: gl.shared_memory_descriptor
    k_ready: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, q_tail, k, k_tail, v, v_tail, messages, unit_ready, unit_empty, k_ready,
                 v_ready, empty):  # fmt: skip
        self.q, self.q_tail = q, q_tail
        self.k, self.k_tail, self.v, self.v_tail = k, k_tail, v, v_tail
        self.messages, self.unit_ready, self.unit_empty = messages, unit_ready, unit_empty
        self.k_ready, self.v_ready, self.empty = k_ready, v_ready, empty


@gluon.jit
def make_barriers(PLACES: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def ring_place(count, PLACES: gl.constexpr):
    """Where the `count`-th use of a ring falls, and the parity of its barrier."""
    return count % PLACES, count // PLACES & 1


@gluon.jit
def as_matrix(buffer):
    """A box [1, ROWS, COLUMNS] as the matrix [ROWS, COLUMNS]."""
    return as_matrices(buffer, 1).index(0)


@gluon.jit
def as_matrices(buffer, COUNT: gl.constexpr):
    """A box [1, ROWS, COLUMNS] as matrices [COUNT, ROWS // COUNT, COLUMNS]."""
    rows: gl.constexpr = buffer.shape[1] // COUNT
    layout: gl.constexpr = gl.NVMMASharedLayout(
        buffer.type.layout.swizzle_byte_width, buffer.type.layout.element_bitwidth, rank=2
    )
    return reinterpret(buffer, buffer.dtype, [COUNT, rows, buffer.shape[2]], layout)
