"""The operators `torch.ops.mosar.triton_*`: their launches, their autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from mosar.kernels.autograd import empty_results, register_attention
from mosar.kernels.triton.blocks import choose, length_class, num_splits
from mosar.kernels.triton.launches import LOG2E, in_base_two, keep_whole, launching_on
from mosar.kernels.triton.plan import reader_runs
from mosar.kernels.triton.tiles import heads_of_tile


@triton_op("mosar::triton_attend", mutates_args={})
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pi_q: Tensor | None,
    pi_k: Tensor | None,
    query_order: Tensor | None,
    key_order: Tensor | None,
    query_places: Tensor | None,
    key_places: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    run_lo: Tensor,
    run_hi: Tensor,
    run_flat: Tensor | None,
    plateaus: Tensor | None,
    falls: Tensor | None,
    table: Tensor | None,
    level_until: Tensor | None,
    slopes: Tensor | None,
    key_bias: Tensor | None,
    groups: int,
    bias: int,
    scale: float,
    softcap: float,
    barrier: float,
    exponent: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, Hq, T, D], log-sum-exp [B, Hq, T], maximum and sum of each softmax [2, B, Hq, T].

    The plan is a `DevicePlan`; softcap 0: none. GEOMETRY takes its gates from exponent, barrier and
    plateaus, and WORTH from `table` [R * C, length]. TABLE takes its bias from `table`
    [1 or Hq, length] in base 2 and slopes. key_bias [B, Hq, S] float64 goes with all but WORTH.
    """
    common = _common(locals())
    out, lse, softmax = empty_results(q)
    kernel, blocks = choose("forward", q.shape[3], q.dtype, q.device)
    with launching_on(q):
        wrap_triton(kernel)[_query_grid(q, k, query_offsets, common["KEYED"])](
            out=out,
            lse=lse,
            row_max=softmax[0],
            row_sum=softmax[1],
            query_offsets=query_offsets,
            run_hi=run_hi,
            run_flat=run_flat,
            **common,
            **blocks,
        )
    return out, lse, softmax


