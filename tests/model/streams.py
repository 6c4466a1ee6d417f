"""Calls of attention as a cache sees them: the same tokens in portions, against all at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from cases import HEADS, Case, configs
from kernels.budget import errors, operator, pairs, plain_attend, scores
from mosar.model.cache import RegimeLayerCache

PADDINGS = ("none", "left", "holes")
# Output and log-sum-exp.
Results = tuple[Tensor, Tensor]


def stream(**changes: Any) -> Case:
    """A case whose queries are its keys' tokens."""
    case = Case(**{"routing": "sparse", "dtype": torch.float32} | changes)
    return case.with_(num_queries=case.num_keys)


@st.composite
def streams(
    draw: st.DrawFn,
    *,
    routings: tuple[str, ...] = ("sparse",),
    max_length: int = 40,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Any text that a cache may be given; its positions ascend strictly."""
    kv_heads, heads_per_kv = draw(st.sampled_from(HEADS))
    return stream(
        config=draw(configs(length=12, kv_heads=kv_heads)),
        routing=draw(st.sampled_from(routings)),
        batch=draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        heads_per_kv=heads_per_kv,
        num_keys=draw(st.integers(1, max_length)),
        head_dim=draw(st.sampled_from((4, 1, 7, 16, 20))),
        scale=draw(st.sampled_from((None, 0.3, 2.0))),
        softcap=draw(st.sampled_from((None, 1.5, 50.0))),
        window=draw(st.one_of(st.none(), st.integers(0, max_length), st.just(3.5))),
        positions=draw(st.sampled_from(("default", "counted"))),
        padding=draw(st.sampled_from(PADDINGS)),
        probabilities=draw(st.sampled_from(("mixed", "one-hot", "tied"))),
        group_axis=draw(st.booleans()),
        dtype=dtype,
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def portions(draw: st.DrawFn, length: int) -> list[int]:
    """Sizes that add up to a length, many of them 1."""
    sizes: list[int] = []
    while sum(sizes) < length:
        rest = length - sum(sizes)
        sizes.append(min(rest, draw(st.sampled_from((1, 1, 1, 2, 3, 5, 11, rest)))))
    return sizes


def new_cache(case: Case, **options: Any) -> RegimeLayerCache:
    return RegimeLayerCache(case.config, routing=case.routing, **{"window": case.window} | options)


def feed(
    cache: RegimeLayerCache,
    case: Case,
    begin: int,
    end: int,
    *,
    rows: Tensor | None = None,
    of_key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens begin..end of a case into a cache: output and log-sum-exp of their queries.

    of_key: of these tokens and rows.
    """

    def part(x: Tensor | None, axis: int) -> Tensor | None:
        if x is None:
            return None
        x = x.narrow(axis, begin, end - begin)
        return x if rows is None else x[rows]

    routing = {"soft": ("pi_k", "pi_q")}.get(case.routing, ("labels_k", "labels_q"))
    labels_q, labels_k = case.labels
    pair = (case.pi_k, case.pi_q) if case.routing == "soft" else (labels_k, labels_q)
    axis = -2 if case.routing == "soft" else -1
    cache.update(
        part(case.k, 2),
        part(case.v, 2),
        key_positions=part(case.key_positions, 1),
        key_valid=part(case.key_valid, 1),
        of_key=of_key,
        **{routing[0]: part(pair[0], axis)},
    )
    return cache.attend(
        part(case.q, 2),
        query_positions=part(case.key_positions, 1),
        scale=case.scale,
        softcap=case.softcap,
        return_lse=True,
        **{routing[1]: part(pair[1], axis)},
    )


def feed_all(
    cache: RegimeLayerCache, case: Case, sizes: Sequence[int], *, start: int = 0
) -> tuple[Tensor, Tensor]:
    """All portions one after the other, from token `start` on."""
    results, begin = [], start
    for size in sizes:
        results.append(feed(cache, case, begin, begin + size))
        begin += size
    output, lse = zip(*results, strict=True)
    return torch.cat(output, dim=2), torch.cat(lse, dim=2)


# Neighbouring tests ask for the same ones.
@lru_cache(maxsize=8)
@torch.no_grad()
def expected(case: Case) -> tuple[Results, Results, dict[str, float]]:
    """What plain torch gives and what is exact, and the largest entries if no terms cancelled."""
    reference = operator(case, case.routing, impl="reference")
    if case.dtype in (torch.float32, torch.float64):
        plain = reference(*case.inputs)
    else:
        plain = plain_attend(case, case.routing, case.inputs)
    q, k, v, pi_q, pi_k = (x.double() for x in case.inputs)
    bias, inside = pairs(case, case.routing, pi_q, pi_k)
    k_all, v_all = (x.repeat_interleave(case.heads_per_kv, dim=1) for x in (k, v))
    logit = scores(case, q, k_all) + bias
    inside = inside.expand(logit.shape)
    weight = torch.softmax(logit.masked_fill(~inside, -1e300), dim=-1).masked_fill(~inside, 0)
    largest = float(logit[inside].abs().max()) if inside.any() else 0.0
    output = float((weight @ v_all.abs()).max())
    floor = {"output": output * (1 + largest), "lse": largest * (1 + largest)}
    exact = reference(q, k, v, pi_q, pi_k)
    return plain, exact, floor


def assert_right(
    case: Case, output: Tensor, lse: Tensor, *, start: int = 0, rows: Tensor | None = None
) -> None:
    """Output and log-sum-exp from token `start` on are as right as the error budget asks.

    rows: of the case, in their order. What padding attends to is left out.
    """
    assert output.dtype == case.dtype
    assert lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    valid = torch.ones(case.batch, case.num_keys, dtype=torch.bool)
    if case.key_valid is not None:
        valid = case.key_valid
    plain, exact, floor = expected(case)
    length, eps = output.shape[2], torch.finfo(case.dtype).eps
    tokens = slice(start, start + length)
    rows = torch.arange(case.batch) if rows is None else rows
    counted = valid[rows][:, None, tokens].expand(-1, case.num_heads, -1)
    if not counted.any():
        return
    for index, (name, ours) in enumerate((("output", output), ("lse", lse))):
        chosen = [x[index][rows][:, :, tokens][counted] for x in (plain, exact)]
        error, allowed, largest = errors(ours[counted], *chosen)
        largest = max(largest, floor[name])
        assert error <= 2 * allowed + 4 * eps * largest, (name, error, allowed, largest)
