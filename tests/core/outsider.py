"""A second opinion on the attention operators, in float64.

Written from the definitions alone and sharing no code with the library: one pair at a time, looped
on purpose, no tiling, no sorting, no vectorised mask. Slow and plain, so that it can be checked by
reading it next to the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Array = np.ndarray
Regimes = Sequence[tuple[float, float]]  # (reach, plateau fraction); the last one is global
Bias = Callable[[int, int], float | None]  # (query, key) -> what is added to the logit; None: out


def pair_reach(m: int, n: int, *, regimes: Regimes, composition: str = "mean") -> float:
    """Reach of a query of regime m towards a key of regime n."""
    a, b = float(regimes[m][0]), float(regimes[n][0])
    if composition == "mean":
        return (a + b) / 2.0
    if composition == "min":
        return min(a, b)
    if composition == "max":
        return max(a, b)
    raise ValueError(f"unknown composition {composition!r}")


def pair_table(
    m: int, n: int, *, regimes: Regimes, composition: str = "mean"
) -> tuple[float, float, float]:
    """Reach, plateau and transition of a pair; the plateau fraction is always the mean."""
    reach = pair_reach(m, n, regimes=regimes, composition=composition)
    alpha = (float(regimes[m][1]) + float(regimes[n][1])) / 2.0
    return reach, alpha * reach, (1.0 - alpha) * reach


def both_global(m: int, n: int, regimes: Regimes) -> bool:
    """Whether query and key both have the last regime."""
    return m == len(regimes) - 1 and n == len(regimes) - 1


def gate(
    d: float,
    m: int,
    n: int,
    *,
    regimes: Regimes,
    barrier: float = 6.0,
    exponent: float = 2.0,
    composition: str = "mean",
    floor: float = 1.0,
) -> float:
    """Gate of a query of regime m on a key of regime n at distance d."""
    if both_global(m, n, regimes):
        return 1.0
    reach, plateau, transition = pair_table(m, n, regimes=regimes, composition=composition)
    if d <= plateau:
        return 1.0
    if d > reach:
        return floor * math.exp(-barrier)
    if transition == 0.0 or d >= plateau + transition:
        return math.exp(-barrier)
    return math.exp(-barrier * ((d - plateau) / transition) ** exponent)


class Pairs:
    """Which (query, key) pairs of each row exist, how far apart they are, which keys are sinks."""

    def __init__(
        self,
        batch: int,
        num_queries: int,
        num_keys: int,
        *,
        window: float | None = None,
        query_positions: Array | None = None,
        key_positions: Array | None = None,
        key_valid: Array | None = None,
        segment_ids: Array | None = None,
        num_sinks: int = 0,
    ) -> None:
        needs_tail = query_positions is None or segment_ids is not None
        if needs_tail and num_queries > num_keys:
            raise ValueError("more queries than keys: the queries cannot be the last of the keys")
        self.offset = num_keys - num_queries
        self.window = window
        self.num_sinks = num_sinks
        self.key_positions = _rows(key_positions, batch, num_keys, list(range(num_keys)))
        if query_positions is None:
            self.query_positions = [row[self.offset :] for row in self.key_positions]
        else:
            self.query_positions = _rows(query_positions, batch, num_queries, [])
        self.key_valid = _rows(key_valid, batch, num_keys, [1] * num_keys)
        self.segments = _rows(segment_ids, batch, num_keys, [0] * num_keys)
        self.has_segments = segment_ids is not None
        self.sinks = [self._sinks_of_row(b) for b in range(batch)]

    def _sinks_of_row(self, b: int) -> set[int]:
        seen: dict[int, int] = {}
        sinks = set()
        for j, valid in enumerate(self.key_valid[b]):
            segment = self.segments[b][j]
            if valid and seen.get(segment, 0) < self.num_sinks:
                sinks.add(j)
                seen[segment] = seen.get(segment, 0) + 1
        return sinks

    def distance(self, b: int, i: int, j: int) -> int:
        """Position of query i minus position of key j."""
        return self.query_positions[b][i] - self.key_positions[b][j]

    def exists(self, b: int, i: int, j: int) -> bool:
        """Whether query i may see key j before any routing."""
        if not self.key_valid[b][j]:
            return False
        if self.has_segments and self.segments[b][self.offset + i] != self.segments[b][j]:
            return False
        d = self.distance(b, i, j)
        return d >= 0 and (self.window is None or d <= self.window)

    def is_sink(self, b: int, j: int) -> bool:
        """Whether key j is one of the first valid keys of its row or segment."""
        return j in self.sinks[b]


def _rows(values: Array | None, batch: int, length: int, default: list[int]) -> list[list[int]]:
    """A [batch, length] array as nested lists of Python integers."""
    if values is None:
        return [list(default) for _ in range(batch)]
    values = np.asarray(values)
    if values.shape != (batch, length):
        raise ValueError(f"expected shape {(batch, length)}, got {values.shape}")
    return [[int(x) for x in row] for row in values]


def _grouped(pi: Array) -> Array:
    """[B, N, R] or [B, Gr, N, R] probabilities as [B, Gr, N, R] in float64."""
    pi = np.asarray(pi, dtype=np.float64)
    return pi[:, None] if pi.ndim == 3 else pi


def _label(pi: Array) -> int:
    """Index of the largest probability, the lowest one on ties."""
    best = 0
    for r in range(1, len(pi)):
        if pi[r] > pi[best]:
            best = r
    return best


def _admissible(d: int, m: int, n: int, sink: bool, *, regimes: Regimes, composition: str) -> bool:
    """Whether the sparse support holds an existing pair."""
    if sink or both_global(m, n, regimes):
        return True
    return d <= pair_reach(m, n, regimes=regimes, composition=composition)


def _attend_head(
    q: Array, k: Array, v: Array, *, scale: float, softcap: float | None, bias: Bias
) -> tuple[Array, Array]:
    """One head of one row: q [T, D], k [S, D], v [S, Dv] -> out [T, Dv], lse [T]."""
    out = np.zeros((q.shape[0], v.shape[1]))
    lse = np.full(q.shape[0], -math.inf)
    for i in range(q.shape[0]):
        logits: list[tuple[int, float]] = []
        for j in range(k.shape[0]):
            extra = bias(i, j)
            if extra is None or extra == -math.inf:
                continue
            s = scale * float(np.dot(q[i], k[j]))
            if softcap:
                s = softcap * math.tanh(s / softcap)
            logits.append((j, s + extra))
        if not logits:
            continue
        top = max(s for _, s in logits)
        lse[i] = top + math.log(math.fsum(math.exp(s - top) for _, s in logits))
        for j, s in logits:
            out[i] += math.exp(s - lse[i]) * v[j]
    return out, lse


def _attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None,
    softcap: float | None,
    bias_of: Callable[[int, int], Bias],
) -> tuple[Array, Array]:
    """All rows and heads; bias_of(row, query head) gives the rule for that head's pairs."""
    batch, heads, num_queries, dim = q.shape
    per_kv = heads // k.shape[1]
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    out = np.zeros((batch, heads, num_queries, v.shape[3]))
    lse = np.zeros((batch, heads, num_queries))
    for b in range(batch):
        for h in range(heads):
            kv = h // per_kv
            out[b, h], lse[b, h] = _attend_head(
                q[b, h], k[b, kv], v[b, kv], scale=scale, softcap=softcap, bias=bias_of(b, h)
            )
    return out, lse


