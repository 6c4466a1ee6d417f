"""The backward pass: two kernels. One program owns each output, so sums have a fixed order.

    P = exp2(s - max) W / sum      dS = P (dP - delta)      delta = dO·O - dlse
    queries: dQ = dS K,  dpi_q[m] = sum_j dS_ij / W_ij sum_n gate[m][n] pi_k[n]
    keys:    dV = P^T dO, dK = dS^T Q, dpi_k[n] = sum_i dS_ij / W_ij sum_m pi_q[m] gate[m][n],
             of a bias of keys: sum_i dS_ij

The first kernel processes the runs of a tile of queries like the forward pass, and stores delta.
The second one processes, for a tile of sorted keys of one class, the queries that read them: one
run of the sorted queries per label (the transposed plan). dS / W needs no division; it is 0 where W
is clamped to epsilon.
"""

# Triton compiles these functions, not Python, so a type checker cannot check them.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mosar.kernels.triton.logits import (
    GEOMETRY,
    WORTH,
    Bias,
    at_least,
    gate_places,
    make_logits,
    mix_gates,
    spread_heads,
    sum_heads,
    take_gates,
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
    split_zones,
    store_matrix,
    take_keys,
    take_rows,
    take_run,
    take_tokens,
)


class QuerySums(NamedTuple):
    """The sums of a tile of queries over its keys."""

    dq: tl.tensor
    """[BLOCK_M, BLOCK_D]."""
    routing: tl.tensor
    """[tokens, regimes]: dpi_q."""
    mixed: tl.tensor
    """[tokens, regimes]: sums of P times the coefficient of pi_q."""
    weight: tl.tensor
    """[BLOCK_M]: sums of P."""
    weighted: tl.tensor
    """[BLOCK_M]: sums of P dP."""


class KeySums(NamedTuple):
    """The sums of a tile of keys over its queries."""

    dk: tl.tensor
    dv: tl.tensor
    routing: tl.tensor
    """[BLOCK_N, regimes]: dpi_k."""
    bias: tl.tensor
    """[BLOCK_N]: of the bias of keys, of one head."""


class Upstream(NamedTuple):
    """The softmax of each row, and its delta."""

    top: tl.tensor
    inverse: tl.tensor
    """1 / sum, or 0 for a row without keys."""
    delta: tl.tensor


@triton.jit
def put_column(total, column, values):
    """`total` with `values` added to one of its columns."""
    columns = tl.arange(0, total.shape[1])
    return total + tl.where((columns == column)[None, :], values[:, None], 0.0)


@triton.jit
def load_upstream(row_max, row_sum, delta, at, live):
    """The softmax of the rows `at`, with their `delta`."""
    total = tl.load(row_sum + at, mask=live, other=0.0)
    return Upstream(
        # If a row does not exist, every exponential is 0.
        top=tl.load(row_max + at, mask=live, other=1e38),
        inverse=tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total)),
        delta=delta,
    )


