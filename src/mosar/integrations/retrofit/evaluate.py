"""What a retrofitted model has lost: perplexity, density, attention; and a window in its place.

Attention is causal and a token's regime depends on the token alone, so that one pass over a window
gives the losses of every shorter window from the same beginning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from mosar.core.config import Regime
from mosar.core.hard_domain import build_hard_domain
from mosar.integrations.retrofit.attach import DENSE, Retrofit, default_config, retrofit
from mosar.integrations.retrofit.layer import SATURATED, RoutedLayer
from mosar.integrations.retrofit.objective import (
    Scoring,
    by_group,
    head_attention,
    read_attention,
    spread_queries,
)
from mosar.records import RetrofitEvaluation

ROUTINGS = (DENSE, "soft", "top1", "sparse")
WINDOW = "window"
"""The routing of a record where every token reaches equally far."""
# Queries whose attention over all keys is computed to see what the support leaves out.
_SAMPLED = 64
_CHUNK = 1024


@torch.no_grad()
def evaluate_retrofit(
    attached: Retrofit,
    windows: Tensor,
    lengths: Sequence[int],
    routings: Sequence[str] = ROUTINGS,
    *,
    base: str = "",
    adapter: str = "",
    advance: Callable[[], None] = lambda: None,
) -> list[RetrofitEvaluation]:
    """Losses of windows [number, longest + 1] at every length and routing.

    base, adapter: the model's name and the checksum of the routers' file, for the records. The
    routing is put back afterwards.
    """
    before, longest = attached.routing, max(lengths)
    if windows.shape[1] < longest + 1:
        raise ValueError(f"windows must hold {longest + 1} tokens, got {windows.shape[1]}")
    records = []
    try:
        for routing in routings:
            attached.set_routing(routing)
            figures = {length: _Support(attached) for length in lengths}
            watch = _observer(figures) if routing == "sparse" else None
            losses = []
            for window in windows:
                attached.observe(watch)
                losses.append(token_losses(attached, window[: longest + 1]))
                attached.observe(None)
                advance()
            losses_WT = torch.stack(losses)
            for length in lengths:
                record = _record(attached, losses_WT[:, :length], routing, figures[length])
                named = {"base": base, "adapter": "" if routing == DENSE else adapter}
                text = text_fingerprint(windows[:, : longest + 1])
                records.append(replace(record, text=text, **named))
    finally:
        attached.observe(None)
        attached.set_routing(before)
    return sorted(records, key=lambda record: (record.length, routings.index(record.routing)))


def token_losses(attached: Retrofit, window: Tensor) -> Tensor:
    """The cross-entropy of each next token of window [n + 1], [n]; logits are made in chunks."""
    model: Any = attached.model
    window = window.to(model.device)
    hidden = model.base_model(input_ids=window[None, :-1], use_cache=False).last_hidden_state[0]
    losses = []
    for start in range(0, len(hidden), _CHUNK):
        logits = next_token_logits(model, hidden[start : start + _CHUNK])
        targets = window[1:][start : start + _CHUNK]
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(losses).cpu()


def next_token_logits(model: Any, hidden: Tensor) -> Tensor:
    """hidden [..., width], the decoder's output -> [..., vocabulary], float32."""
    logits = model.get_output_embeddings()(hidden).float()
    cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def text_fingerprint(windows: Tensor) -> str:
    """sha256 of the tokens, by which records of the same text are known."""
    content = f"{list(windows.shape)}".encode() + windows.contiguous().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


def evaluate_window(
    model: PreTrainedModel,
    windows: Tensor,
    lengths: Sequence[int],
    reach: int,
    *,
    num_sinks: int,
    layers: Collection[int] | None = None,
    base: str = "",
    advance: Callable[[], None] = lambda: None,
) -> list[RetrofitEvaluation]:
    """The same for a model without routers whose tokens all reach `reach` tokens and the sinks.

    layers: those with the window, by default those that would get routers.
    """
    with fixed_window(model, reach, num_sinks, layers) as attached:
        records = evaluate_retrofit(
            attached, windows, lengths, ("sparse",), base=base, advance=advance
        )
    return [replace(r, routing=WINDOW, regimes={"S": float(reach)}) for r in records]


@contextmanager
def fixed_window(
    model: PreTrainedModel, reach: int, num_sinks: int, layers: Collection[int] | None = None
) -> Iterator[Retrofit]:
    """A model without routers whose tokens all reach `reach` tokens and the sinks, for a while."""
    # There must be a global regime; nobody chooses it.
    regimes = (Regime("S", reach, 1.0), Regime("G", 1e9, 1.0))
    config = default_config(model, regimes=regimes, num_sinks=num_sinks)
    attached = retrofit(model, config, layers=layers)
    try:
        for layer in attached:
            for router in layer.routers:
                router.bias2.data[:, -1] = -SATURATED
        attached.set_routing("sparse")
        yield attached
    finally:
        attached.detach()


def _record(
    attached: Retrofit, losses_WT: Tensor, routing: str, support: _Support
) -> RetrofitEvaluation:
    means = losses_WT.double().mean(dim=1)
    spread = float(means.std() / len(means) ** 0.5) if len(means) > 1 else 0.0
    regimes = () if routing == DENSE else attached.config.regimes
    return RetrofitEvaluation(
        base="",
        adapter="",
        text="",
        routing=routing,
        length=losses_WT.shape[1],
        windows=len(losses_WT),
        loss=float(means.mean()),
        loss_stderr=spread,
        window_losses=means.tolist(),
        layer_density=_means(support.density),
        layer_lost=_means(support.lost),
        regimes={regime.name: regime.reach for regime in regimes},
    )


class _Support:
    """Of top-1 choices at one length: the figures of each window [G], by layer."""

    def __init__(self, attached: Retrofit):
        self.density: dict[int, list[Tensor]] = {layer.index: [] for layer in attached}
        self.lost: dict[int, list[Tensor]] = {layer.index: [] for layer in attached}
        """The share of the layer's own attention outside of the support, of sampled queries."""


def _means(by_layer: dict[int, list[Tensor]]) -> list[list[float]]:
    """Over windows; empty where nothing was observed."""
    return [
        torch.stack(found).double().mean(dim=0).tolist() for found in by_layer.values() if found
    ]


def _observer(figures: dict[int, _Support]) -> Any:
    def observe(
        layer: RoutedLayer, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> None:
        routed = layer.route(q, k)
        logits_q, logits_k = by_group(routed.query.logits), by_group(routed.key.logits)
        for length, support in figures.items():
            labels_q, labels_k = (x.argmax(dim=-1)[None, :, :length] for x in (logits_q, logits_k))
            domain = build_hard_domain(
                labels_q, labels_k, layer.config, window=layer.window, materialize=False
            )
            density = domain.row_counts.double() / domain.row_causal_counts.double()
            support.density[layer.index].append(density[0])
        queries = spread_queries(_SAMPLED, k)
        scoring = Scoring(options.get("scale"), options.get("softcap"), layer.window)
        attention = head_attention(q[0], k[0], queries, scoring)
        lost = 1 - read_attention(attention, logits_q[:, queries], logits_k, queries, layer)
        for length, support in figures.items():
            chosen = lost[:, : max(_SAMPLED * length // q.shape[2], 1)]
            support.lost[layer.index].append(chosen.mean(dim=1))

    return observe