@triton_op("mosar::triton_attend_backward", mutates_args={})
def attend_backward(
    dout: Tensor,
    dlse: Tensor,
    out: Tensor,
    softmax: Tensor,
    learned: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pi_q: Tensor | None,
    pi_k: Tensor | None,
    query_order: Tensor | None,
    key_order: Tensor | None,
    query_places: Tensor | None,
    key_places: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    run_lo: Tensor,
    run_hi: Tensor,
    run_flat: Tensor | None,
    plateaus: Tensor | None,
    falls: Tensor | None,
    table: Tensor | None,
    level_until: Tensor | None,
    slopes: Tensor | None,
    key_bias: Tensor | None,
    groups: int,
    bias: int,
    scale: float,
    softcap: float,
    barrier: float,
    exponent: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dpi_q and dpi_k (empty without WORTH), and that of key_bias (empty if learned is
    0).
    """
    common = _common(locals())
    batch, heads, _, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    common |= {
        "dout": dout,
        "row_max": softmax[0],
        "row_sum": softmax[1],
        "run_hi": run_hi,
        "scale": scale,
        "BLOCK_R": triton.next_power_of_2(common["REGIMES"]),
    }
    dq = torch.empty_like(out)
    delta = torch.empty_like(dlse)
    routed = pi_q is not None and pi_k is not None
    regimes = common["REGIMES"] if routed else 0
    shares_q = delta.new_empty((*delta.shape, regimes))
    kernel, blocks = choose("query", dim, q.dtype, q.device)
    with launching_on(q):
        wrap_triton(kernel)[_query_grid(q, k, query_offsets, common["KEYED"])](
            out=out,
            dlse=dlse,
            delta=delta,
            dq=dq,
            dpi_q=shares_q,
            query_offsets=query_offsets,
            run_flat=run_flat,
            EXACT=q.dtype == torch.float32,
            **common,
            **blocks,
        )
        readers = reader_runs(query_offsets, key_offsets, run_lo, run_hi, run_flat, keys)
    classes = run_lo.shape[2]
    kernel, blocks = choose("key", dim, q.dtype, q.device)
    splits = num_splits(batch * kv_heads * keys // 64, heads // kv_heads, q.device)
    # Zeros, because the plan leaves out padded keys.
    new = delta.new_empty if key_order is None else delta.new_zeros
    dtype = q.dtype if splits == 1 else torch.float32
    dk = new((splits, *k.shape), dtype=dtype)
    dv = new((splits, *k.shape), dtype=dtype)
    shares_k = new((splits, *k.shape[:3], regimes))
    dkey_bias = new((batch, heads, keys) if common["KEYED"] else (0,))

    def key_grid(meta: dict[str, Any]) -> tuple[int]:
        tiles = -(-keys // meta["BLOCK_N"]) + classes - 1
        return (tiles * splits * kv_heads * batch,)

    with launching_on(q):
        wrap_triton(kernel)[key_grid](
            delta=delta,
            dk=dk,
            dv=dv,
            dpi_k=shares_k,
            dkey_bias=dkey_bias,
            key_offsets=key_offsets,
            read_from=readers.first,
            read_to=readers.end,
            flat_to=readers.flat_end,
            batches=batch,
            SPLITS=splits,
            **common,
            **blocks,
        )
    dk, dv = (x[0] if splits == 1 else x.sum(dim=0).to(q.dtype) for x in (dk, dv))
    dkey_bias = dkey_bias.double() if learned else delta.new_empty(0)
    if pi_k is None or not routed:
        return dq, dk, dv, delta.new_empty(0), delta.new_empty(0), dkey_bias
    dpi_q = shares_q.unflatten(1, (groups, heads // groups)).sum(dim=2)
    dpi_k = shares_k.sum(dim=0).unflatten(1, (groups, kv_heads // groups)).sum(dim=2)
    # Sinks have their own column and are not routed.
    return dq, dk, dv, dpi_q, F.pad(dpi_k, (0, pi_k.shape[-1] - regimes)), dkey_bias


def _common(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator that all kernels take."""
    q, k, v, run_lo, table = (given[name] for name in ("q", "k", "v", "run_lo", "table"))
    pi_q, pi_k, groups, exponent = (given[x] for x in ("pi_q", "pi_k", "groups", "exponent"))
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    plan_rows, _, classes = run_lo.shape
    by_batch, by_group = groups, 1
    if plan_rows == 1:
        by_batch = by_group = 0
    elif plan_rows == batch:
        by_batch, by_group = 1, 0
    high = low = None
    if given["key_bias"] is not None:
        exact = given["key_bias"] * LOG2E
        high = exact.float()
        low = (exact - high).float()
    strides = {
        f"{name}_{axis}": matrix.stride(index)
        for name, matrix in (("q", q), ("k", k), ("v", v))
        for index, axis in enumerate(("batch", "head", "token"))
    }
    handed_on = (
        *("q", "k", "v", "pi_q", "pi_k", "query_order", "key_order", "query_places", "key_places"),
        *("run_lo", "plateaus", "falls", "table", "level_until", "slopes"),
        *("groups", "exponent", "epsilon"),
    )
    return {
        **strides,
        **in_base_two(given["scale"], given["softcap"], given["barrier"]),
        **{name: given[name] for name in handed_on},
        "key_high": high,
        "key_low": low,
        "plan_batch": by_batch,
        "plan_group": by_group,
        "kv_heads": kv_heads,
        "num_queries": queries,
        "num_keys": keys,
        "shift": keys - queries,
        "table_stride": 0 if table is None or table.shape[0] == 1 else table.shape[1],
        "table_length": 1 if table is None else table.shape[1],
        "length_class": length_class(keys),
        "SHARE": heads // kv_heads,
        "HEAD_DIM": dim,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "LABELS": given["query_offsets"].shape[1] - 1,
        "CLASSES": classes,
        "REGIMES": 1 if pi_q is None else pi_q.shape[-1],
        "COLUMNS": 1 if pi_k is None else pi_k.shape[-1],
        "BIAS": given["bias"],
        "KEYED": high is not None,
        "SQUARE": exponent == 2,
        "PRECISION": _dot_precision(q),
    }


def _dot_precision(q: Tensor) -> str:
    """The precision of float32 products, from torch's older or newer settings."""
    if q.dtype != torch.float32 or torch.version.hip is not None:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _query_grid(q: Tensor, k: Tensor, query_offsets: Tensor, keyed: bool):
    batch, heads, queries, _ = q.shape
    kv_heads, labels = k.shape[1], query_offsets.shape[1] - 1
    share = heads // kv_heads

    def grid(meta: dict[str, Any]) -> tuple[int]:
        together = heads_of_tile(share, meta["BLOCK_M"], keyed)
        tiles = -(-queries // (meta["BLOCK_M"] // together)) + labels - 1
        return (tiles * -(-share // together) * kv_heads * batch,)

    return grid


# Only shapes, because the interpreter cannot run a kernel on tensors without data.
register_attention("triton_attend", impl="triton", bias_inputs=(19,))
keep_whole("triton_attend")
keep_whole("triton_attend_backward")
