"""Discarded mass: half of what going sparse changes, row by row, and its statistics."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mosar.core.bias import routed_bias
from mosar.core.config import MoSARConfig
from mosar.core.layout import resolve_layout
from mosar.core.outputs import RouterOutput
from mosar.core.reference_attention import attend_routed
from mosar.evaluation.discarded_mass import MassTally, discarded_mass, watching
from mosar.geometries import VARIANTS, HeadShape, LayerRouting, MoSAR

LEMMA = dict(
    length=st.integers(1, 70),
    kv_heads=st.sampled_from([1, 2]),
    ratio=st.sampled_from([1, 3]),
    groups=st.booleans(),
    sinks=st.integers(0, 2),
    barrier=st.sampled_from([1.0, 6.0]),
    composition=st.sampled_from(["mean", "min", "max"]),
    softcap=st.sampled_from([None, 5.0]),
    packed=st.booleans(),
    seed=st.integers(0, 99),
)


@given(**LEMMA)
def test_going_sparse_costs_twice_the_discarded_mass(
    length, kv_heads, ratio, groups, sinks, barrier, composition, softcap, packed, seed
):
    """The lemma: |p_sparse - p_top1| = 2 mass for each row, with the probabilities themselves."""
    generator = torch.Generator().manual_seed(seed)
    heads, routing_groups = kv_heads * ratio, kv_heads if groups else 1
    config = MoSARConfig.scaled(
        32,
        barrier=barrier,
        composition=composition,
        num_sinks=sinks,
        routing_groups=routing_groups,
        epsilon=1e-9,
    )
    attention = VARIANTS["mosar"]
    geometry = MoSAR(attention, HeadShape(heads, kv_heads, 8, 32))
    geometry.config = config
    q = 2 * torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, length, 8, generator=generator, dtype=torch.float64)
    shape = (2, length, 3) if routing_groups == 1 else (2, routing_groups, length, 3)
    logits = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    routed = LayerRouting(*(RouterOutput(z, z.softmax(dim=-1)) for z in logits))
    segments = None
    if packed:
        segments = (torch.arange(length) // max(length // 2, 1)).expand(2, length)
    options = {"scale": 0.5, "softcap": softcap, "segment_ids": segments}
    mass = discarded_mass(geometry, q, k, v, routed, options)
    layout = resolve_layout(2, length, length, segment_ids=segments)
    one_hot = [torch.nn.functional.one_hot(r.labels, 3).double() for r in routed]
    top1, sparse = (
        attend_routed(
            *(q, k, v, layout, routed_bias(*one_hot, config, routing)), scale=0.5, softcap=softcap
        ).attention
        for routing in ("top1", "sparse")
    )
    error = (sparse - top1).abs().sum(dim=-1)
    torch.testing.assert_close(error, 2 * mass, rtol=1e-9, atol=1e-12)
    assert (mass >= 0).all() and (mass < 1).all()


def test_in_float32_the_kernels_give_the_same_mass(scattered):
    """What evaluation runs against the definition: float32 kernels, float64 probabilities."""
    made = scattered()
    seen = []
    geometry = made.decoder.geometries[1]
    attend = geometry.attend

    def spy(q, k, v, **options):
        out, routed = attend(q, k, v, **options)
        seen.append((q, k, v, routed, options))
        return out, routed

    geometry.attend = spy
    tokens = torch.randint(257, (2, 200), generator=torch.Generator().manual_seed(1))
    made.decoder(tokens, routing="top1")
    ((q, k, v, routed, options),) = seen
    options.pop("routing")
    ours = discarded_mass(geometry, q, k, v, routed, options)
    wide = [tensor.double() for tensor in (q, k, v)]
    exact = discarded_mass(geometry, *wide, routed, options)
    assert exact.mean() > 1e-4
    torch.testing.assert_close(ours, exact, rtol=1e-3, atol=2e-6)


def test_watching_changes_nothing_and_ends(scattered):
    made = scattered()
    tokens = torch.randint(257, (2, 90), generator=torch.Generator().manual_seed(2))
    before = made.decoder(tokens, routing="top1").hidden
    tallies = [MassTally(), MassTally()]
    with pytest.raises(KeyError), watching(made.decoder.geometries, tallies):
        during = made.decoder(tokens, routing="top1").hidden
        raise KeyError
    assert torch.equal(before, during)
    assert all("attend" not in vars(geometry) for geometry in made.decoder.geometries)
    summaries = [tally.summary() for tally in tallies]
    made.decoder(tokens, routing="top1")
    assert [tally.summary() for tally in tallies] == summaries
    assert all(0 < s["mean"] < s["p95"] <= s["worst"] < 1 for s in summaries)


@given(
    rows=st.integers(1, 3000),
    scale=st.sampled_from([1e-7, 1e-4, 1e-2, 1.0]),
    parts=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_statistics_of_rows(rows, scale, parts, seed):
    generator = torch.Generator().manual_seed(seed)
    mass = scale * torch.rand(rows, generator=generator, dtype=torch.float64) ** 3
    tally = MassTally()
    for part in mass.chunk(parts):
        tally.add(part)
    found = tally.summary()
    assert found["mean"] == pytest.approx(float(mass.mean()), rel=1e-9)
    assert found["worst"] == float(mass.max())
    # The smallest mass that at most 5 % of the rows exceed.
    exact = float(mass.sort(descending=True).values[int(rows * (1 - 0.95))])
    # Bins are 0.1 % wide, and below 1e-9 there is only one.
    assert exact * (1 - 1e-9) <= found["p95"] <= max(exact * 1.0011, 1.01e-9)


@pytest.mark.parametrize("mass", [0.0, 1.0])
def test_nothing_or_everything_discarded(mass):
    tally = MassTally()
    tally.add(torch.full((2, 3, 4), mass, dtype=torch.float64))
    assert tally.summary() == {"mean": mass, "p95": mass, "worst": mass}
