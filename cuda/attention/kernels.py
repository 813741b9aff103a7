"""Attention on a GPU: the leaves of the merge tree, and the merge of two nodes, in Triton.

The same two steps as on the CPU (cpp/kvpool/attention): `attend_leaves` gives the maximum, the sum and the accumulated
values of each leaf in base 2 (partial.h), `merge_pairs` makes two nodes into one with the bits of merge_rows.cpp. Rows
lie in memory as in a PartialNode, so what the GPU computed is a node without conversion.

compile.py makes machine code of them ahead of time: at run time there is neither Triton nor torch. The tests run them
in Triton's interpreter.
"""
# ruff: noqa: ANN001, ANN201  # annotations of a kernel are for Triton's compiler

import triton
import triton.language as tl

# Columns of a row of `tasks`, int64 each: LeafTask of cpp/kvpool/attend_gpu/leaf_plan.h.
TASK_COLUMNS = tl.constexpr(8)
# Columns of a row of `pairs`, int64 each: MergePair, in the same file.
PAIR_COLUMNS = tl.constexpr(3)


@triton.jit
def attend_leaves(
    q,  # of all items: [query token, query head, D]
    k,  # blocks are counted from here, and from `v`; the offset of the layer is in both
    v,
    k_blocks,  # of each block its distance from `k`, in units of 16 bytes, so that the compiler knows its alignment
    v_blocks,
    tasks,  # a row for each leaf
    out,  # float32: nodes
    head_stride,  # in elements, as is the next
    token_stride,
    block_tokens,
    group,  # query heads of a KV head
    query_heads,
    scale_log2e,
    D: tl.constexpr,
    ROWS: tl.constexpr,  # query rows of a KV head (query tokens times heads of its group) that a program computes
    TILE: tl.constexpr,  # tokens that are computed together; divides a leaf
    UNIT: tl.constexpr,  # elements in 16 bytes
    FLOAT_DOT: tl.constexpr,  # multiplies as float32: the interpreter takes the bits of bfloat16 for integers
):
    """One leaf for some rows of one KV head: programs are (leaf, KV head, ROWS rows)."""
    head = tl.program_id(1)
    task = tasks + tl.program_id(0) * TASK_COLUMNS
    q_at = tl.load(task)  # elements
    first_block = tl.load(task + 1)  # that the leaf has tokens in: into k_blocks and v_blocks
    first = tl.load(task + 2).to(tl.int32)  # token, counted from the beginning of that block
    end = first + tl.load(task + 3).to(tl.int32)
    skip = tl.load(task + 4).to(tl.int32)  # tokens of the first tile that are not in the leaf
    seen = tl.load(task + 5).to(tl.int32)  # query token 0 sees the tokens below, counted like `first`
    out_at = tl.load(task + 6)  # floats
    query_tokens = tl.load(task + 7).to(tl.int32)

    rows = group * query_tokens
    if tl.program_id(2) * ROWS >= rows:
        return
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    some = row < rows
    d = tl.arange(0, D)
    # Rows are heads first; the caller's queries are tokens first.
    q_row = (row % query_tokens) * query_heads + head * group + row // query_tokens
    queries = tl.load(q + q_at + q_row[:, None] * D + d[None, :], mask=some[:, None], other=0.0)
    if FLOAT_DOT:
        queries = queries.to(tl.float32)
    seen_by = seen + row % query_tokens

    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    of_head = head * head_stride
    for at in range(first - skip, end, TILE):
        token = at + tl.arange(0, TILE)
        there = (token >= first) & (token < end)
        block = first_block + token // block_tokens
        place = of_head + (token % block_tokens) * token_stride
        k_place = tl.load(k_blocks + block, mask=there, other=0) * UNIT + place
        v_place = tl.load(v_blocks + block, mask=there, other=0) * UNIT + place

        keys = tl.load(k + k_place[None, :] + d[:, None], mask=there[None, :], other=0.0)
        if FLOAT_DOT:
            keys = keys.to(tl.float32)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale_log2e
        sees = there[None, :] & (token[None, :] < seen_by[:, None])
        scores = tl.where(sees, scores, float("-inf"))

        risen = tl.maximum(most, tl.max(scores, 1))
        # With no score above -inf every difference would be NaN.
        base = tl.where(risen == float("-inf"), 0.0, risen)
        weight = tl.exp2(most - base)
        p = tl.exp2(scores - base[:, None])
        most = risen
        total = total * weight + tl.sum(p, 1)
        acc = acc * weight[:, None]

        values = tl.load(v + v_place[:, None] + d[None, :], mask=there[:, None], other=0.0)
        if values.dtype == tl.float32:
            acc += tl.dot(p, values, input_precision="ieee")
        else:
            # In two halves, so that rounding to the type of V costs no more than float32 sums do.
            high = p.to(values.dtype)
            low = (p - high.to(tl.float32)).to(values.dtype)
            if FLOAT_DOT:
                values = values.to(tl.float32)
            acc = tl.dot(high.to(values.dtype), values, acc)
            acc = tl.dot(low.to(values.dtype), values, acc)

    all_rows = query_heads * query_tokens
    of_row = head * rows + row
    node = out + out_at
    tl.store(node + of_row[:, None] * D + d[None, :], acc, mask=some[:, None])
    tl.store(node + all_rows * D + of_row, most, mask=some)
    tl.store(node + all_rows * (D + 1) + of_row, total, mask=some)


