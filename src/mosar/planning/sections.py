"""The lines of a plan, section by section."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mosar.core.config import MoSARConfig
from mosar.model.parameters import Part, parameter_parts, total
from mosar.planning import communication, flops, memory
from mosar.planning.density import DensityCurve
from mosar.planning.lines import Basis, Line, Unit
from mosar.planning.parameters import tensor_part
from mosar.training.config import RunConfig
from mosar.training.distributed.mesh import Mesh

PEAK = ("memory of a rank, training", "sum")
Row = tuple[str, float, Unit, Basis, str]
"""A line without its section."""


@dataclass(frozen=True)
class Batch:
    """One rank's part of an update."""

    windows: int
    """Windows of all ranks."""
    pass_windows: int
    passes: int


@dataclass(frozen=True)
class Case:
    """The subject of a plan's lines."""

    config: RunConfig
    mesh: Mesh
    context: int
    batch: Batch
    curve: DensityCurve | None
    """What the routers choose; None without routers, or if it is not known."""

    @property
    def rank_tokens(self) -> int:
        """Tokens that one rank reads in an update."""
        return self.batch.pass_windows * self.batch.passes * self.context

    @property
    def mosar(self) -> MoSARConfig:
        return self.config.regimes

    @cached_property
    def parts(self) -> list[Part]:
        return parameter_parts(self.config.model, self.config.attention)

    @property
    def rank_parameters(self) -> float:
        return tensor_part(self.parts, self.config.model, self.mesh) / self.mesh.shard

    @property
    def dense_flops(self) -> float:
        """Attention over all causal pairs, per token, forward."""
        return flops.attention_flops(self.config.model, flops.causal_pairs(self.context))

    @property
    def other_flops(self) -> float:
        """Everything but attention, per token, forward."""
        return flops.matrix_flops(self.config) + flops.router_flops(self.config)

    @cached_property
    def density(self) -> tuple[float, Basis, str]:
        """The share of causal pairs that sparse routing evaluates, and how it is known."""
        if self.curve is not None:
            return self.curve.density(self.mosar, self.context)
        geometry = self.config.attention.build(self.config.model.head_shape)
        if geometry.routed:
            return 1.0, "modelled", "no density curve given"
        shape, size = self.config.model.head_shape, (1, self.context)
        layers = [shape._replace(layer=index) for index in range(self.config.model.num_layers)]
        counts = [
            self.config.attention.build(layer).count_pairs(size, routing="sparse")
            for layer in layers
        ]
        if not any(counts):
            return 1.0, "exact", "this geometry evaluates every causal pair"
        shares = [1.0 if counted is None else counted[0] / counted[1] for counted in counts]
        band = geometry.band("sparse")
        how = "counted" if band is None else f"a band of {band:g} tokens"
        return sum(shares) / len(shares), "exact", how

    @property
    def dense_cache(self) -> float:
        return memory.cache_bytes(self.config, self.mesh, self.context, by_regime=False)

    @property
    def kept_keys(self) -> float | None:
        """Keys of a layer that a cache with eviction holds; None without a curve."""
        return None if self.curve is None else self.curve.kept_keys(self.mosar, self.context)

    @property
    def cache(self) -> float:
        """Bytes of the KV cache, by regime where there is a curve."""
        if self.kept_keys is None:
            return self.dense_cache
        return memory.cache_bytes(self.config, self.mesh, self.kept_keys, by_regime=True)


def every_line(case: Case) -> list[Line]:
    sections = {
        "parameters": _parameters,
        "operations of a token": _operations,
        PEAK[0]: _memory,
        "KV cache of a sequence, per rank": _cache,
        "sent by a rank in an update": _communication,
    }
    return [Line(section, *row) for section, rows in sections.items() for row in rows(case)]


def _with_sum(rows: list[Row], how: str) -> list[Row]:
    return [*rows, (PEAK[1], sum(row[1] for row in rows), "B", "modelled", how)]


def _parameters(case: Case) -> list[Row]:
    layers = total(part for part in case.parts if part.place != "root")
    padding = "tensor and shard divide them; padding of uneven parts left out"
    return [
        *((part.name, part.count, "", "exact", _held(part, case.mesh)) for part in case.parts),
        ("all", total(case.parts), "", "exact", "the model's own count"),
        ("in layers", layers, "", "exact", "without embedding, final norm"),
        ("on a rank", round(case.rank_parameters), "", "exact", padding),
    ]


def _held(part: Part, mesh: Mesh) -> str:
    if mesh.tensor == 1:
        return "counted"
    return {
        "whole": "counted; whole on every tensor rank",
        "heads": f"counted; 1/{mesh.tensor} on a tensor rank",
        "keys": "counted; divided while there are as many key heads as tensor ranks",
    }[part.split]


