"""The regime KV cache in C++: append one token per row, and attend with one query per row.

The state of a cache is seven tensors: k_pool, v_pool, table, marks, free, progress, biases.
`mosar.model.cache.regime_lists` owns and describes them. See csrc/lists.h and csrc/decode.h.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.kernels import native

IMPLEMENTATIONS = ("auto", "native", "tiled", "triton")
State = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def can_serve(impl: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these kernels can serve a cache; if not, "native" is a ValueError."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {IMPLEMENTATIONS}, got {impl!r}")
    if impl in ("tiled", "triton"):
        return False
    if device.type != "cpu":
        obstacle = f"it runs on the CPU, and the keys are on {device}"
    elif dtype == torch.float64:
        obstacle = "it computes in float32, and the keys are float64"
    else:
        obstacle = native.native_obstacle()
    if obstacle is None:
        _register_operators()
    elif impl == "native":
        raise ValueError(f"impl='native' cannot serve: {obstacle}; use impl='auto'")
    return obstacle is None


def append_token(
    k: Tensor,
    v: Tensor,
    labels: Tensor,
    positions: Tensor | None,
    valid: Tensor | None,
    state: State,
    reach: Tensor,
    *,
    slot: int,
    sinks: int,
    margin: int,
    of_key: Tensor | None = None,
) -> int:
    """Stores k, v [B, Hkv, 1, D] of labels [B, Gr] and evicts, in place.

    reach [C]: how far any query can read each class; margin: keys are kept for this many more
    positions, below 0 for ever. of_key [B, Hq] float64: what is added to every pair of the key.
    Returns how many more tokens fit before the state must grow.
    """
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.mosar.cache_append.default(
            k, v, labels, positions, valid, *state, of_key, reach, slot, sinks, margin
        )


def attend_token(
    q: Tensor,
    labels: Tensor,
    positions: Tensor | None,
    state: State,
    reach: Tensor,
    geometry: Tensor,
    *,
    position: int,
    scale: float,
    softcap: float | None,
    config: MoSARConfig,
    of_key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of q [B, Hq, 1, D] with labels [B, Gr] over the lists.

    The output has the dtype of q. reach [R, C]; geometry is the result of `pair_table`; position:
    the position of every row if no positions [B, 1] are given. of_key [B, Hq] float64: that of the
    newest key, if keys have one.
    """
    k_pool, v_pool, table, marks, _, progress, biases = state
    with torch._C._AutoDispatchBelowAutograd():
        out, lse = torch.ops.mosar.cache_attend.default(
            q.float().contiguous(),
            labels,
            positions,
            k_pool,
            v_pool,
            table,
            marks,
            progress,
            biases,
            of_key,
            reach,
            geometry,
            position,
            scale,
            0.0 if softcap is None else softcap,
            config.barrier,
            config.exponent,
        )
    return out.to(q.dtype), lse


def pair_table(config: MoSARConfig) -> Tensor:
    """Plateau and 1 / transition per (regime, class), [R, C, 2], with one more column for sinks."""
    return native._geometry(config)


@lru_cache(maxsize=1)
def _register_operators() -> None:
    torch.library.register_fake("mosar::cache_append")(_fake_append)
    torch.library.register_fake("mosar::cache_attend")(_fake_attend)


def _fake_append(*inputs):
    return torch.library.get_ctx().new_dynamic_size()


def _fake_attend(q, *inputs):
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1])
