"""The lines of a plan, section by section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mosar.model.parameters import parameter_parts, total
from mosar.planning import communication, flops, memory
from mosar.planning.density import DensityCurve, covered
from mosar.planning.lines import Basis, Line
from mosar.planning.parameters import tensor_part
from mosar.training.config import RunConfig
from mosar.training.distributed.mesh import Mesh

PEAK = ("memory of a rank, training", "sum")


@dataclass(frozen=True)
class Batch:
    """What one rank sees of an update."""

    windows: int
    """Of all ranks."""
    pass_windows: int
    passes: int


@dataclass(frozen=True)
class Case:
    """What a plan is of; the first of `curves` is the one that lines use."""

    config: RunConfig
    mesh: Mesh
    context: int
    batch: Batch
    curves: Sequence[DensityCurve]

    @property
    def curve(self) -> DensityCurve | None:
        return self.curves[0] if self.curves else None

    @property
    def rank_tokens(self) -> int:
        """That one rank sees in an update."""
        return self.batch.pass_windows * self.batch.passes * self.context


def every_line(case: Case) -> list[Line]:
    sections = (_parameters, _operations, _memory, _cache, _communication)
    return [line for section in sections for line in section(case)]


def _parameters(case: Case) -> list[Line]:
    config, mesh = case.config, case.mesh
    parts = parameter_parts(config.model, config.attention)
    lines = [
        Line("parameters", part.name, part.count, "", "exact", _split_of(part.split, mesh))
        for part in parts
    ]
    rank = tensor_part(parts, config.model, mesh) / mesh.shard
    without = total(part for part in parts if part.place != "root")
    return [
        *lines,
        Line("parameters", "all", total(parts), "", "exact", "the model's own count"),
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
        "keys": "counted; divided while there are as many key heads as tensor ranks",
    }[split]


def _operations(case: Case) -> list[Line]:
    config, context, mesh = case.config, case.context, case.mesh
    section = "operations of a token"
    matrices, routers = flops.matrix_flops(config), flops.router_flops(config)
    dense = flops.attention_flops(config.model, flops.causal_pairs(context))
    rho, basis, how = density(config, context, case.curve)
    again = ", layers computed twice" if config.train.checkpoint_activations else ""
    tokens, ranks = case.batch.windows * context, mesh.num_processes
    own = flops.training_flops(config, context, mesh) * case.rank_tokens
    whole = "; each tensor rank computes all logits" if mesh.tensor > 1 else ""
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
        *_next_token(case, section),
        Line(
            *(section, "training", flops.training_flops(config, context), "FLOP", "modelled"),
            f"soft routing sees all pairs; backward 2x, attention 2.5x{again}",
        ),
        Line(
            *(section, "an update, a rank", own, "FLOP", "modelled"),
            f"{tokens:,} tokens over {ranks} rank{'s' * (ranks > 1)}{whole}",
        ),
    ]


def _next_token(case: Case, section: str) -> list[Line]:
    """Attention of the token that follows the context, as decoding computes it."""
    model, curve = case.config.model, case.curve
    every = flops.attention_flops(model, case.context)
    lines = [
        Line(section, "next token's attention, all keys", every, "FLOP", "exact", "decoding"),
    ]
    if case.config.attention.geometry_class.routed and curve is not None:
        mosar = case.config.attention.mosar_config(model.max_length)
        keys = curve.last_keys(mosar, case.context)
        name, how = "next token's attention, sparse", f"{keys:,.0f} keys; {curve.source}"
        reads = flops.attention_flops(model, keys)
        lines.append(Line(section, name, reads, "FLOP", "modelled", how))
    return lines


def _memory(case: Case) -> list[Line]:
    config, mesh = case.config, case.mesh
    own = (
        tensor_part(parameter_parts(config.model, config.attention), config.model, mesh)
        / mesh.shard
    )
    tokens = case.batch.pass_windows * case.context
    kept = (
        "inputs of layers, and one layer whole"
        if config.train.checkpoint_activations
        else "tensors that all layers save"
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
    if narrow := memory.narrow_weight_bytes(config, mesh):
        rows.append(("bfloat16 copies", narrow, "modelled", "autocast keeps them for a pass"))
    if mesh.shard > 1:
        rows.append(
            (
                *("gathered by FSDP", memory.gathered_bytes(config, mesh), "modelled"),
                "embedding, two layers, one layer's gradients",
            )
        )
    lines = [Line(PEAK[0], name, value, "B", basis, how) for name, value, basis, how in rows]
    whole = sum(line.value for line in lines)
    return [*lines, Line(*PEAK, whole, "B", "modelled", "allocator and network buffers left out")]


def _cache(case: Case) -> list[Line]:
    config, mesh, context = case.config, case.mesh, case.context
    section = "KV cache of a sequence, a rank"
    dense = memory.cache_bytes(config, mesh, context, by_regime=False)
    lines = [Line(section, "every key", dense, "B", "exact", f"{context:,} keys a layer")]
    if config.attention.geometry_class.routed and case.curve is not None:
        keys = case.curve.kept_keys(config.attention.mosar_config(config.model.max_length), context)
        kept = memory.cache_bytes(config, mesh, keys, by_regime=True)
        how = f"{keys:,.0f} keys a layer that a later token can read; {case.curve.source}"
        lines.append(Line(section, "sparse routing, evicting", kept, "B", "modelled", how))
    return lines


def _communication(case: Case) -> list[Line]:
    section = "sent by a rank in an update"
    config, mesh, passes = case.config, case.mesh, case.batch.passes
    sent = [
        ("data", communication.data_bytes(config, mesh, passes), "all-reduce of gradients"),
        (
            *("shard", communication.shard_bytes(config, mesh, passes)),
            "layers gathered twice, the rest once, gradients scattered, "
            f"{passes} pass{'es' * (passes > 1)}",
        ),
        (
            *("tensor", communication.tensor_bytes(config, mesh, case.rank_tokens)),
            "activations of every layer",
        ),
    ]
    lines = [Line(section, name, value, "B", "modelled", how) for name, value, how in sent]
    whole = sum(line.value for line in lines)
    return [*lines, Line(section, "sum", whole, "B", "modelled", "ring algorithms")]


def density(
    config: RunConfig, context: int, curve: DensityCurve | None
) -> tuple[float, Basis, str]:
    """The share of causal pairs that sparse routing evaluates."""
    geometry = config.attention.build(config.model.head_shape)
    if geometry.routed:
        if curve is None:
            return 1.0, "modelled", "no density curve given"
        return curve.density(config.attention.mosar_config(config.model.max_length), context)
    band = geometry.band("sparse")
    if band is None:
        return 1.0, "exact", "this geometry evaluates every causal pair"
    return covered(band, context), "exact", f"a band of {band:g} tokens"
