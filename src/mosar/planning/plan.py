"""A plan: parameters, operations, memory and communication of a run on a mesh, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mosar.geometries import GEOMETRIES, Fixed, RopeMask
from mosar.planning import communication, flops, memory
from mosar.planning.density import DensityCurve, covered
from mosar.planning.errors import PlanError
from mosar.planning.lines import BASES, Basis, Line, say
from mosar.planning.mesh import Mesh, fitting_meshes
from mosar.planning.parameters import is_routed, parameter_parts, tensor_part, total
from mosar.training.config import RunConfig

FACTORS = (0.5, 1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Batch:
    """What one rank sees of an update."""

    windows: int
    """Of all ranks."""
    pass_windows: int
    passes: int


@dataclass(frozen=True)
class Cost:
    """Attention of one token at one context under one curve, forward."""

    curve: str
    context: int
    dense: float
    """FLOP over all causal pairs."""
    sparse: float
    """FLOP inside the support."""
    density: float
    basis: Basis
    share: float
    """Of the sparse forward pass, attention's part."""
    cache: float
    """Bytes of the KV cache after so many tokens, on one rank."""
    dense_cache: float


@dataclass(frozen=True)
class Plan:
    config: RunConfig
    mesh: Mesh
    context: int
    batch: Batch
    lines: tuple[Line, ...]
    costs: tuple[Cost, ...]
    notes: tuple[str, ...]

    def value(self, section: str, name: str) -> float:
        """The number of one line."""
        return next(x.value for x in self.lines if (x.section, x.name) == (section, name))

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "kind": "plan",
            "preset": self.config.preset,
            "variant": self.config.variant,
            "context": self.context,
            "mesh": self.mesh._asdict(),
            "batch": vars(self.batch),
            "bases": dict(BASES),
            "lines": [line.to_dict() for line in self.lines],
            "attention_by_context": [vars(cost) for cost in self.costs],
            "notes": list(self.notes),
            "config": self.config.to_dict(),
        }


def make_plan(
    config: RunConfig,
    *,
    context: int,
    gpus: int,
    data: int | None = None,
    shard: int | None = None,
    tensor: int | None = None,
    windows: int | None = None,
    limit: float | None = None,
    curves: Sequence[DensityCurve] = (),
    contexts: Sequence[int] | None = None,
) -> Plan:
    """The plan of `config` at a context; the first of `curves` is the one that lines use.

    `limit`: bytes that a rank has. Sizes of the mesh that are not given are chosen: the simplest
    mesh whose memory stays below the limit.
    """
    if context < 1:
        raise PlanError(f"--context must be at least 1, got {context}")
    best: Plan | None = None
    refused: PlanError | None = None
    groups = config.attention.routing_groups if is_routed(config.attention) else 1
    for mesh in fitting_meshes(config.model, gpus, data, shard, tensor, groups=groups):
        try:
            plan = _plan(config, mesh, context, windows, curves, contexts)
        except PlanError as error:
            refused = refused or error
            continue
        if limit is None or plan.value(*PEAK) <= limit:
            return plan
        if best is None or plan.value(*PEAK) < best.value(*PEAK):
            best = plan
    if best is None:
        assert refused is not None
        raise refused
    assert limit is not None
    short = (
        f"No such mesh fits {say(limit, 'B')} a rank; this is the one that needs least. "
        "Fewer tokens in a pass (--set train.micro_batch), train.checkpoint_activations=true, or "
        "more ranks help."
    )
    return replace(best, notes=(*best.notes, short))


PEAK = ("memory of a rank, training", "sum")


def _plan(
    config: RunConfig,
    mesh: Mesh,
    context: int,
    windows: int | None,
    curves: Sequence[DensityCurve],
    contexts: Sequence[int] | None,
) -> Plan:
    notes: list[str] = []
    batch = _batch(config, mesh, windows, notes)
    lines = [
        *_parameter_lines(config, mesh),
        *_flop_lines(config, context, batch, mesh, curves),
        *_memory_lines(config, mesh, context, batch),
        *_cache_lines(config, mesh, context, curves),
        *_communication_lines(config, mesh, context, batch),
    ]
    if contexts is None:
        contexts = [max(1, round(f * config.model.max_length)) for f in FACTORS]
    costs = [
        _cost(config, mesh, n, curve) for curve in curves or [None] for n in sorted(set(contexts))
    ]
    return Plan(config, mesh, context, batch, tuple(lines), tuple(costs), tuple(notes))


