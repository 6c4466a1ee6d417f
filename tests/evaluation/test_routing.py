"""Shares, reach and density of a pass, against counts by hand."""

import pytest
import torch

from mosar.core.config import MoSARConfig, Regime
from mosar.core.hard_domain import build_hard_domain
from mosar.evaluation.routing import PairTally, RoutingTally, regime_letters
from mosar.geometries import VARIANTS, HeadShape

CONFIGS = [(), ("attention.routing_groups=2",), ("attention.num_sinks=2",)]


def passes(loaded, windows=5, length=96, segments=None):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(257, (windows, length), generator=generator)
    return loaded.decoder(tokens, segment_ids=segments).routings


@pytest.mark.parametrize("changes", CONFIGS)
@pytest.mark.parametrize("isolated", [False, True])
def test_a_pass_in_parts_is_counted_by_hand(scattered, changes, isolated):
    made = scattered("mosar", *changes)
    segments = None
    if isolated:
        segments = torch.arange(96).expand(5, 96) // torch.tensor([[96], [7], [40], [50], [95]])
    routings = passes(made, segments=segments)
    tally = RoutingTally(made.geometry.config, 2, 96)
    for chosen in ([0], [1, 2], [3, 4]):
        tally.add([_take(routing, chosen) for routing in routings])
    assert all(min(row) > 0 for side in tally.shares(top1=True).values() for row in side)
    cost = torch.tensor([4 / 96, 16 / 96, 1.0], dtype=torch.float64)
    reaches: dict[bool, list] = {False: [], True: []}
    for layer, routing in enumerate(routings):
        for role, router in (("query", routing.query), ("key", routing.key)):
            soft = router.probabilities.double().flatten(0, -2).mean(dim=0)
            hard = torch.nn.functional.one_hot(router.labels, 3).double().flatten(0, -2).mean(dim=0)
            for top1, mean in ((False, soft), (True, hard)):
                shares = torch.tensor(tally.shares(top1=top1)[role][layer], dtype=torch.float64)
                torch.testing.assert_close(shares, mean, rtol=1e-6, atol=1e-9)
                reaches[top1].append(float(mean @ cost))
        causal = torch.ones(96, 96, dtype=torch.bool).tril().expand(5, 96, 96)
        if segments is not None:
            causal = causal & (segments[:, :, None] == segments[:, None, :])
        mask = build_hard_domain(*routing.labels, made.geometry.config, segment_ids=segments).mask
        assert mask is not None
        groups = made.geometry.config.routing_groups
        counted = made.geometry.count_pairs((5, 96), labels=routing.labels, segment_ids=segments)
        assert counted == (int(mask.sum()), groups * int(causal.sum()))
    for top1, values in reaches.items():
        assert tally.reach(top1=top1) == pytest.approx(sum(values) / len(values), rel=1e-6)


def _take(routing, rows):
    from dataclasses import replace

    both = (routing.query, routing.key)
    return type(routing)(
        *(replace(r, logits=r.logits[rows], probabilities=r.probabilities[rows]) for r in both)
    )


def test_example_labels_are_the_first_windows(scattered, monkeypatch):
    """Of as many tokens as the training length has, up to a limit."""
    made = scattered("mosar", "attention.routing_groups=2")
    kept = made.train_length
    routings = passes(made, length=2 * kept)
    tally = RoutingTally(made.geometry.config, 2, 2 * kept)
    tally.add(routings)
    tally.add([_take(routing, [4]) for routing in routings])
    for role in ("query", "key"):
        rows = tally.example_labels[role]
        assert [len(row) for row in rows] == [kept, kept]
        labels = [getattr(routing, role).labels[0, 0, :kept] for routing in routings]
        assert rows == ["".join("SMG"[m] for m in layer) for layer in labels]
    monkeypatch.setattr("mosar.evaluation.routing.EXAMPLE_TOKENS", 5)
    tally = RoutingTally(made.geometry.config, 2, 2 * kept)
    tally.add(routings)
    assert [len(row) for row in tally.example_labels["key"]] == [5, 5]


@pytest.mark.parametrize(
    ("names", "letters"),
    [
        (("S", "M", "G"), "SMG"),
        (("near", "next", "global"), "neg"),
        (("a", "ab", "abc"), "abc"),
        (("1", "11", "111"), "1AB"),
    ],
)
def test_letters_are_unique(names, letters):
    assert "".join(regime_letters(names)) == letters
    config = MoSARConfig(
        regimes=tuple(Regime(name, index + 1, 1.0) for index, name in enumerate(names))
    )
    assert len(config.regimes) == len(letters)


@pytest.mark.parametrize("layers", [4, 6])
def test_a_density_counts_layers_that_read_everything(layers):
    """gemma3 has a window of N/4 in all layers but one."""
    length, window = 64, 16
    shapes = [HeadShape(4, 2, 8, length, layer, num_layers=layers) for layer in range(layers)]
    geometries = [VARIANTS["gemma3"].build(shape) for shape in shapes]
    tally = PairTally()
    assert tally.layer_density == [] and tally.density == 1
    for rows in (1, 3):
        tally.add(geometries, (rows, length), "native", [])
    read = sum(min(query + 1, window + 1) for query in range(length)) / (length * (length + 1) / 2)
    assert tally.layer_density == pytest.approx([read] * (layers - 1) + [1.0])
    assert tally.density == pytest.approx((read * (layers - 1) + 1) / layers)
