"""The training objective is what sparse routing computes and reads, in expectation."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mosar import MoSARConfig, Regime, build_hard_domain, mosar_attention
from mosar.integrations.retrofit.objective import (
    Scoring,
    causal_pairs,
    distance_bands,
    expected_pairs,
    head_attention,
    kept_output,
    read_probability,
)

COMPOSITIONS = ("mean", "min", "max")


def geometry(reaches, composition, sinks):
    regimes = tuple(Regime(f"R{i}", reach, 1.0) for i, reach in enumerate(reaches))
    return MoSARConfig(
        max_length=100, regimes=regimes, composition=composition, num_sinks=sinks, routing_groups=2
    )


@given(
    reaches=st.lists(st.floats(1, 60), min_size=2, max_size=4, unique=True).map(sorted),
    composition=st.sampled_from(COMPOSITIONS),
    sinks=st.integers(0, 5),
    window=st.none() | st.integers(0, 40),
    length=st.integers(1, 50),
    seed=st.integers(0, 1000),
)
def test_certain_choices_give_the_support(reaches, composition, sinks, window, length, seed):
    config = geometry(reaches, composition, sinks)
    generator = torch.Generator().manual_seed(seed)
    labels_q, labels_k = torch.randint(
        0, len(reaches), (2, 1, 2, length), generator=generator
    ).unbind()
    domain = build_hard_domain(labels_q, labels_k, config, window=window)
    queries = torch.arange(length)
    pi_q, pi_k = (F.one_hot(x[0], len(reaches)).float() for x in (labels_q, labels_k))
    keep = read_probability(pi_q, pi_k, queries, config, window=window)
    assert torch.equal(keep, domain.mask[0].float())
    pairs = expected_pairs(pi_q, pi_k, queries, config, window=window)
    assert torch.equal(pairs, keep.sum(dim=-1))
    assert int(causal_pairs(queries, window).sum()) == int(domain.row_causal_counts[0, 0])


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_uncertain_choices_give_the_probability_of_reading(composition):
    config = geometry((2.0, 5.0, 40.0), composition, 1)
    generator = torch.Generator().manual_seed(0)
    queries = torch.tensor([3, 11, 23])
    pi_q = torch.rand(2, 3, 3, generator=generator)
    pi_k = torch.rand(2, 24, 3, generator=generator)
    pi_q, pi_k = (pi / pi.sum(dim=-1, keepdim=True) for pi in (pi_q, pi_k))
    exact = read_probability(pi_q, pi_k, queries, config)
    # All pairs of labels, weighted: a sum of certain choices that are the same for every token.
    total = torch.zeros_like(exact)
    for m in range(3):
        for n in range(3):
            sure_q, sure_k = torch.zeros_like(pi_q), torch.zeros_like(pi_k)
            sure_q[..., m] = sure_k[..., n] = 1
            weight = pi_q[..., m][..., None] * pi_k[..., n][:, None]
            total += weight * read_probability(sure_q, sure_k, queries, config)
    torch.testing.assert_close(exact, total)
    pairs = expected_pairs(pi_q, pi_k, queries, config)
    torch.testing.assert_close(pairs, exact.sum(dim=-1))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_certain_choices_give_the_output_of_sparse_routing(window, softcap):
    config = geometry((2.0, 5.0, 40.0), "min", 2)
    torch.manual_seed(0)
    q, (k, v) = torch.randn(6, 30, 8), torch.randn(2, 2, 30, 8)
    labels_q, labels_k = torch.randint(0, 3, (2, 2, 30)).unbind()
    queries = torch.tensor([0, 7, 29])
    attention = head_attention(q, k, queries, Scoring(0.7, softcap, window))
    pi_q, pi_k = (F.one_hot(x, 3).float() for x in (labels_q, labels_k))
    keep = read_probability(pi_q[:, queries], pi_k, queries, config, window=window)
    options = {"scale": 0.7, "softcap": softcap, "window": window, "impl": "reference"}
    sparse = mosar_attention(
        *(x[None] for x in (q, k, v, pi_q, pi_k)), config, routing="sparse", **options
    )
    got = kept_output(attention, keep, v).view(3, 6, 8)
    torch.testing.assert_close(got, sparse[0, :, queries].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_bands_part_all_distances():
    bands = distance_bands(geometry((2.0, 5.5, 40.0), "mean", 0))
    assert bands[0].above == -1
    assert all(a.upto == b.above for a, b in pairwise(bands))
    # Beyond every reach only two global ends see each other.
    assert bands[-1].admits_RR.sum() == 1 and bands[-1].admits_RR[-1, -1] == 1