def _batch(config: RunConfig, mesh: Mesh, windows: int | None, notes: list[str]) -> Batch:
    train, readers = config.train, mesh.readers
    if windows is None:
        windows = train.windows_per_step
        if windows % readers:
            windows = readers * -(-windows // readers)
            notes.append(
                f"An update has {windows} windows: the preset's {train.windows_per_step} do not "
                f"divide among data x shard = {readers} ranks. --windows sets it."
            )
    elif windows < 1 or windows % readers:
        raise PlanError(
            f"--windows must be a multiple of data x shard = {readers} (each rank reads as many), "
            f"got {windows}"
        )
    own = windows // readers
    size = next(n for n in range(min(train.micro_batch, own), 0, -1) if own % n == 0)
    return Batch(windows, size, own // size)


def _parameter_lines(config: RunConfig, mesh: Mesh) -> list[Line]:
    parts = parameter_parts(config.model, config.attention)
    lines = [
        Line("parameters", part.name, part.count, "", "exact", _split_of(part.split, mesh))
        for part in parts
    ]
    whole = total(parts)
    rank = tensor_part(parts, config.model, mesh) / mesh.shard
    without = total([part for part in parts if part.in_layers])
    return [
        *lines,
        Line("parameters", "all", whole, "", "exact", "the model's own count"),
        Line("parameters", "in layers", without, "", "exact", "without embedding, final norm"),
        Line(
            *("parameters", "on a rank", round(rank), "", "exact"),
            "tensor and shard divide them; padding of uneven parts left out",
        ),
    ]


def _split_of(split: str, mesh: Mesh) -> str:
    if mesh.tensor == 1:
        return "counted"
    return {
        "whole": "counted; whole on every tensor rank",
        "heads": f"counted; 1/{mesh.tensor} on a tensor rank",
        "kv": "counted; divided while there are as many key heads as tensor ranks",
    }[split]


def _flop_lines(
    config: RunConfig,
    context: int,
    batch: Batch,
    mesh: Mesh,
    curves: Sequence[DensityCurve],
) -> list[Line]:
    model, section = config.model, "operations of a token"
    matrices, routers = flops.matrix_flops(model), flops.router_flops(model, config.attention)
    dense = flops.attention_flops(model, flops.causal_pairs(context))
    rho, basis, how = _density(config, context, curves[0] if curves else None)
    train = flops.training_flops(
        model, config.attention, context, recompute=config.train.checkpoint_activations
    )
    again = ", layers computed twice" if config.train.checkpoint_activations else ""
    tokens = batch.windows * context
    return [
        Line(section, "matrices, forward", matrices, "FLOP", "exact", "2 a weight that is used"),
        Line(section, "routers, forward", routers, "FLOP", "exact", "both, all layers"),
        Line(section, "attention, all causal pairs", dense, "FLOP", "exact", "mean over a context"),
        Line(section, "support density", 100 * rho, "%", basis, how),
        Line(
            section, "attention, sparse support", rho * dense, "FLOP", basis, "density x the above"
        ),
        Line(
            *(section, "forward, all pairs", matrices + routers + dense, "FLOP", "exact"),
            "soft and top1 routing",
        ),
        Line(
            *(section, "forward, sparse support", matrices + routers + rho * dense, "FLOP", basis),
            "sparse routing (inference)",
        ),
        *_next_token_lines(config, section, context, curves),
        Line(
            *(section, "training", train, "FLOP", "modelled"),
            f"soft routing sees all pairs; backward 2x, attention 2.5x{again}",
        ),
        Line(
            *(section, "an update, a rank", train * tokens / mesh.gpus, "FLOP", "modelled"),
            f"{tokens:,} tokens over {mesh.gpus} rank{'s' * (mesh.gpus > 1)}",
        ),
    ]


def _next_token_lines(
    config: RunConfig, section: str, context: int, curves: Sequence[DensityCurve]
) -> list[Line]:
    """Attention of the token that follows the context, as decoding computes it."""
    model = config.model
    every = flops.attention_flops(model, context)
    lines = [
        Line(section, "next token's attention, all keys", every, "FLOP", "exact", "decoding"),
    ]
    if is_routed(config.attention) and curves:
        keys = curves[0].last_keys(config.attention.mosar_config(model.max_length), context)
        name, how = "next token's attention, sparse", f"{keys:,.0f} keys; {curves[0].source}"
        reads = flops.attention_flops(model, keys)
        lines.append(Line(section, name, reads, "FLOP", "modelled", how))
    return lines


def _memory_lines(config: RunConfig, mesh: Mesh, context: int, batch: Batch) -> list[Line]:
    section = PEAK[0]
    parts = parameter_parts(config.model, config.attention)
    held = tensor_part(parts, config.model, mesh)
    own = held / mesh.shard
    tokens = batch.pass_windows * context
    kept = (
        "inputs of layers, and one layer whole"
        if config.train.checkpoint_activations
        else ("tensors that all layers save")
    )
    rows: list[tuple[str, float, Basis, str]] = [
        ("parameters", 4 * own, "exact", "float32"),
        ("gradients", 4 * own, "exact", "float32"),
        ("optimizer", 8 * own, "exact", "AdamW: two numbers a parameter, float32"),
        (
            *("activations", memory.activation_bytes(config, mesh, tokens), "modelled"),
            f"{kept}, {tokens:,} tokens a pass",
        ),
        (
            *("loss", memory.loss_bytes(config, tokens), "modelled"),
            "gradients of head and hidden states",
        ),
        (
            *("logits", memory.logits_bytes(config, tokens), "modelled"),
            "a chunk of train.loss_chunk tokens",
        ),
    ]
    matrices = sum(part.count for part in parts if "norm" not in part.name) / total(parts) * held
    narrow = memory.narrow_weight_bytes(config, matrices)
    if narrow:
        rows.append(("bfloat16 copies", narrow, "modelled", "autocast keeps them for a pass"))
    if mesh.shard > 1:
        layers = tensor_part([p for p in parts if p.in_layers], config.model, mesh)
        rows.append(
            (
                *("gathered layers", 2 * 4 * layers / config.model.num_layers, "modelled"),
                "two layers' parameters, gathered",
            )
        )
    lines = [Line(section, name, value, "B", basis, how) for name, value, basis, how in rows]
    whole = sum(line.value for line in lines)
    return [*lines, Line(*PEAK, whole, "B", "modelled", "allocator and network buffers left out")]


def _cache_lines(
    config: RunConfig, mesh: Mesh, context: int, curves: Sequence[DensityCurve]
) -> list[Line]:
    section = "KV cache of a sequence, a rank"
    dense = memory.cache_bytes(config, mesh, context, by_regime=False)
    lines = [Line(section, "every key", dense, "B", "exact", f"{context:,} keys a layer")]
    if is_routed(config.attention) and curves:
        mosar = config.attention.mosar_config(config.model.max_length)
        keys = curves[0].kept_keys(mosar, context)
        kept = memory.cache_bytes(config, mesh, keys, by_regime=True)
        how = f"{keys:,.0f} keys a layer that a later token can read; {curves[0].source}"
        lines.append(Line(section, "sparse routing, evicting", kept, "B", "modelled", how))
    return lines


def _communication_lines(config: RunConfig, mesh: Mesh, context: int, batch: Batch) -> list[Line]:
    section = "sent by a rank in an update"
    parts = parameter_parts(config.model, config.attention)
    held = tensor_part(parts, config.model, mesh)
    tokens = batch.pass_windows * batch.passes * context
    sent = [
        ("data", communication.data_bytes(mesh, held, batch.passes), "all-reduce of gradients"),
        (
            *("shard", communication.shard_bytes(mesh, held, batch.passes)),
            f"parameters twice and gradients once, {batch.passes} pass{'es' * (batch.passes > 1)}",
        ),
        ("tensor", communication.tensor_bytes(config, mesh, tokens), "activations of every layer"),
    ]
    lines = [Line(section, name, value, "B", "modelled", how) for name, value, how in sent]
    whole = sum(line.value for line in lines)
    return [*lines, Line(section, "sum", whole, "B", "modelled", "ring algorithms")]


def _density(
    config: RunConfig, context: int, curve: DensityCurve | None
) -> tuple[float, Basis, str]:
    """The share of causal pairs that sparse routing evaluates."""
    attention, model = config.attention, config.model
    mosar = attention.mosar_config(model.max_length)
    geometry = GEOMETRIES[attention.geometry]
    if is_routed(attention):
        if curve is None:
            return 1.0, "modelled", "no density curve given"
        return curve.density(mosar, context)
    if issubclass(geometry, (Fixed, RopeMask)) and attention.regime is not None:
        index = mosar.regime_index(attention.regime)
        everywhere = issubclass(geometry, Fixed) and index == mosar.global_index
        if not everywhere:
            reach = mosar.regimes[index].reach
            return covered(reach, context), "exact", f"a band of {reach:g} tokens"
    return 1.0, "exact", "this geometry evaluates every causal pair"


def _cost(config: RunConfig, mesh: Mesh, context: int, curve: DensityCurve | None) -> Cost:
    model = config.model
    rho, basis, _ = _density(config, context, curve)
    dense = flops.attention_flops(model, flops.causal_pairs(context))
    rest = flops.matrix_flops(model) + flops.router_flops(model, config.attention)
    routed = is_routed(config.attention) and curve is not None
    mosar = config.attention.mosar_config(model.max_length)
    dense_cache = memory.cache_bytes(config, mesh, context, by_regime=False)
    cache = dense_cache
    if routed:
        assert curve is not None
        keys = curve.kept_keys(mosar, context)
        cache = memory.cache_bytes(config, mesh, keys, by_regime=True)
    return Cost(
        curve=curve.name if routed and curve is not None else config.variant,
        context=context,
        dense=dense,
        sparse=rho * dense,
        density=rho,
        basis=basis,
        share=rho * dense / (rest + rho * dense),
        cache=cache,
        dense_cache=dense_cache,
    )
