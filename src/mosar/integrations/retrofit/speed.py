"""How fast a retrofitted model is: prefill, decoding and cache against its own attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from mosar.integrations.retrofit.attach import DENSE, Retrofit
from mosar.integrations.transformers_cache import cache_bytes
from mosar.records import Measurement, RetrofitSpeed

_ROUTINGS = (DENSE, "sparse")
_WARM_UP = 256


@torch.no_grad()
def time_retrofit(
    attached: Retrofit,
    window: Tensor,
    lengths: Sequence[int],
    *,
    rounds: int = 3,
    steps: int = 16,
    batch: int = 1,
    base: str = "",
    adapter: str = "",
) -> list[RetrofitSpeed]:
    """Times the model's own attention and sparse routing in turn, both with their caches.

    window [longest + 1]: the text; `batch` prompts are read side by side, each begins a little
    later in it. A round is these prompts, then `steps` tokens one by one. base, adapter: for the
    records. The routing is put back afterwards.
    """
    before, results = attached.routing, []
    shifts = [row * len(window) // batch for row in range(batch)]
    ids = torch.stack([window.roll(-shift) for shift in shifts]).to(attached.model.device)
    try:
        for routing in _ROUTINGS:
            _round(attached, routing, ids[:, :_WARM_UP], 2)
        for length in lengths:
            taken = {routing: ([], []) for routing in _ROUTINGS}
            held: dict[str, int] = {}
            for _ in range(rounds):
                for routing, (prefill, decode) in taken.items():
                    found = _round(attached, routing, ids[:, :length], steps)
                    prefill.append(found[0])
                    decode.append(found[1])
                    held[routing] = found[2]
            results.append(
                RetrofitSpeed(
                    base=base,
                    adapter=adapter,
                    length=length,
                    batch=batch,
                    dtype=str(attached.model.dtype).removeprefix("torch."),
                    prefill={r: Measurement(samples_ms=tuple(t[0])) for r, t in taken.items()},
                    decode={r: Measurement(samples_ms=tuple(t[1])) for r, t in taken.items()},
                    cache_bytes=held,
                )
            )
    finally:
        attached.set_routing(before)
    return results


def _round(attached: Retrofit, routing: str, ids: Tensor, steps: int) -> tuple[float, float, int]:
    """Milliseconds of a prompt and of a token after it, and the bytes of the prompt's cache."""
    attached.set_routing(routing)
    model: Any = attached.model
    cache = DynamicCache(config=model.config)
    prefill = _milliseconds(
        lambda: model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    )
    held = cache_bytes(cache)
    token = ids[:, -1:]

    def write() -> None:
        for _ in range(steps):
            model(input_ids=token, past_key_values=cache, use_cache=True)

    return prefill, _milliseconds(write) / steps, held


def _milliseconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begun)
