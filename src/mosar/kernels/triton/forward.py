"""The forward pass: one program per tile of queries of one label, with an online softmax.

A tile reads one run of the sorted keys of each class. Blocks that are inside the runs and on the
plateaus of all of its queries go straight from product to exponential. Only the edges of the run
need bias and mask.
"""

# Triton compiles these functions, not Python, so a type checker cannot check them.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mosar.kernels.triton.logits import (
    LN2,
    NEVER,
    WORTH,
    Bias,
    at_least,
    make_logits,
    mix_gates,
    spread_heads,
    take_key_bias,
    take_plateau,
)
from mosar.kernels.triton.tiles import (
    advance,
    edge_block,
    find_job,
    heads_of_tile,
    load_keys,
    load_matrix,
    order_of,
    source_of,
    store_matrix,
    take_rows,
    take_run,
    take_tokens,
)


class Softmax(NamedTuple):
    """The state of an online softmax."""

    top: tl.tensor
    """[BLOCK_M]: the largest logit so far."""
    total: tl.tensor
    """[BLOCK_M]: sum of exponentials."""
    sums: tl.tensor
    """[BLOCK_M, BLOCK_D]: of values times exponentials."""


@triton.jit
def attend_block(
    state, queries, rows, tokens, source, start, limit, lo, hi, factor, cap, plateau, bias,
    of_key, EDGE: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, SQUARE: tl.constexpr,
    SPREAD: tl.constexpr, REGIMES: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
    PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds one more block of keys: [start, limit) in sorted order."""
    keys, k, v = load_keys(start, limit, source, COLUMNS, HEAD_DIM, BLOCK_D, BLOCK_N)
    product = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
    score, _ = make_logits(
        product, rows, tokens, keys, lo, hi, factor, cap, plateau, bias, of_key,
        EDGE, BIAS, CAPPED, SQUARE, False,
    )  # fmt: skip
    if BIAS == WORTH:
        worth = mix_gates(tokens, keys, bias, SQUARE, REGIMES, COLUMNS, False)
        worth = at_least(worth, bias.epsilon)
        if SPREAD:
            worth = spread_heads(worth, HEADS, False)
        # The exponent of the worth is nearly its logarithm, so weights are in [0, 2). Half
        # precision then does not lose a row whose largest score has a small worth.
        about = ((worth.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)
        top = tl.maximum(state.top, tl.max(score + about, axis=1))
    else:
        top = tl.maximum(state.top, tl.max(score, axis=1))
    # Before the first key, any finite number works.
    finite = tl.where(top == NEVER, 0.0, top)
    weight = tl.exp2(score - finite[:, None])
    if BIAS == WORTH:
        weight *= worth
    shrink = tl.exp2(state.top - finite)
    sums = tl.dot(weight.to(v.dtype), v, state.sums * shrink[:, None], input_precision=PRECISION)
    return Softmax(top=top, total=state.total * shrink + tl.sum(weight, axis=1), sums=sums)


@triton.jit(do_not_specialize=["length_class"])
def forward_kernel(
    q, k, v, out, lse, row_max, row_sum, pi_q, pi_k,
    query_order, key_order, query_places, key_places, query_offsets, run_lo, run_hi, run_flat,
    plateaus, falls, table, level_until, slopes, key_high, key_low,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    plan_batch, plan_group, groups, kv_heads, num_queries, num_keys, shift,
    table_stride, table_length, factor, cap, barrier, exponent, epsilon, length_class,
    SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, LABELS: tl.constexpr,
    CLASSES: tl.constexpr, REGIMES: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr,
    KEYED: tl.constexpr, CAPPED: tl.constexpr, SQUARE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = heads_of_tile(SHARE, BLOCK_M, KEYED)
    CHUNKS: tl.constexpr = (SHARE + HEADS - 1) // HEADS
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    SPREAD: tl.constexpr = (BIAS == WORTH) and (HEADS > 1) and (HEADS * TOKENS == BLOCK_M)
    job = find_job(
        query_offsets, num_queries, kv_heads, groups, plan_batch, plan_group,
        TOKENS, LABELS, CHUNKS, True,
    )  # fmt: skip
    if job.part < 0:
        return

    by_query = order_of(job, query_order, query_places, shift, num_queries)
    by_key = order_of(job, key_order, key_places, 0, num_keys)
    pi_q = advance(pi_q, job.routing_row * num_queries * REGIMES)
    pi_k = advance(pi_k, job.routing_row * num_keys * COLUMNS)
    source = source_of(job, k, v, k_batch, k_head, k_token, v_batch, v_head, v_token, by_key, pi_k)
    bias = Bias(
        barrier, exponent, epsilon, plateaus, falls, table, table_stride, table_length,
        level_until, slopes,
    )  # fmt: skip
    first_head = job.kv_head * SHARE + job.chunk * HEADS
    last_head = tl.minimum(first_head + HEADS, job.kv_head * SHARE + SHARE)
    rows = take_rows(job.begin, job.end, first_head, last_head, by_query, HEADS, TOKENS, BLOCK_M)
    tokens = take_tokens(job.begin, job.end, rows, by_query, pi_q, SPREAD, TOKENS, REGIMES)
    offset = job.batch * q_batch + rows.head.to(tl.int64) * q_head + rows.token * q_token
    queries = load_matrix(q, offset, rows.live, HEAD_DIM, BLOCK_D)
    line = (job.batch * kv_heads * SHARE + first_head) * num_keys
    of_key = take_key_bias(key_high, key_low, line, rows, num_queries, num_keys)
    state = Softmax(
        top=tl.full([BLOCK_M], NEVER, tl.float32),
        total=tl.zeros([BLOCK_M], tl.float32),
        sums=tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
    )
    for c in range(CLASSES):
        lo, hi, zones = take_run(
            run_lo, run_hi, run_flat, job, rows, c, num_queries, CLASSES, BIAS, BLOCK_N
        )
        plateau = take_plateau(plateaus, falls, job.part, c, CLASSES, BIAS)
        for index in range(0, zones.before + zones.after):
            start, limit = edge_block(index, zones, BLOCK_N)
            state = attend_block(
                state, queries, rows, tokens, source, start, limit, lo, hi,
                factor, cap, plateau, bias, of_key,
                True, BIAS, CAPPED, SQUARE, SPREAD, REGIMES, COLUMNS, HEADS, PRECISION,
                HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        for index in range(0, zones.whole):
            start = zones.stop + index * BLOCK_N
            state = attend_block(
                state, queries, rows, tokens, source, start, start + BLOCK_N, lo, hi,
                factor, cap, plateau, bias, of_key,
                False, BIAS, CAPPED, SQUARE, SPREAD, REGIMES, COLUMNS, HEADS, PRECISION,
                HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip

    empty = state.total == 0.0
    total = tl.where(empty, 1.0, state.total)
    at = (job.batch * kv_heads * SHARE + rows.head) * num_queries + rows.token
    store_matrix(out, at * HEAD_DIM, rows.live, state.sums / total[:, None], HEAD_DIM, BLOCK_D)
    found = state.top + tl.log2(total) + of_key.own_low + of_key.own_high
    found = tl.where(empty, NEVER, found * LN2)
    tl.store(lse + at, found, mask=rows.live)
    # Store both, because the log-sum-exp is too coarse to recompute exponentials from it.
    tl.store(row_max + at, tl.where(empty, 0.0, state.top), mask=rows.live)
    tl.store(row_sum + at, state.total, mask=rows.live)