@triton.jit
def exp2_of_difference(x):
    """exp2_of_difference of merge_rows.cpp, operation by operation."""
    shifted = x + 12582912.0  # at this size floats are integers, so adding it rounds
    f = x - (shifted - 12582912.0)
    p = 1.535336188319500e-4
    p = p * f + 1.339887440266574e-3
    p = p * f + 9.618437357674640e-3
    p = p * f + 5.550332471162809e-2
    p = p * f + 2.402264791363012e-1
    p = p * f + 6.931472028550421e-1
    p = p * f + 1.0
    integer = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    power = ((integer + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x >= -126.0, p * power, tl.where(x != x, x, 0.0))


@triton.jit
def weight_of(own, most):
    """What a row's values are multiplied by when its maximum becomes `most`."""
    return tl.where(own == float("-inf"), 0.0, exp2_of_difference(own - most))


@triton.jit
def merge_pairs(
    values,  # float32: nodes
    pairs,  # a row for each pair: where the left and the right node begin, in floats, and how many rows they have
    D: tl.constexpr,
    ROWS: tl.constexpr,  # that a program merges
):
    """Each left node becomes the merge of both: programs are (pair, ROWS rows).

    Compiled without contracting a product and a sum into one rounding, so the bits are those of merge_rows.cpp.
    """
    pair = pairs + tl.program_id(0) * PAIR_COLUMNS
    left = values + tl.load(pair)
    right = values + tl.load(pair + 1)
    rows = tl.load(pair + 2)
    if tl.program_id(1) * ROWS >= rows:
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    some = row < rows
    maxima = rows * D + row
    sums = rows * (D + 1) + row
    a = tl.load(left + maxima, mask=some, other=0.0)
    b = tl.load(right + maxima, mask=some, other=0.0)
    most = tl.where(a > b, a, b) + 0.0  # + 0: of 0 and -0, always 0
    weight_a = weight_of(a, most)
    weight_b = weight_of(b, most)
    place = row[:, None] * D + tl.arange(0, D)[None, :]
    left_acc = tl.load(left + place, mask=some[:, None], other=0.0)
    right_acc = tl.load(right + place, mask=some[:, None], other=0.0)
    tl.store(left + place, left_acc * weight_a[:, None] + right_acc * weight_b[:, None], mask=some[:, None])
    left_sum = tl.load(left + sums, mask=some, other=0.0)
    right_sum = tl.load(right + sums, mask=some, other=0.0)
    tl.store(left + sums, left_sum * weight_a + right_sum * weight_b, mask=some)
    tl.store(left + maxima, most, mask=some)
