"""What a consumer of sm90/attention.py leaves in memory: finished rows, or its part of an item."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from vitgraph.kernels.sm90.attention_blocks import rescale
from vitgraph.kernels.sm90.attention_shared import V_LAYOUT, V_TAIL_LAYOUT
from vitgraph.kernels.sm90.gluon_names import barrier

PARTIAL_WIDTH = gl.constexpr(96)  # floats of a row of a part: 64 + 16, its maximum, its sum


@gluon.jit
def _partial(partials_ptr, index, column, acc, layout: gl.constexpr):
    """Pointers to the columns of `acc` in the `index`-th block of partial rows."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    rows = index * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return partials_ptr + (rows * PARTIAL_WIDTH)[:, None] + columns[None, :]


@gluon.jit
def join_parts(
    sizes, acc, acc_tail, row_max, row_sum, partials_ptr, arrivals_ptr, piece, parts,
    INDEX: gl.constexpr,
):  # fmt: skip
    """Leave this part of an item in memory; the last part to come joins all, in their order."""
    layout: gl.constexpr = gl.SliceLayout(1, sizes.SCORES)
    index = piece * sizes.CONSUMERS + INDEX
    rows = gl.arange(0, sizes.ROWS, layout) * PARTIAL_WIDTH + 80
    max_ptrs = partials_ptr + index * sizes.ROWS * PARTIAL_WIDTH + rows
    gl.store(_partial(partials_ptr, index, 0, acc, V_LAYOUT), acc)
    if sizes.TAIL:
        gl.store(_partial(partials_ptr, index, 64, acc_tail, V_TAIL_LAYOUT), acc_tail)
    gl.store(max_ptrs, row_max)
    gl.store(max_ptrs + 1, row_sum)
    barrier()
    first = piece - piece % parts
    arrivals_ptr += first * sizes.CONSUMERS + INDEX
    is_last = gl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == parts - 1
    barrier()
    if is_last:
        gl.store(arrivals_ptr, 0)
        acc = gl.zeros_like(acc)
        acc_tail = gl.zeros_like(acc_tail)
        row_max = gl.full([sizes.ROWS], float("-inf"), gl.float32, layout)
        row_sum = gl.zeros([sizes.ROWS], gl.float32, layout)
        for other in range(first, first + parts):
            index = other * sizes.CONSUMERS + INDEX
            max_ptrs = partials_ptr + index * sizes.ROWS * PARTIAL_WIDTH + rows
            part_max = gl.load(max_ptrs, cache_modifier=".cg")
            part_sum = gl.load(max_ptrs + 1, cache_modifier=".cg")
            new_max = gl.maximum(row_max, part_max)
            ours, theirs = gl.exp2(row_max - new_max), gl.exp2(part_max - new_max)
            part = gl.load(_partial(partials_ptr, index, 0, acc, V_LAYOUT), cache_modifier=".cg")
            acc = rescale(acc, ours, V_LAYOUT) + rescale(part, theirs, V_LAYOUT)
            if sizes.TAIL:
                part = _partial(partials_ptr, index, 64, acc_tail, V_TAIL_LAYOUT)
                part = gl.load(part, cache_modifier=".cg")
                acc_tail = rescale(acc_tail, ours, V_TAIL_LAYOUT)
                acc_tail += rescale(part, theirs, V_TAIL_LAYOUT)
            row_sum = row_sum * ours + part_sum * theirs
            row_max = new_max
    return acc, acc_tail, row_sum, is_last


@gluon.jit
def store_rows(sizes, out_ptr, acc, row_sum, row, end, head, column, layout: gl.constexpr):
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    row_ptrs = out_ptr + rows.to(gl.int64) * (sizes.HEADS * sizes.HEAD_DIM) + head * sizes.HEAD_DIM
    mask = (rows < end)[:, None] & (columns < sizes.HEAD_DIM)[None, :]
    values = rescale(acc, 1.0 / row_sum, layout).to(out_ptr.dtype.element_ty)
    gl.store(row_ptrs[:, None] + columns[None, :], values, mask=mask)
