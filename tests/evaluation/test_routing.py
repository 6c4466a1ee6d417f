"""Shares, reach and density of a pass, against counts by hand."""

import pytest
import torch

from mosar.core.config import MoSARConfig, Regime
from mosar.core.hard_domain import build_hard_domain
from mosar.evaluation.routing import RoutingTally, count_window_pairs, regime_letters

CONFIGS = [(), ("attention.routing_groups=2",), ("attention.num_sinks=2",)]


def passes(subject, windows=5, length=96, segments=None):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(257, (windows, length), generator=generator)
    return subject.decoder(tokens, segment_ids=segments).routings


@pytest.mark.parametrize("changes", CONFIGS)
@pytest.mark.parametrize("isolated", [False, True])
def test_a_pass_in_parts_is_counted_by_hand(scattered, changes, isolated):
    made = scattered("mosar", *changes)
    segments = None
    if isolated:
        segments = torch.arange(96).expand(5, 96) // torch.tensor([[96], [7], [40], [50], [95]])
    routings = passes(made, segments=segments)
    tally = RoutingTally(made.geometry, 2, 96)
    for chosen in ([0], [1, 2], [3, 4]):
        parts = None if segments is None else segments[chosen]
        tally.add([_take(routing, chosen) for routing in routings], parts)
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
        mask = build_hard_domain(
            routing.query.labels, routing.key.labels, made.geometry, segment_ids=segments
        ).mask
        assert mask is not None
        causal = torch.ones(96, 96, dtype=torch.bool).tril().expand(5, 96, 96)
        if segments is not None:
            causal = causal & (segments[:, :, None] == segments[:, None, :])
        groups = made.geometry.routing_groups
        assert tally.layer_density[layer] == int(mask.sum()) / (groups * int(causal.sum()))
    for top1, values in reaches.items():
        assert tally.reach(top1=top1) == pytest.approx(sum(values) / len(values), rel=1e-6)


def _take(routing, rows):
    from dataclasses import replace

    return type(routing)(
        *(replace(r, logits=r.logits[rows], probabilities=r.probabilities[rows]) for r in routing)
    )


def test_example_labels_are_the_first_windows(scattered, monkeypatch):
    """Of as many tokens as the training length has, up to a limit."""
    made = scattered("mosar", "attention.routing_groups=2")
    kept = made.geometry.max_length
    routings = passes(made, length=2 * kept)
    tally = RoutingTally(made.geometry, 2, 2 * kept)
    tally.add(routings, None)
    tally.add([_take(routing, [4]) for routing in routings], None)
    for role in ("query", "key"):
        rows = tally.example_labels[role]
        assert [len(row) for row in rows] == [kept, kept]
        labels = [getattr(routing, role).labels[0, 0, :kept] for routing in routings]
        assert rows == ["".join("SMG"[m] for m in layer) for layer in labels]
    monkeypatch.setattr("mosar.evaluation.routing.EXAMPLE_TOKENS", 5)
    tally = RoutingTally(made.geometry, 2, 2 * kept)
    tally.add(routings, None)
    assert [len(row) for row in tally.example_labels["key"]] == [5, 5]


@pytest.mark.parametrize("window", [0.5, 1, 9.99, 16, 63, 64, 1000])
@pytest.mark.parametrize("length", [1, 2, 64])
def test_window_pairs(window, length):
    inside, causal = count_window_pairs(MoSARConfig.scaled(64), window, length, None)
    distances = torch.arange(length)[:, None] - torch.arange(length)
    assert causal == int((distances >= 0).sum())
    assert inside == int(((distances >= 0) & (distances <= window)).sum())


def test_window_pairs_of_documents():
    segments = torch.tensor([[0] * 5 + [1] * 15, [3] * 20])
    inside, causal = count_window_pairs(MoSARConfig.scaled(64), 3, 20, segments)
    assert causal == 15 + 120 + 210
    assert inside == (1 + 2 + 3 + 4 + 4) + (6 + 12 * 4) + (6 + 17 * 4)


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