@triton.jit
def add_routing(
    total, dworth, tokens, keys, bias, SQUARE: tl.constexpr,
    REGIMES: tl.constexpr, COLUMNS: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """total[m] += sum_j dworth_ij sum_n gate[m][n] pi_k[n], for a block [tokens, keys].

    KEYS_FIRST: total[n] += sum_i dworth_ji sum_m pi_q[m] gate[m][n], for a block [keys, tokens].
    """
    # Strides between gates in the table: of the result's regime, and of the summed regime.
    OWN: tl.constexpr = 1 if KEYS_FIRST else COLUMNS
    OTHER: tl.constexpr = COLUMNS if KEYS_FIRST else 1
    routing = tokens.routing if KEYS_FIRST else keys.routing
    live = tokens.live if KEYS_FIRST else keys.live
    at, nearest, level = gate_places(tokens, keys, bias, KEYS_FIRST)
    if level:
        for other in tl.static_range(REGIMES):
            share = tl.load(routing + other, mask=live, other=0.0)
            part = tl.sum(dworth * share[None, :], axis=1)
            for own in tl.static_range(REGIMES):
                gate = take_gates(own * OWN + other * OTHER, nearest, bias, SQUARE)
                total = put_column(total, own, gate * part)
    else:
        for own in tl.static_range(REGIMES):
            blend = tl.zeros(at.shape, tl.float32)
            for other in tl.static_range(REGIMES):
                gates = take_gates(own * OWN + other * OTHER, at, bias, SQUARE)
                share = tl.load(routing + other, mask=live, other=0.0)
                blend += gates * share[None, :]
            total = put_column(total, own, tl.sum(dworth * blend, axis=1))
    return total


@triton.jit
def query_block(
    sums, queries, arriving, upstream, rows, tokens, source, start, limit, lo, hi,
    factor, cap, plateau, bias, of_key,
    EDGE: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, SQUARE: tl.constexpr,
    SPREAD: tl.constexpr, EXACT: tl.constexpr, REGIMES: tl.constexpr, COLUMNS: tl.constexpr,
    HEADS: tl.constexpr, PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds one more block of keys to a tile of queries."""
    keys, k, v = load_keys(start, limit, source, COLUMNS, HEAD_DIM, BLOCK_D, BLOCK_N)
    product = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
    score, slope = make_logits(
        product, rows, tokens, keys, lo, hi, factor, cap, plateau, bias, of_key,
        EDGE, BIAS, CAPPED, SQUARE, False,
    )  # fmt: skip
    dprob = tl.dot(arriving, tl.trans(v), input_precision=PRECISION)
    # Without the factor of the worth, if there is one.
    plain = tl.exp2(score - upstream.top[:, None]) * upstream.inverse[:, None]
    dscore = plain * (dprob - upstream.delta[:, None])
    routing, mixed, weight, weighted = sums.routing, sums.mixed, sums.weight, sums.weighted
    if BIAS == WORTH:
        worth = mix_gates(tokens, keys, bias, SQUARE, REGIMES, COLUMNS, False)
        free = ~(worth <= bias.epsilon)
        dworth = dscore
        if SPREAD:
            dworth = sum_heads(dscore, HEADS, False)
        dworth = tl.where(free, dworth, 0.0)
        routing = add_routing(routing, dworth, tokens, keys, bias, SQUARE, REGIMES, COLUMNS, False)
        worth = at_least(worth, bias.epsilon)
        if EXACT:
            held = tl.where(free, plain, 0.0)
            mixed = add_routing(mixed, held, tokens, keys, bias, SQUARE, REGIMES, COLUMNS, False)
            weight += tl.sum(plain * worth, axis=1)
            weighted += tl.sum(plain * worth * dprob, axis=1)
        if SPREAD:
            worth = spread_heads(worth, HEADS, False)
        dscore *= worth
    if CAPPED:
        dscore *= slope
    return QuerySums(
        dq=tl.dot(dscore.to(k.dtype), k, sums.dq, input_precision=PRECISION),
        routing=routing,
        mixed=mixed,
        weight=weight,
        weighted=weighted,
    )


@triton.jit(do_not_specialize=["length_class"])
def query_kernel(
    q, k, v, out, dout, dlse, row_max, row_sum, delta, dq, dpi_q, pi_q, pi_k,
    query_order, key_order, query_places, key_places, query_offsets, run_lo, run_hi, run_flat,
    plateaus, falls, table, level_until, slopes, key_high, key_low,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    plan_batch, plan_group, groups, kv_heads, num_queries, num_keys, shift,
    table_stride, table_length, factor, cap, scale, barrier, exponent, epsilon, length_class,
    SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, LABELS: tl.constexpr,
    CLASSES: tl.constexpr, REGIMES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr,
    BIAS: tl.constexpr, KEYED: tl.constexpr, CAPPED: tl.constexpr, SQUARE: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq, delta, and the parts of dpi_q from each share of the query heads, to be summed later."""
    HEADS: tl.constexpr = heads_of_tile(SHARE, BLOCK_M, KEYED)
    CHUNKS: tl.constexpr = (SHARE + HEADS - 1) // HEADS
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    # dpi_q is corrected row by row if it must be exact.
    SPREAD: tl.constexpr = (
        (BIAS == WORTH) and (HEADS > 1) and (HEADS * TOKENS == BLOCK_M) and not EXACT
    )
    ROUTED: tl.constexpr = TOKENS if SPREAD else BLOCK_M
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
    at = (job.batch * kv_heads * SHARE + rows.head) * num_queries + rows.token
    arriving = load_matrix(dout, at * HEAD_DIM, rows.live, HEAD_DIM, BLOCK_D)
    given = load_matrix(out, at * HEAD_DIM, rows.live, HEAD_DIM, BLOCK_D)
    dot = tl.sum(arriving.to(tl.float32) * given.to(tl.float32), axis=1)
    dlse_here = tl.load(dlse + at, mask=rows.live, other=0.0)
    upstream = load_upstream(row_max, row_sum, dot - dlse_here, at, rows.live)
    tl.store(delta + at, upstream.delta, mask=rows.live)
    line = (job.batch * kv_heads * SHARE + first_head) * num_keys
    of_key = take_key_bias(key_high, key_low, line, rows, num_queries, num_keys)
    sums = QuerySums(
        dq=tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        routing=tl.zeros([ROUTED, BLOCK_R], tl.float32),
        mixed=tl.zeros([ROUTED, BLOCK_R], tl.float32),
        weight=tl.zeros([BLOCK_M], tl.float32),
        weighted=tl.zeros([BLOCK_M], tl.float32),
    )
    for c in range(CLASSES):
        lo, hi, zones = take_run(
            run_lo, run_hi, run_flat, job, rows, c, num_queries, CLASSES, BIAS, BLOCK_N
        )
        plateau = take_plateau(plateaus, falls, job.part, c, CLASSES, BIAS)
        for index in range(0, zones.before + zones.after):
            start, limit = edge_block(index, zones, BLOCK_N)
            sums = query_block(
                sums, queries, arriving, upstream, rows, tokens, source, start, limit, lo, hi,
                factor, cap, plateau, bias, of_key,
                True, BIAS, CAPPED, SQUARE, SPREAD, EXACT, REGIMES, COLUMNS, HEADS, PRECISION,
                HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        for index in range(0, zones.whole):
            start = zones.stop + index * BLOCK_N
            sums = query_block(
                sums, queries, arriving, upstream, rows, tokens, source, start, start + BLOCK_N,
                lo, hi, factor, cap, plateau, bias, of_key,
                False, BIAS, CAPPED, SQUARE, SPREAD, EXACT, REGIMES, COLUMNS, HEADS, PRECISION,
                HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip

    store_matrix(dq, at * HEAD_DIM, rows.live, sums.dq * scale, HEAD_DIM, BLOCK_D)
    if BIAS == WORTH:
        found = sums.routing
        if EXACT:
            # dS must sum to 0 over keys. With delta = dO·O, which was rounded elsewhere, it does so
            # only roughly. The coefficients of pi_q all have one sign, so the errors add up. So we
            # replace delta afterwards by the sum of P dP over this pass.
            weight = tl.where(sums.weight > 0.0, sums.weight, 1.0)
            error = tl.where(sums.weight > 0.0, dot - sums.weighted / weight, 0.0)
            found += error[:, None] * sums.mixed
        if SPREAD:
            # The first head of the tile stores the sums of all heads.
            found = spread_heads(found, HEADS, False)
            found = tl.where((rows.head == first_head)[:, None], found, 0.0)
        store_matrix(dpi_q, at * REGIMES, rows.live, found, REGIMES, BLOCK_R)


@triton.jit
def key_block(
    sums, k, v, keys, q, q_head, q_token, by_query, pi_q, dout, row_max, row_sum, delta,
    run_lo, run_hi, batch_head, first_head, last_head, num_queries, num_keys, begin, end,
    factor, cap, plateau, bias, key_high, key_low,
    EDGE: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, SQUARE: tl.constexpr,
    SPREAD: tl.constexpr, CLASSES: tl.constexpr, REGIMES: tl.constexpr, COLUMNS: tl.constexpr,
    HEADS: tl.constexpr, PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Adds one more tile of queries [begin, end) to a tile of keys."""
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    rows = take_rows(begin, end, first_head, last_head, by_query, HEADS, TOKENS, BLOCK_M)
    tokens = take_tokens(begin, end, rows, by_query, pi_q, SPREAD, TOKENS, REGIMES)
    offset = rows.head.to(tl.int64) * q_head + rows.token * q_token
    queries = load_matrix(q, offset, rows.live, HEAD_DIM, BLOCK_D)
    at = (batch_head + rows.head) * num_queries + rows.token
    arriving = load_matrix(dout, at * HEAD_DIM, rows.live, HEAD_DIM, BLOCK_D)
    delta_here = tl.load(delta + at, mask=rows.live, other=0.0)
    upstream = load_upstream(row_max, row_sum, delta_here, at, rows.live)
    lo, hi = rows.place, rows.place
    if EDGE:
        lo = tl.load(run_lo + rows.place * CLASSES, mask=rows.live, other=0)
        hi = tl.load(run_hi + rows.place * CLASSES, mask=rows.live, other=0)
    line = (batch_head + first_head) * num_keys
    of_key = take_key_bias(key_high, key_low, line, rows, num_queries, num_keys)
    product = tl.dot(k, tl.trans(queries), input_precision=PRECISION)
    score, slope = make_logits(
        product, rows, tokens, keys, lo, hi, factor, cap, plateau, bias, of_key,
        EDGE, BIAS, CAPPED, SQUARE, True,
    )  # fmt: skip
    dprob = tl.dot(v, tl.trans(arriving), input_precision=PRECISION)
    plain = tl.exp2(score - upstream.top[None, :]) * upstream.inverse[None, :]
    dscore = plain * (dprob - upstream.delta[None, :])
    routing, of_bias = sums.routing, sums.bias
    if key_high is not None:
        of_bias += tl.sum(dscore, axis=1)
    if BIAS == WORTH:
        worth = mix_gates(tokens, keys, bias, SQUARE, REGIMES, COLUMNS, True)
        dworth = dscore
        if SPREAD:
            dworth = sum_heads(dscore, HEADS, True)
        dworth = tl.where(worth <= bias.epsilon, 0.0, dworth)
        routing = add_routing(routing, dworth, tokens, keys, bias, SQUARE, REGIMES, COLUMNS, True)
        worth = at_least(worth, bias.epsilon)
        if SPREAD:
            worth = spread_heads(worth, HEADS, True)
        plain *= worth
        dscore *= worth
    if CAPPED:
        dscore *= slope
    return KeySums(
        dk=tl.dot(dscore.to(queries.dtype), queries, sums.dk, input_precision=PRECISION),
        dv=tl.dot(plain.to(arriving.dtype), arriving, sums.dv, input_precision=PRECISION),
        routing=routing,
        bias=of_bias,
    )


@triton.jit(do_not_specialize=["length_class"])
def key_kernel(
    q, k, v, dout, row_max, row_sum, delta, dk, dv, dpi_k, dkey_bias, pi_q, pi_k,
    query_order, key_order, query_places, key_places, key_offsets, run_lo, run_hi,
    read_from, read_to, flat_to, plateaus, falls, table, level_until, slopes, key_high, key_low,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    plan_batch, plan_group, groups, batches, kv_heads, num_queries, num_keys, shift,
    table_stride, table_length, factor, cap, scale, barrier, exponent, epsilon, length_class,
    SHARE: tl.constexpr, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    LABELS: tl.constexpr, CLASSES: tl.constexpr, REGIMES: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr, BIAS: tl.constexpr, KEYED: tl.constexpr, CAPPED: tl.constexpr,
    SQUARE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk, dv and dpi_k per key/value head, separately for the SPLITS parts of its query heads.

    The gradient of a bias of keys is per query head.
    """
    MINE: tl.constexpr = SHARE // SPLITS
    HEADS: tl.constexpr = heads_of_tile(MINE, BLOCK_M, KEYED)
    CHUNKS: tl.constexpr = (MINE + HEADS - 1) // HEADS
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    SPREAD: tl.constexpr = (BIAS == WORTH) and (HEADS > 1) and (HEADS * TOKENS == BLOCK_M)
    job = find_job(
        key_offsets, num_keys, kv_heads, groups, plan_batch, plan_group,
        BLOCK_N, CLASSES, SPLITS, False,
    )  # fmt: skip
    c = job.part
    if c < 0:
        return

    by_query = order_of(job, query_order, query_places, shift, num_queries)
    by_key = order_of(job, key_order, key_places, 0, num_keys)
    pi_q = advance(pi_q, job.routing_row * num_queries * REGIMES)
    pi_k = advance(pi_k, job.routing_row * num_keys * COLUMNS)
    bias = Bias(
        barrier, exponent, epsilon, plateaus, falls, table, table_stride, table_length,
        level_until, slopes,
    )  # fmt: skip
    keys = take_keys(job.begin, job.end, by_key, pi_k, COLUMNS, BLOCK_N)
    offset = job.batch * k_batch + job.kv_head.to(tl.int64) * k_head + keys.token * k_token
    keys_here = load_matrix(k, offset, keys.live, HEAD_DIM, BLOCK_D)
    offset = job.batch * v_batch + job.kv_head.to(tl.int64) * v_head + keys.token * v_token
    values_here = load_matrix(v, offset, keys.live, HEAD_DIM, BLOCK_D)
    q += job.batch * q_batch
    run_lo += job.plan_row * num_queries * CLASSES + c
    run_hi += job.plan_row * num_queries * CLASSES + c
    reads = job.plan_row * num_keys * LABELS
    sums = KeySums(
        dk=tl.zeros([BLOCK_N, BLOCK_D], tl.float32),
        dv=tl.zeros([BLOCK_N, BLOCK_D], tl.float32),
        routing=tl.zeros([BLOCK_N, BLOCK_R], tl.float32),
        bias=tl.zeros([BLOCK_N], tl.float32),
    )
    batch_head = job.batch * kv_heads * SHARE
    heads_from = job.kv_head * SHARE + job.chunk * MINE
    for chunk in range(CHUNKS):
        first_head = heads_from + chunk * HEADS
        last_head = tl.minimum(first_head + HEADS, heads_from + MINE)
        for m in range(LABELS):
            first = reads + job.begin * LABELS + m
            last = reads + (job.end - 1) * LABELS + m
            from_min, from_max = tl.load(read_from + first), tl.load(read_from + last)
            to_min, to_max = tl.load(read_to + first), tl.load(read_to + last)
            if BIAS == GEOMETRY:
                to_min = tl.minimum(to_min, tl.load(flat_to + first))
            plateau = take_plateau(plateaus, falls, m, c, CLASSES, BIAS)
            zones = split_zones(from_min, from_max, to_min, tl.maximum(to_max, from_min), TOKENS)
            for index in range(0, zones.before + zones.after):
                start, limit = edge_block(index, zones, TOKENS)
                sums = key_block(
                    sums, keys_here, values_here, keys, q, q_head, q_token, by_query, pi_q, dout,
                    row_max, row_sum, delta, run_lo, run_hi, batch_head, first_head, last_head,
                    num_queries, num_keys, start, tl.minimum(start + TOKENS, limit),
                    factor, cap, plateau, bias, key_high, key_low,
                    True, BIAS, CAPPED, SQUARE, SPREAD, CLASSES, REGIMES, COLUMNS, HEADS,
                    PRECISION, HEAD_DIM, BLOCK_D, BLOCK_M,
                )  # fmt: skip
            for index in range(0, zones.whole):
                start = zones.stop + index * TOKENS
                sums = key_block(
                    sums, keys_here, values_here, keys, q, q_head, q_token, by_query, pi_q, dout,
                    row_max, row_sum, delta, run_lo, run_hi, batch_head, first_head, last_head,
                    num_queries, num_keys, start, start + TOKENS,
                    factor, cap, plateau, bias, key_high, key_low,
                    False, BIAS, CAPPED, SQUARE, SPREAD, CLASSES, REGIMES, COLUMNS, HEADS,
                    PRECISION, HEAD_DIM, BLOCK_D, BLOCK_M,
                )  # fmt: skip
        if KEYED:
            line = (batch_head + first_head) * num_keys
            tl.store(dkey_bias + line + keys.token, sums.bias, mask=keys.live)
            nothing = tl.zeros([BLOCK_N], tl.float32)
            sums = KeySums(dk=sums.dk, dv=sums.dv, routing=sums.routing, bias=nothing)

    line = (job.chunk * batches + job.batch) * kv_heads + job.kv_head
    at = line * num_keys + keys.token
    store_matrix(dk, at * HEAD_DIM, keys.live, sums.dk * scale, HEAD_DIM, BLOCK_D)
    store_matrix(dv, at * HEAD_DIM, keys.live, sums.dv, HEAD_DIM, BLOCK_D)
    if BIAS == WORTH:
        store_matrix(dpi_k, at * REGIMES, keys.live, sums.routing, REGIMES, BLOCK_R)
