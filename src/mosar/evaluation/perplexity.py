"""Perplexity of a checkpoint at one length under its routings, and what they do.

All routings see a batch before the next one is read, in turn, so that a ratio of their times holds
whatever else the machine does. The passes that measure discarded mass are not timed. Routings that
are one operator, as in a hard model, are computed once.

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
from mosar.errors import ModelError
from mosar.evaluation.discarded_mass import MassTally, watching
from mosar.evaluation.loaded_run import LoadedRun
from mosar.evaluation.losses import LossTally, token_losses
from mosar.evaluation.routing import NO_ROUTING, PairTally, RoutingTally
from mosar.evaluation.validation_text import ValidationText
from mosar.geometries import LayerRouting, MoSAR
from mosar.records import EvaluationRecord

HARD = ("top1", "sparse")


@dataclass
class _Tally:
    """Results of one routing so far."""

    loss: LossTally
    routing: RoutingTally | None
    pairs: PairTally
    seconds: float = 0.0


@torch.no_grad()
def evaluate_length(
    loaded: LoadedRun,
    text: ValidationText,
    length: int,
    routings: Sequence[str],
    advance: Callable[[], None],
    **fields: Any,
) -> list[EvaluationRecord]:
    """One record per routing, with `fields`; `advance` is called after each batch."""
    geometries, asked = loaded.decoder.geometries, list(routings)
    operators = {routing: loaded.operator(routing) for routing in asked}
    # Of the routings that are one operator, the last one stands for all.
    routings = list({operator: routing for routing, operator in operators.items()}.values())
    tallies = {operators[routing]: _tally(loaded, length) for routing in routings}
    weighs = loaded.geometry.routed and set(HARD) & set(asked)
    has_floor = loaded.operator("top1") != loaded.operator("sparse")
    masses = [MassTally() for _ in geometries] if weighs else []
    for number, (tokens, segments) in enumerate(text.batches(length)):
        if number == 0:
            for routing in routings:
                # Not timed: first calls load kernels and take memory from the system.
                with loaded.executing(routing, length) as operator:
                    _losses(loaded, tokens, segments, operator)
        first = number % len(routings)
        for routing in (*routings[first:], *routings[:first]):
            tally = tallies[operators[routing]]
            start = time.perf_counter()
            with loaded.executing(routing, length) as operator:
                losses_BT, routed = _losses(loaded, tokens, segments, operator)
                tally.seconds += time.perf_counter() - start
                tally.pairs.add(geometries, (len(tokens), length), routing, routed, segments)
            tally.loss.add(losses_BT)
            if tally.routing is not None:
                tally.routing.add(routed)
        if masses and has_floor:
            with watching(cast(list[MoSAR], geometries), masses):
                loaded.decoder(tokens[:, :-1], segment_ids=segments, routing="top1")
        advance()
    fields["length"] = length
    return [
        _record(
            loaded,
            tallies[operators[routing]],
            masses if routing in HARD else [],
            routing=routing,
            **fields,
        )
        for routing in asked
    ]


def _tally(loaded: LoadedRun, length: int) -> _Tally:
    routing = None
    if isinstance(loaded.geometry, MoSAR):
        routing = RoutingTally(loaded.geometry.config, len(loaded.decoder.layers), length)
    return _Tally(LossTally(length, loaded.train_length), routing, PairTally())


def _losses(
    loaded: LoadedRun, tokens: Tensor, segments: Tensor | None, routing: Routing
) -> tuple[Tensor, list[LayerRouting]]:
    output = loaded.decoder(tokens[:, :-1], segment_ids=segments, routing=routing)
    losses_BT = token_losses(loaded.decoder, output.hidden, tokens[:, 1:])
    if losses_BT.device.type != "cpu":
        torch.accelerator.synchronize()
    return losses_BT, output.routings


def _record(
    loaded: LoadedRun, tally: _Tally, masses: list[MassTally], **fields: Any
) -> EvaluationRecord:
    loss = tally.loss
    if not math.isfinite(loss.mean):
        raise ModelError(
            f"the loss of {loaded.run} is {loss.mean} at length {fields['length']} with routing "
            f"{fields['routing']}"
        )
    return EvaluationRecord(
        **fields,
        **(NO_ROUTING if tally.routing is None else tally.routing.record_fields()),
        windows=loss.windows,
        tokens=loss.windows * fields["length"],
        loss=loss.mean,
        loss_stderr=loss.stderr,
        buckets=loss.buckets(),
        seconds=tally.seconds,
        density=tally.pairs.density,
        layer_density=tally.pairs.layer_density,
        discarded_mass=[mass.summary() for mass in masses],
    )
