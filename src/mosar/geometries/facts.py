"""What `mosar variants` shows of each variant, from the facts that its geometry states."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mosar.geometries import UNROUTED, VARIANTS, Geometry, HeadShape

LENGTHS = (1, 4)
"""Times the training length."""


@dataclass(frozen=True)
class VariantFacts:
    """One variant in a model of given sizes."""

    variant: str
    geometry: str
    family: str
    """What its attention depends on."""
    learns: str
    """What its own parameters are."""
    adaptive: bool
    """Whether contents decide which pairs are read or how they are weighed, besides q·k."""
    decays: str
    """How attention falls with distance: no, fixed or learned."""
    parameters: int
    """The number of its own parameters in all layers."""
    density: tuple[float | None, ...]
    """The share of causal pairs that is read, at `LENGTHS`; None: it follows from the contents."""
    products: float | None
    """q·k of a head for the last query of the training length; None: it follows from contents."""
    cache: int
    """Numbers that a layer keeps per token, before any eviction."""
    native: bool
    """Whether compiled kernels attend."""
    modes: tuple[str, ...]
    """Modes in which a trained model can be executed."""
    source: str
    checked: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def variant_facts(name: str, shape: HeadShape, num_layers: int) -> VariantFacts:
    """The facts of a variant in a model of these sizes."""
    attention = VARIANTS[name]
    layers = [attention.build(shape._replace(layer=index)) for index in range(num_layers)]
    first, length = layers[0], shape.max_length
    parts = [part for layer in layers for part in layer.parameter_parts()]
    products = [layer.products(length - 1) for layer in layers]
    known = [count for count in products if count is not None]
    return VariantFacts(
        variant=name,
        geometry=attention.geometry,
        family=first.family,
        learns=first.learns,
        adaptive=first.adaptive,
        decays=first.decay,
        parameters=sum(part.count for part in parts),
        density=tuple(_density(layers, times * length) for times in LENGTHS),
        products=sum(known) / num_layers if len(known) == num_layers else None,
        cache=2 * shape.num_kv_heads * shape.head_dim + first.kept_notes,
        native=first.native,
        modes=first.modes,
        source=first.source,
        checked=first.checked,
    )


def _density(layers: list[Geometry], length: int) -> float | None:
    """Mean over the layers; None where the contents decide."""
    if layers[0].products(0) is None:
        return None
    counts = [layer.count_pairs((1, length), routing=UNROUTED) for layer in layers]
    return sum(1.0 if c is None else c[0] / c[1] for c in counts) / len(counts)
