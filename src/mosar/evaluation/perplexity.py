"""Perplexity of a checkpoint at one length under its routings, and what they do.

All routings see a batch before the next one is read, in turn, so that a ratio of their times holds
whatever else the machine does. The passes that measure discarded mass are not timed.

Shapes: B windows, T inputs each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mosar.attention import Routing
from mosar.evaluation.choices import NATIVE
from mosar.evaluation.discarded_mass import MassTally, watching
from mosar.evaluation.errors import EvaluationError
from mosar.evaluation.losses import LossTally, token_losses
from mosar.evaluation.routing import RoutingTally, count_window_pairs
from mosar.evaluation.subject import Subject
from mosar.evaluation.text import EvaluationText
from mosar.geometries import LayerRouting, MoSAR, RopeMask
from mosar.records import Cell, EvaluationRecord

HARD = ("top1", "sparse")


@dataclass
class _Tally:
    """What one routing gave so far."""

    loss: LossTally
    routing: RoutingTally | None
    seconds: float = 0.0


@dataclass
class _Pairs:
    """Pairs that a geometry without routers evaluates, where it is not all of them."""

    inside: int = 0
    causal: int = 0


@torch.no_grad()
def evaluate_length(
    subject: Subject,
    text: EvaluationText,
    length: int,
    routings: Sequence[str],
    *,
    cell: Cell,
    inputs: dict[str, Any],
    advance: Callable[[], None],
) -> list[EvaluationRecord]:
    """One record a routing; `advance` is called after each batch."""
    tallies = {routing: _tally(subject, length) for routing in routings}
    masses = [MassTally() for _ in subject.geometries] if set(HARD) & set(routings) else []
    pairs = _Pairs()
    for number, (tokens, segments) in enumerate(text.batches(length)):
        if number == 0:
            for routing in routings:
                # Not timed: first calls load kernels and take memory from the system.
                _losses(subject, tokens, segments, routing)
        first = number % len(routings)
        for routing in (*routings[first:], *routings[:first]):
            tally = tallies[routing]
            start = time.perf_counter()
            losses_BT, routed = _losses(subject, tokens, segments, routing)
            tally.seconds += time.perf_counter() - start
            tally.loss.add(losses_BT)
            if tally.routing is not None:
                tally.routing.add(routed, segments)
        if masses:
            with watching(cast(list[MoSAR], subject.geometries), masses):
                subject.decoder(tokens[:, :-1], segment_ids=segments, routing="top1")
        _count(subject, pairs, length, segments, len(tokens))
        advance()
    return [
        _record(
            subject,
            routing,
            tallies[routing],
            pairs,
            cell=cell,
            length=length,
            inputs=inputs,
            masses=masses if routing in HARD else [],
        )
        for routing in routings
    ]


def _tally(subject: Subject, length: int) -> _Tally:
    routing = None
    if subject.routed:
        routing = RoutingTally(subject.geometry, len(subject.geometries), length)
    return _Tally(LossTally(length, subject.train_length), routing)


def _losses(
    subject: Subject, tokens: Tensor, segments: Tensor | None, routing: str
) -> tuple[Tensor, list[LayerRouting]]:
    chosen = cast(Routing, "soft" if routing == NATIVE else routing)
    output = subject.decoder(tokens[:, :-1], segment_ids=segments, routing=chosen)
    losses_BT = token_losses(subject.decoder, output.hidden, tokens[:, 1:])
    if losses_BT.device.type != "cpu":
        torch.accelerator.synchronize()
    return losses_BT, output.routings


def _count(
    subject: Subject, pairs: _Pairs, length: int, segments: Tensor | None, windows: int
) -> None:
    geometry = subject.geometries[0]
    if isinstance(geometry, RopeMask):
        inside, causal = count_window_pairs(subject.geometry, geometry.window, length, segments)
        # Without documents every window is alike.
        times = windows if segments is None else 1
        pairs.inside += times * inside
        pairs.causal += times * causal


def _record(
    subject: Subject,
    routing: str,
    tally: _Tally,
    pairs: _Pairs,
    *,
    cell: Cell,
    length: int,
    inputs: dict[str, Any],
    masses: list[MassTally],
) -> EvaluationRecord:
    loss, routed = tally.loss, tally.routing
    if not math.isfinite(loss.mean):
        raise EvaluationError(
            f"the loss of {subject.run} is {loss.mean} at length {length} with routing {routing}"
        )
    layer_density = [pairs.inside / pairs.causal] * len(subject.geometries) if pairs.causal else []
    if routed is not None:
        layer_density = routed.layer_density
    return EvaluationRecord(
        cell=cell,
        step=subject.step,
        train_length=subject.train_length,
        length=length,
        routing=routing,
        windows=loss.windows,
        tokens=loss.windows * length,
        loss=loss.mean,
        loss_stderr=loss.stderr,
        buckets=loss.buckets(),
        seconds=tally.seconds,
        density=sum(layer_density) / len(layer_density) if layer_density else 1.0,
        layer_density=layer_density,
        reach_soft=None if routed is None else routed.reach(top1=False),
        reach_top1=None if routed is None else routed.reach(top1=True),
        discarded_mass=[mass.summary() for mass in masses],
        shares_soft={} if routed is None else routed.shares(top1=False),
        shares_top1={} if routed is None else routed.shares(top1=True),
        regimes=[] if routed is None else [regime.name for regime in subject.geometry.regimes],
        example_labels={} if routed is None else routed.example_labels,
        inputs=inputs,
    )
