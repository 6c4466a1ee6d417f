"""The sparse support: its mask, and its size counted without a mask."""

import pytest
import torch
from hypothesis import given

from cases import SMALL, Case, arrays, cases, geometry
from core import outsider
from mosar import MoSARConfig, build_hard_domain, forced_routing, normalized_reach_cost


def labels(*shape, high=3, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def outsider_support(case):
    """Support and existing pairs of a case, [B, T, S] or [B, Gr, T, S]."""

    def of_group(labels_q, labels_k):
        masks = outsider.support(
            labels_q.numpy(), labels_k.numpy(), **geometry(case.config), **arrays(case.placement)
        )
        return torch.from_numpy(masks[0]), torch.from_numpy(masks[1])

    labels_q, labels_k = case.labels
    if labels_q.dim() == 2:
        return of_group(labels_q, labels_k)
    groups = zip(labels_q.unbind(dim=1), labels_k.unbind(dim=1), strict=True)
    masks, existing = zip(*(of_group(*group) for group in groups), strict=True)
    return torch.stack(masks, dim=1), torch.stack(existing, dim=1)


@given(cases())
def test_mask_and_counts_are_the_outsiders(case):
    mask, existing = outsider_support(case)
    domain = build_hard_domain(*case.labels, case.config, **case.placement)
    assert torch.equal(domain.mask, mask)
    assert torch.equal(domain.row_counts, mask.sum(dim=(-2, -1)))
    assert torch.equal(domain.row_causal_counts, existing.sum(dim=(-2, -1)))


@given(cases(max_length=40))
def test_counting_needs_no_mask(case):
    domain = build_hard_domain(*case.labels, case.config, **case.placement)
    counted = build_hard_domain(*case.labels, case.config, materialize=False, **case.placement)
    assert counted.mask is None
    assert torch.equal(counted.row_counts, domain.mask.sum(dim=(-2, -1)))
    assert torch.equal(counted.row_counts, domain.row_counts)
    assert torch.equal(counted.row_causal_counts, domain.row_causal_counts)
    assert counted.count == int(domain.mask.sum())
    assert counted.density == domain.count / max(domain.causal_count, 1)


def test_density_of_a_short_band_is_not_its_reach():
    config = MoSARConfig()
    zeros = torch.zeros(1, 2048, dtype=torch.long)
    domain = build_hard_domain(zeros, zeros, config)
    assert domain.count == sum(min(i, 128) + 1 for i in range(2048))
    assert domain.causal_count == 2048 * 2049 // 2
    assert domain.density == pytest.approx(0.122, abs=5e-4)
    short = forced_routing(config, "S", 1, 2048)
    assert float(normalized_reach_cost(short, short, config)) == 0.0625


def test_counting_scales_to_lengths_no_mask_could_have():
    length = 200_000
    config = MoSARConfig(num_sinks=4)
    domain = build_hard_domain(
        labels(1, length, seed=1), labels(1, length, seed=2), config, materialize=False
    )
    assert domain.causal_count == length * (length + 1) // 2
    # A third of the queries times a third of the keys is global at both ends; the rest is local.
    assert 1 / 9 < domain.density < 1 / 9 + 2 * 2048 / length


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_of_any_integer_type(dtype):
    case = Case(batch=2, num_keys=30, num_queries=20)
    wide = build_hard_domain(*case.labels, SMALL)
    narrow = build_hard_domain(*(label.to(dtype) for label in case.labels), SMALL)
    assert torch.equal(wide.mask, narrow.mask)
    assert torch.equal(wide.row_counts, narrow.row_counts)


def test_no_query_has_no_pair():
    domain = build_hard_domain(labels(2, 0), labels(2, 5), SMALL)
    assert domain.mask.shape == (2, 0, 5)
    assert (domain.count, domain.causal_count, domain.density) == (0, 0, 0.0)


def test_padded_slots_may_hold_any_position():
    batch = 6
    valid = torch.tensor([[False, True, True, True]]).expand(batch, 4)
    keys = torch.tensor([[2**62, 0, 1, 2]]).expand(batch, 4)
    domain = build_hard_domain(
        torch.zeros(batch, 3, dtype=torch.long),
        torch.zeros(batch, 4, dtype=torch.long),
        SMALL,
        query_positions=torch.arange(3).expand(batch, 3),
        key_positions=keys,
        key_valid=valid,
    )
    assert domain.row_counts.tolist() == domain.mask.sum(dim=(1, 2)).tolist() == [5] * batch


GOOD = {"labels_q": labels(2, 3), "labels_k": labels(2, 5), "config": SMALL}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"labels_q": [[0, 1, 2]]}, "labels_q must be a tensor, got list"),
        ({"labels_k": None}, "labels_k must be a tensor, got NoneType"),
        ({"labels_q": labels(3)}, r"labels_q .*\[3\]"),
        ({"labels_k": labels(2, 1, 1, 5)}, "labels_k must be"),
        ({"labels_q": labels(2, 3).float()}, "labels_q .*float32"),
        ({"labels_k": labels(2, 5).bool()}, "labels_k .*bool"),
        ({"labels_q": labels(2, 3) + 3}, r"labels_q must lie in 0\.\.2"),
        ({"labels_k": labels(2, 5) - 3}, r"labels_k must lie in 0\.\.2"),
        ({"labels_q": labels(1, 3)}, "labels_q and labels_k must agree"),
        ({"labels_k": labels(2, 2, 5)}, "labels_q and labels_k must agree"),
        ({"labels_k": labels(2, 2)}, "T=3 > S=2"),
        ({"labels_k": labels(2, 5).to("meta")}, "labels_q and labels_k .*device"),
        ({"config": {"barrier": 6.0}}, "config must be a MoSARConfig, got dict"),
        ({"key_positions": torch.arange(5, 0, -1).expand(2, 5)}, "key_positions"),
    ],
)
def test_wrong_input_is_named(changes, match):
    with pytest.raises(ValueError, match=match):
        build_hard_domain(**(GOOD | changes))


def test_labels_without_values_are_refused():
    labels = torch.zeros(1, 4, dtype=torch.long, device="meta")
    with pytest.raises(ValueError, match="labels_q must have values to count"):
        build_hard_domain(labels, labels, MoSARConfig())
