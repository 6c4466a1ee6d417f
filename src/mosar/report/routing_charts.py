"""Charts of the mechanism and of what routers chose: gates, regime shares, discarded mass."""

from __future__ import annotations

import statistics

import torch

from mosar.core.config import MoSARConfig
from mosar.core.regimes import RegimeKernel, pair_geometry
from mosar.report.charts import Bars, Chart, Point, Series
from mosar.report.comparison import Comparison, Estimate
from mosar.report.figures import pair_colours, pair_name, regime_pairs
from mosar.report.formats import share, times
from mosar.report.palette import Look, lightened, regime_looks, sequence_looks, variant_looks
from mosar.report.series import DASHED, point


def decay_chart(config: MoSARConfig) -> Chart:
    """The gate of every distinct regime pair over distance."""
    end = float(pair_geometry(config).reach.max()) * 1.125
    # Evenly, and at every corner of a gate.
    corners = torch.cat([table.flatten() for table in pair_geometry(config)[:2]])
    places = torch.cat([torch.linspace(0, end, 161), corners, corners + 1]).double().round()
    distances = places[places <= end].unique()
    gates = RegimeKernel(config)(distances, torch.float64)
    pairs = regime_pairs(config)
    series = []
    for (m, n), shade in zip(pairs, pair_colours(len(pairs)), strict=True):
        name, reach = pair_name(config, m, n), float(pair_geometry(config).reach[m, n])
        never = (m, n) == pairs[-1]
        look = Look(f"{name} {'∞' if never else f'{reach:g}'}", shade, lightened(shade))
        points = tuple(
            Point(d, g, share(g))
            for d, g in zip(distances.tolist(), gates[:, m, n].tolist(), strict=True)
        )
        series.append(Series(key=f"pair-{name}", label=look.label, look=look, points=points))
    return Chart(
        name="decay_kernels",
        title="Gates of the regime pairs",
        caption=f"What attention is multiplied by at a distance, for each pair of regimes and its "
        f"reach: 1 on a plateau, then down to the floor exp(−{config.barrier:g}).",
        x_label="distance i − j",
        y_label="gate",
        y_domain=(0.0, 1.04),
        series=tuple(series),
    )


def regime_shares(c: Comparison, variant: str, factor: float) -> Bars:
    """Mean probabilities of each regime by layer, for queries and keys."""
    records = c.records(variant, factor, c.own_routing(variant) or "soft")
    records = [record for record in records if record.shares_soft]
    names = records[0].regimes if records else []
    panels = []
    for side, title in (("query", "queries"), ("key", "keys")):
        layers = [record.shares_soft[side] for record in records if record.regimes == names]
        depth = min((len(layer) for layer in layers), default=0)
        bars = tuple(
            tuple(statistics.fmean(shares[i][r] for shares in layers) for r in range(len(names)))
            for i in range(depth)
        )
        panels.append((title, bars))
    label = variant_looks([variant])[variant].label
    return Bars(
        name=f"regime_shares_{variant}_{factor:g}x",
        title=f"{label}: regimes by layer",
        caption="Mean probability of each regime, layer by layer from the first.",
        panels=tuple(panels),
        looks=tuple(regime_looks(names).values()),
    )


def discarded_mass(c: Comparison, variant: str) -> Chart:
    """By layer, for each length: the mean and the 95th percentile."""
    with_mass = {
        factor: [record for record in c.records(variant, factor) if record.discarded_mass]
        for factor in c.factors
    }
    with_mass = {factor: found for factor, found in with_mass.items() if found}
    looks = sequence_looks(times(factor) for factor in with_mass)
    series = []
    for factor, records in with_mass.items():
        look = looks[times(factor)]
        depth = min(len(record.discarded_mass) for record in records)
        for statistic, note, dash in (("mean", "mean", ""), ("p95", "95th percentile", DASHED)):
            points = []
            for layer in range(depth):
                values = {r.cell.seed: r.discarded_mass[layer][statistic] for r in records}
                points.append(point(layer + 1, Estimate(values), share))
            series.append(
                Series(
                    key=f"length-{factor:g}",
                    label=look.label,
                    look=look,
                    points=tuple(points),
                    note=note,
                    dash=dash,
                )
            )
    label = variant_looks([variant])[variant].label
    depth = max((len(s.points) for s in series), default=0)
    return Chart(
        name=f"discarded_mass_{variant}",
        title=f"{label}: discarded mass by layer",
        caption="The attention that top-1 routing puts outside of the support, which sparse "
        "execution leaves out: mean over rows (solid) and 95th percentile (dashed). The error of a "
        "row of attention, in L1, is exactly twice this.",
        x_label="layer",
        y_label="discarded mass",
        y_zero=True,
        x_ticks=tuple((i, str(i)) for i in range(1, depth + 1)),
        series=tuple(series),
    )