def attention(
    q: Array,
    k: Array,
    v: Array,
    pi_q: Array,
    pi_k: Array,
    *,
    regimes: Regimes,
    barrier: float = 6.0,
    exponent: float = 2.0,
    floor: float = 1.0,
    epsilon: float = 1e-6,
    composition: str = "mean",
    num_sinks: int = 0,
    routing: str = "soft",
    scale: float | None = None,
    softcap: float | None = None,
    window: float | None = None,
    query_positions: Array | None = None,
    key_positions: Array | None = None,
    key_valid: Array | None = None,
    segment_ids: Array | None = None,
) -> tuple[Array, Array]:
    """Routed attention: out [B, Hq, T, D] and lse [B, Hq, T]."""
    if routing not in ("soft", "top1", "sparse"):
        raise ValueError(f"unknown routing {routing!r}")
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    pi_q, pi_k = _grouped(pi_q), _grouped(pi_k)
    per_group = q.shape[1] // pi_q.shape[1]
    pairs = Pairs(
        q.shape[0],
        q.shape[2],
        k.shape[2],
        window=window,
        query_positions=query_positions,
        key_positions=key_positions,
        key_valid=key_valid,
        segment_ids=segment_ids,
        num_sinks=num_sinks,
    )
    gates_at: dict[int, list[list[float]]] = {}

    def gates(d: int) -> list[list[float]]:
        if d not in gates_at:
            gates_at[d] = [
                [
                    gate(
                        d,
                        m,
                        n,
                        regimes=regimes,
                        barrier=barrier,
                        exponent=exponent,
                        composition=composition,
                        floor=floor,
                    )
                    for n in range(len(regimes))
                ]
                for m in range(len(regimes))
            ]
        return gates_at[d]

    def worth(d: int, weights_q: Array, weights_k: Array) -> float:
        total = 0.0
        for m, row in enumerate(gates(d)):
            for n, g in enumerate(row):
                total += float(weights_q[m]) * g * float(weights_k[n])
        return total

    def pair_bias(b: int, group: int, i: int, j: int) -> float | None:
        if not pairs.exists(b, i, j):
            return None
        if pairs.is_sink(b, j):
            return 0.0
        d = pairs.distance(b, i, j)
        weights_q, weights_k = pi_q[b, group, i], pi_k[b, group, j]
        if routing == "soft":
            return math.log(max(worth(d, weights_q, weights_k), epsilon))
        m, n = _label(weights_q), _label(weights_k)
        ends = routing == "sparse" or floor == 0
        if ends and not _admissible(d, m, n, False, regimes=regimes, composition=composition):
            return None
        return math.log(max(gates(d)[m][n], epsilon))

    def bias_of(b: int, h: int) -> Bias:
        return lambda i, j: pair_bias(b, h // per_group, i, j)

    return _attend(q, k, v, scale=scale, softcap=softcap, bias_of=bias_of)


def distance_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    log_gate: Array | None = None,
    slopes: Array | None = None,
    window: float | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    query_positions: Array | None = None,
    key_positions: Array | None = None,
    key_valid: Array | None = None,
    segment_ids: Array | None = None,
) -> tuple[Array, Array]:
    """Dense causal attention whose bias depends on distance alone.

    The bias is log_gate[h or 0][d] - slopes[h] * d. A distance outside the log_gate table is an
    IndexError; a log gate of -inf takes the pair out.
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    table = None if log_gate is None else np.asarray(log_gate, dtype=np.float64)
    pairs = Pairs(
        q.shape[0],
        q.shape[2],
        k.shape[2],
        window=window,
        query_positions=query_positions,
        key_positions=key_positions,
        key_valid=key_valid,
        segment_ids=segment_ids,
    )

    def bias_of(b: int, h: int) -> Bias:
        def bias(i: int, j: int) -> float | None:
            if not pairs.exists(b, i, j):
                return None
            d = pairs.distance(b, i, j)
            total = 0.0
            if table is not None:
                total += float(table[h if table.shape[0] > 1 else 0, d])
            if slopes is not None:
                total -= float(slopes[h]) * d
            return total

        return bias

    return _attend(q, k, v, scale=scale, softcap=softcap, bias_of=bias_of)


def support(
    labels_q: Array,
    labels_k: Array,
    *,
    regimes: Regimes,
    composition: str = "mean",
    num_sinks: int = 0,
    window: float | None = None,
    query_positions: Array | None = None,
    key_positions: Array | None = None,
    key_valid: Array | None = None,
    segment_ids: Array | None = None,
) -> tuple[Array, Array]:
    """Sparse support and existing pairs of labels [B, T] and [B, S], both [B, T, S] bool."""
    labels_q, labels_k = np.asarray(labels_q), np.asarray(labels_k)
    batch, num_queries = labels_q.shape
    num_keys = labels_k.shape[1]
    pairs = Pairs(
        batch,
        num_queries,
        num_keys,
        window=window,
        query_positions=query_positions,
        key_positions=key_positions,
        key_valid=key_valid,
        segment_ids=segment_ids,
        num_sinks=num_sinks,
    )
    mask = np.zeros((batch, num_queries, num_keys), dtype=bool)
    causal = np.zeros((batch, num_queries, num_keys), dtype=bool)
    for b in range(batch):
        for i in range(num_queries):
            for j in range(num_keys):
                causal[b, i, j] = pairs.exists(b, i, j)
                mask[b, i, j] = causal[b, i, j] and _admissible(
                    pairs.distance(b, i, j),
                    int(labels_q[b, i]),
                    int(labels_k[b, j]),
                    pairs.is_sink(b, j),
                    regimes=regimes,
                    composition=composition,
                )
    return mask, causal