def _operations(case: Case) -> list[Row]:
    config, mesh = case.config, case.mesh
    matrices, routers = flops.matrix_flops(config), flops.router_flops(config)
    dense, other = case.dense_flops, case.other_flops
    rho, basis, how = case.density
    again = ", layers computed twice" if config.train.checkpoint_activations else ""
    ranks, tokens = mesh.num_processes, case.batch.windows * case.context
    own = flops.training_flops(config, case.context, mesh) * case.rank_tokens
    whole = "; each tensor rank computes all logits" if mesh.tensor > 1 else ""
    every = flops.attention_flops(config.model, case.context)
    rows: list[Row] = [
        ("matrices, forward", matrices, "FLOP", "exact", "2 per weight that is used"),
        ("routers, forward", routers, "FLOP", "exact", "both, all layers"),
        ("attention, all causal pairs", dense, "FLOP", "exact", "mean over a context"),
        ("support density", 100 * rho, "%", basis, how),
        ("attention, sparse support", rho * dense, "FLOP", basis, "density x the above"),
        ("forward, all pairs", other + dense, "FLOP", "exact", "soft and top1 routing"),
        (
            "forward, sparse support",
            other + rho * dense,
            "FLOP",
            basis,
            "sparse routing (inference)",
        ),
        ("next token's attention, all keys", every, "FLOP", "exact", "decoding"),
    ]
    if case.curve is not None:
        keys = case.curve.last_keys(case.mosar, case.context)
        reads = flops.attention_flops(config.model, keys)
        how = f"{keys:,.0f} keys; {case.curve.source}"
        rows.append(("next token's attention, sparse", reads, "FLOP", "modelled", how))
    training = flops.training_flops(config, case.context)
    how = f"soft routing sees all pairs; backward 2x, attention 2.5x{again}"
    rows.append(("training", training, "FLOP", "modelled", how))
    how = f"{tokens:,} tokens over {ranks} rank{'s' * (ranks > 1)}{whole}"
    return [*rows, ("an update, per rank", own, "FLOP", "modelled", how)]


def _memory(case: Case) -> list[Row]:
    config, mesh, own = case.config, case.mesh, case.rank_parameters
    tokens = case.batch.pass_windows * case.context
    kept = "tensors that all layers save"
    if config.train.checkpoint_activations:
        kept = "inputs of layers, and one layer whole"
    activations = memory.activation_bytes(config, mesh, tokens)
    loss, logits = memory.loss_bytes(config, tokens), memory.logits_bytes(config, tokens)
    rows: list[Row] = [
        ("parameters", 4 * own, "B", "exact", "float32"),
        ("gradients", 4 * own, "B", "exact", "float32"),
        ("optimizer", 8 * own, "B", "exact", "AdamW: two numbers per parameter, float32"),
        ("activations", activations, "B", "modelled", f"{kept}, {tokens:,} tokens per pass"),
        ("loss", loss, "B", "modelled", "gradients of head and hidden states"),
        ("logits", logits, "B", "modelled", "a chunk of train.loss_chunk tokens"),
    ]
    if narrow := memory.narrow_weight_bytes(config, mesh):
        rows.append(("bfloat16 copies", narrow, "B", "modelled", "autocast keeps them for a pass"))
    if mesh.shard > 1:
        how = "embedding, two layers, one layer's gradients"
        rows.append(("gathered by FSDP", memory.gathered_bytes(config, mesh), "B", "modelled", how))
    return _with_sum(rows, "allocator and network buffers left out")


def _cache(case: Case) -> list[Row]:
    rows: list[Row] = [
        ("every key", case.dense_cache, "B", "exact", f"{case.context:,} keys per layer")
    ]
    if case.curve is not None:
        how = f"{case.kept_keys:,.0f} keys per layer that can be read later; {case.curve.source}"
        rows.append(("sparse routing, evicting", case.cache, "B", "modelled", how))
    return rows


def _communication(case: Case) -> list[Row]:
    config, mesh, passes = case.config, case.mesh, case.batch.passes
    data = communication.data_bytes(config, mesh, passes)
    shard = communication.shard_bytes(config, mesh, passes)
    tensor = communication.tensor_bytes(config, mesh, case.rank_tokens)
    gathers = "layers gathered twice, the rest once, gradients scattered, "
    gathers += f"{passes} pass{'es' * (passes > 1)}"
    rows: list[Row] = [
        ("data", data, "B", "modelled", "all-reduce of gradients"),
        ("shard", shard, "B", "modelled", gathers),
        ("tensor", tensor, "B", "modelled", "activations of every layer"),
    ]
    return _with_sum(rows, "ring algorithms")
