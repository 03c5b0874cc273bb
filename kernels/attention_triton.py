"""`attention` in Triton, for every GPU and the interpreter: online softmax, persistent over the
work table.

Loads are tensor descriptors (TMA) where the table of tilings says so, pointers otherwise. Either
way rows past the end of a sequence and columns past the head arrive as zeros: a weight of zero
would not silence the NaN of a neighbour. The descriptors are ragged ones (triton.tools.ragged_tma),
which clip at the end of the sequence that a load names.

A head of D values is computed as a power of two and a tail (72 = 64 + 16 with 8 columns of zeros).

Legend: P patches, S sequences, H heads, D head_dim.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from vitgraph.kernels.attention_config import AttentionConfig
from vitgraph.kernels.attention_tiles import AttentionTiles


@triton.jit
def _load_rows(
    qkv_ptr,
    desc,  # ragged, boxes [ROWS, 1, COLUMNS], or None
    plane,  # part * HEADS + head
    first_row,
    end,
    COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """[ROWS, COLUMNS] of one plane from (first_row, COLUMN); zero past `end` and past the head."""
    if desc is not None:
        return load_ragged(desc, 0, end, [first_row, plane, COLUMN]).reshape(ROWS, COLUMNS)
    rows = first_row + tl.arange(0, ROWS)
    columns = COLUMN + tl.arange(0, COLUMNS)
    row_offsets = rows.to(tl.int64) * (3 * HEADS * HEAD_DIM)
    pointers = qkv_ptr + row_offsets[:, None] + (plane * HEAD_DIM + columns)[None, :]
    mask = rows[:, None] < end
    if COLUMN + COLUMNS > HEAD_DIM:
        mask = mask & (columns[None, :] < HEAD_DIM)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _attend(
    q,  # [BLOCK_M, HEAD]
    q_tail,  # [BLOCK_M, TAIL]
    acc,  # float32 [BLOCK_M, HEAD]
    acc_tail,  # float32 [BLOCK_M, TAIL]
    row_max,  # float32 [BLOCK_M], scaled
    row_sum,  # float32 [BLOCK_M, SUMS]
    qkv_ptr,
    kv_desc,
    kv_tail_desc,
    head,
    first_key,
    end,
    scale_log2,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
    SUMS: tl.constexpr,
):
    """One step of the online softmax, over BLOCK_N keys."""
    k_plane = HEADS + head
    v_plane = 2 * HEADS + head
    k = _load_rows(qkv_ptr, kv_desc, k_plane, first_key, end, 0, BLOCK_N, HEAD, HEADS, HEAD_DIM)
    k_tail = k
    if HEAD_DIM > HEAD:
        k_tail = _load_rows(
            qkv_ptr, kv_tail_desc, k_plane, first_key, end, HEAD, BLOCK_N, TAIL, HEADS, HEAD_DIM
        )
    scores = tl.dot(q, k.T, input_precision="ieee")
    if HEAD_DIM > HEAD:
        scores = tl.dot(q_tail, k_tail.T, scores, input_precision="ieee")
    keys = first_key + tl.arange(0, BLOCK_N)
    if MASK == "always":
        scores = tl.where(keys[None, :] < end, scores, float("-inf"))
    if MASK == "branch":  # noqa: SIM102
        if first_key + BLOCK_N > end:
            scores = tl.where(keys[None, :] < end, scores, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_max[:, None])
    correction = tl.exp2(row_max - new_max)
    if SUMS > 1:
        sums = tl.sum(weights.reshape(weights.shape[0], BLOCK_N // SUMS, SUMS), 1)
        row_sum = row_sum * correction[:, None] + sums
    else:
        row_sum = row_sum * correction + tl.sum(weights, 1)

    v = _load_rows(qkv_ptr, kv_desc, v_plane, first_key, end, 0, BLOCK_N, HEAD, HEADS, HEAD_DIM)
    v_tail = v
    if HEAD_DIM > HEAD:
        v_tail = _load_rows(
            qkv_ptr, kv_tail_desc, v_plane, first_key, end, HEAD, BLOCK_N, TAIL, HEADS, HEAD_DIM
        )
    weights = weights.to(v.dtype)
    acc = tl.dot(weights, v, acc * correction[:, None], input_precision="ieee")
    if HEAD_DIM > HEAD:
        acc_tail = tl.dot(weights, v_tail, acc_tail * correction[:, None], input_precision="ieee")
    return acc, acc_tail, new_max, row_sum


@triton.jit
def attention_kernel(
    qkv_ptr,  # [P, 3, HEADS, HEAD_DIM]
    kv_desc,  # of qkv as [P, 3 * HEADS, HEAD_DIM], or None: boxes [BLOCK_N, 1, HEAD]
    kv_tail_desc,  # boxes [BLOCK_N, 1, TAIL]
    out_ptr,  # [P, HEADS * HEAD_DIM]
    table_ptr,  # int32 [units, 8]
    state_ptr,  # int32 [2], number of units and counter
    scale_log2,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
    SUMS: tl.constexpr,
    Q_REGISTERS: tl.constexpr,
):
    """Persistent: attend the units (tiles of one head) that this program draws."""
    num_units = tl.load(state_ptr)
    unit = tl.program_id(0)
    while unit < num_units:
        # Drawn early, so that its latency hides behind the unit. There are as many draws as units.
        ticket = tl.atomic_add(state_ptr + 1, 1, sem="relaxed")
        if ticket == num_units - 1:
            tl.store(state_ptr + 1, 0)

        unit_ptr = table_ptr + unit * 8
        first_row = tl.load(unit_ptr)
        start = tl.load(unit_ptr + 1)
        end = tl.load(unit_ptr + 2)
        head = tl.load(unit_ptr + 4)

        rows = first_row + tl.arange(0, BLOCK_M)
        row_mask = rows[:, None] < end
        q = _load_rows(qkv_ptr, None, head, first_row, end, 0, BLOCK_M, HEAD, HEADS, HEAD_DIM)
        q_tail = q
        if HEAD_DIM > HEAD:
            q_tail = _load_rows(
                qkv_ptr, None, head, first_row, end, HEAD, BLOCK_M, TAIL, HEADS, HEAD_DIM
            )
        if Q_REGISTERS:
            q = tl.where(row_mask, q, 0.0)
            q_tail = tl.where(row_mask, q_tail, 0.0)
        acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
        acc_tail = tl.zeros([BLOCK_M, TAIL], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if SUMS > 1:
            row_sum = tl.zeros([BLOCK_M, SUMS], tl.float32)
        else:
            row_sum = tl.zeros([BLOCK_M], tl.float32)

        loop_end = end
        if MASK == "peel":
            loop_end = end - (end - start) % BLOCK_N
        for first_key in range(start, loop_end, BLOCK_N):
            acc, acc_tail, row_max, row_sum = _attend(
                q, q_tail, acc, acc_tail, row_max, row_sum, qkv_ptr, kv_desc, kv_tail_desc, head,
                first_key, end, scale_log2, HEADS, HEAD_DIM, HEAD, TAIL, BLOCK_N, MASK, SUMS,
            )  # fmt: skip
        if MASK == "peel":  # noqa: SIM102
            if loop_end < end:
                acc, acc_tail, row_max, row_sum = _attend(
                    q, q_tail, acc, acc_tail, row_max, row_sum, qkv_ptr, kv_desc, kv_tail_desc,
                    head, loop_end, end, scale_log2, HEADS, HEAD_DIM, HEAD, TAIL, BLOCK_N, "always",
                    SUMS,
                )  # fmt: skip

        if SUMS > 1:
            row_sum = tl.sum(row_sum, 1)
        inverse_sum = 1.0 / row_sum
        out_rows = out_ptr + rows.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM
        columns = tl.arange(0, HEAD)[None, :]
        tl.store(out_rows + columns, acc * inverse_sum[:, None], mask=row_mask)
        if HEAD_DIM > HEAD:
            columns = HEAD + tl.arange(0, TAIL)[None, :]
            tl.store(
                out_rows + columns,
                acc_tail * inverse_sum[:, None],
                mask=row_mask & (columns < HEAD_DIM),
            )
        unit = ticket + tl.num_programs(0)


def _descriptors(
    qkv: Tensor, config: AttentionConfig, head: int, tail: int
) -> list[TensorDescriptor]:
    planes = qkv.flatten(1, 2)  # [P, 3 * H, D]
    return [
        create_ragged_descriptor(planes, [config.block_n, 1, columns]) for columns in (head, tail)
    ]


def launch_attention_triton(
    qkv: Tensor,  # [P, 3, H, D]
    out: Tensor,
    tiles: AttentionTiles,
    scale_log2: float,
    multiprocessors: int,
) -> None:
    """Launch the kernel; the arguments of `attention`, checked there."""
    _, _, num_heads, head_dim = qkv.shape
    config = tiles.config
    head = 1 << (head_dim.bit_length() - 1)
    tail = max(16, triton.next_power_of_2(head_dim - head))
    descriptors = [None] * 2
    if config.descriptors and qkv.data_ptr() % 16 == 0:
        descriptors = _descriptors(qkv, config, head, tail)
    programs = min(multiprocessors * config.programs_per_sm, tiles.table.shape[0])
    attention_kernel[(programs,)](
        qkv, *descriptors, out, tiles.table, tiles.state, scale_log2,
        HEADS=num_heads, HEAD_DIM=head_dim, HEAD=head, TAIL=tail,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, MASK=config.mask, SUMS=config.sums,
        Q_REGISTERS=config.q_registers,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers,
    )  # fmt: skip
