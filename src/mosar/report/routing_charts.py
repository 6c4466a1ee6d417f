"""Charts of the mechanism and of what routers chose: gates, regime shares, discarded mass."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import torch

from mosar.core.config import MoSARConfig
from mosar.core.regimes import RegimeKernel, pair_geometry
from mosar.report.charts import DASHED, Bars, Chart, Point, Series, points
from mosar.report.comparison import Comparison, Estimate
from mosar.report.formats import share, times
from mosar.report.palette import pair_looks, regime_looks, sequence_looks


def regime_pairs(config: MoSARConfig) -> dict[tuple[int, int], str]:
    """Distinct pairs (m <= n) with their names: SS, SM, MM, SG, MG, GG for three regimes."""
    names = [regime.name for regime in config.regimes]
    joint = {(m, n): (names[m], names[n]) for n in range(len(names)) for m in range(n + 1)}
    return {
        pair: ("" if max(map(len, both)) == 1 else "–").join(both) for pair, both in joint.items()
    }


def decay_chart(config: MoSARConfig, max_distance: int | None = None) -> Chart:
    """The gate of every distinct regime pair over distance; pairs are unordered: g_mn = g_nm.

    By default the axis ends an eighth beyond the longest reach.
    """
    geometry = pair_geometry(config)
    if max_distance is None:
        max_distance = math.ceil(float(geometry.reach.max()) * 1.125)
    if max_distance < 1:
        raise ValueError(f"max_distance must be >= 1, got {max_distance}")
    # Evenly, and closely where a gate falls.
    falls = [
        torch.linspace(float(reach - width), float(reach), 25, dtype=torch.float64)
        for reach, width in zip(
            geometry.reach.flatten(), geometry.transition.flatten(), strict=True
        )
    ]
    evenly = torch.linspace(0, max_distance, 97, dtype=torch.float64)
    places = torch.cat([evenly, *falls]).round()
    distances = places[(places >= 0) & (places <= max_distance)].unique()
    gates = RegimeKernel(config)(distances, torch.float64)
    pairs = regime_pairs(config)
    looks = pair_looks(pairs.values())
    series = []
    for (m, n), name in pairs.items():
        reach = f"{float(geometry.reach[m, n]):g}"
        last = ", no decay" if name == [*pairs.values()][-1] else ""
        series.append(
            Series(
                key=f"gate-{name}",
                look=replace(looks[name], label=f"{name} {reach}{last}"),
                points=tuple(
                    Point(d, g, share(g))
                    for d, g in zip(distances.tolist(), gates[:, m, n].tolist(), strict=True)
                ),
            )
        )
    reaches = sorted({0.0, *geometry.reach.flatten().tolist()})
    floor = config.floor * math.exp(-config.barrier)
    times = "" if config.floor == 1 else f"{config.floor:g} · "
    return Chart(
        name="decay_kernels",
        title="Gates of the regime pairs",
        caption=f"What attention is multiplied by at a distance, for each pair of regimes and its "
        f"reach: 1 on a plateau, then down to the floor {times}exp(−{config.barrier:g}).",
        x_label="distance i − j, ticks at the reaches",
        y_label="gate",
        y_domain=(-0.03, 1.04),
        line_at=floor,
        x_ticks=tuple((reach, f"{reach:g}") for reach in reaches if reach <= max_distance),
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
    return Bars(
        name=f"regime_shares_{variant}_{factor:g}x",
        title=f"{c.looks[variant].label}: regimes by layer",
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
    depths = {f: min(len(r.discarded_mass) for r in found) for f, found in with_mass.items()}
    series = [
        Series(
            key=f"length-{factor:g}",
            look=looks[times(factor)],
            note=note,
            dash=dash,
            points=points(
                range(1, depths[factor] + 1),
                lambda layer, records=records, statistic=statistic: Estimate(
                    {r.cell.seed: r.discarded_mass[int(layer) - 1][statistic] for r in records}
                ),
                share,
            ),
        )
        for factor, records in with_mass.items()
        for statistic, note, dash in (("mean", "mean", ""), ("p95", "95th percentile", DASHED))
    ]
    return Chart(
        name=f"discarded_mass_{variant}",
        title=f"{c.looks[variant].label}: discarded mass by layer",
        caption="The attention that top-1 routing puts outside of the support, which sparse "
        "execution leaves out: mean over rows (solid) and 95th percentile (dashed). The error of a "
        "row of attention, in L1, is exactly twice this.",
        x_label="layer",
        y_label="discarded mass",
        y_zero=True,
        x_ticks=tuple((i, str(i)) for i in range(1, max(depths.values(), default=0) + 1)),
        series=tuple(series),
    )
