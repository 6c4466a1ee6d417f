"""Routers: initialisation, groups, precision, temperature, labels."""

import math

import numpy as np
import pytest
import torch

from cases import SMALL, enliven
from mosar import MoSARConfig, PostPositionRouter, forced_routing, top1_routing
from mosar.core.outputs import RouterOutput


def random_input(*shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_groups(groups, **changes):
    return MoSARConfig(router_hidden=8, routing_groups=groups, **changes)


@pytest.mark.parametrize("groups", [1, 4])
def test_initialisation(groups):
    torch.manual_seed(0)
    router = PostPositionRouter(512, MoSARConfig(router_hidden=1024, routing_groups=groups))
    for weight, std in ((router.weight1, 0.02), (router.weight2, 1e-3)):
        assert weight.std().item() == pytest.approx(std, rel=0.05)
        assert abs(weight.mean().item()) < 0.1 * std
    assert not router.bias1.any()
    assert not router.bias2.any()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_value_is_the_two_layer_gelu_network(groups):
    config = with_groups(groups, temperature=0.7)
    router = enliven(PostPositionRouter(12, config).double())
    x = random_input(2, 5, 12, dtype=torch.float64)
    erf = np.vectorize(math.erf)
    for g in range(groups):
        w1, b1, w2, b2 = (
            parameter[g].detach().numpy()
            for parameter in (router.weight1, router.bias1, router.weight2, router.bias2)
        )
        x_g = np.split(x.numpy(), groups, axis=-1)[g]
        hidden = x_g @ w1.T + b1
        hidden = hidden * (1 + erf(hidden / math.sqrt(2))) / 2
        logits = hidden @ w2.T + b2
        weights = np.exp(logits / 0.7)
        result = router(x)
        z, pi = result.logits, result.probabilities
        z, pi = (z, pi) if groups == 1 else (z[:, g], pi[:, g])
        np.testing.assert_allclose(z.detach().numpy(), logits, atol=1e-12)
        np.testing.assert_allclose(
            pi.detach().numpy(), weights / weights.sum(-1, keepdims=True), atol=1e-12
        )


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_apart_or_concatenated_are_the_same_input(groups):
    router = enliven(PostPositionRouter(24, with_groups(groups)))
    x = random_input(2, 5, 4, 6)
    apart, together = router(x), router(x.flatten(2))
    assert torch.equal(apart.logits, together.logits)
    expected = (2, 5, 3) if groups == 1 else (2, groups, 5, 3)
    assert apart.probabilities.shape == expected


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_group_sees_only_its_heads(changed):
    router = enliven(PostPositionRouter(24, with_groups(3)))
    x = random_input(2, 5, 6, 4)
    other = x.clone()
    other[:, :, 2 * changed : 2 * changed + 2] += 1
    before, after = router(x).logits, router(other).logits
    for group in range(3):
        assert torch.equal(before[:, group], after[:, group]) == (group != changed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_module_computes_in_float32(dtype):
    router = enliven(PostPositionRouter(12, MoSARConfig())).to(dtype)
    x = random_input(2, 50, 12).to(dtype)
    result = router(x)
    wide = PostPositionRouter(12, MoSARConfig())
    wide.load_state_dict({name: value.float() for name, value in router.state_dict().items()})
    expected = wide(x.float())
    assert result.logits.dtype == result.probabilities.dtype == torch.float32
    assert torch.equal(result.logits, expected.logits)
    assert torch.equal(result.probabilities, expected.probabilities)


@pytest.mark.parametrize(
    ("logits", "label"),
    [
        ([1.0, 1.0, 1.0], 0),
        ([0.0, 1.0, 1.0], 1),
        ([1.0, 0.0, 1.0], 0),
        # The probabilities of the first two tie in float32, the logits do not.
        ([0.0, 1e-9, -5.0], 1),
    ],
)
def test_labels_are_the_first_largest_logit(logits, label):
    logits = torch.tensor([[logits]])
    result = RouterOutput(logits, torch.softmax(logits, dim=-1))
    assert result.labels.item() == label


def test_labels_of_a_bfloat16_module_do_not_tie_where_float32_does_not():
    router = PostPositionRouter(2, MoSARConfig(router_hidden=2)).bfloat16()
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.zero_()
        router.weight1[0] = torch.eye(2)
        router.weight2[0, :2] = torch.tensor([[1.0, 0.0], [1.0, 2.0**-12]])
    result = router(torch.tensor([[[4.0, 4.0]]], dtype=torch.bfloat16))
    rounded = result.logits.bfloat16()[0, 0]
    assert rounded[0] == rounded[1] > rounded[2]
    assert result.labels.item() == 1


def test_top1_routing_is_one_hot_without_gradient():
    pi = torch.tensor([[[0.4, 0.4, 0.2], [0.1, 0.2, 0.7], [1 / 3, 1 / 3, 1 / 3]]])
    hot = top1_routing(pi.requires_grad_())
    assert hot.tolist() == [[[1, 0, 0], [0, 0, 1], [1, 0, 0]]]
    assert hot.dtype == pi.dtype
    assert not hot.requires_grad


@pytest.mark.parametrize(("regime", "index"), [("S", 0), ("G", 2), (1, 1)])
def test_forced_routing(regime, index):
    pi = forced_routing(SMALL, regime, 2, 5, dtype=torch.float64)
    assert pi.shape == (2, 5, 3)
    assert pi.dtype == torch.float64
    assert (pi.argmax(dim=-1) == index).all()
    assert torch.equal(pi.sum(dim=-1), torch.ones(2, 5, dtype=torch.float64))


@pytest.mark.parametrize("regime", ["X", 3, -1])
def test_forced_routing_names_an_unknown_regime(regime):
    with pytest.raises(ValueError, match=f"regime must be .*{regime}"):
        forced_routing(SMALL, regime, 1, 1)


@pytest.mark.parametrize(("input_dim", "groups"), [(0, 1), (-4, 1), (10, 3)])
def test_input_dim_must_split_over_the_groups(input_dim, groups):
    with pytest.raises(ValueError, match=f"input_dim .*{input_dim}"):
        PostPositionRouter(input_dim, with_groups(groups))


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((2, 5), "x must be"),
        ((2, 5, 11), "x must be .*12"),
        ((2, 5, 3, 5), "x must be .*12"),
        ((2, 5, 3, 2, 2), "x must be"),
        ((2, 5, 3, 4), "x has 3 heads"),
    ],
)
def test_wrong_input_is_named(shape, match):
    with pytest.raises(ValueError, match=match):
        PostPositionRouter(12, with_groups(2))(torch.zeros(shape))


@pytest.mark.parametrize("given", [[1, 2, 3], None, torch.tensor(1.0), torch.zeros(2, 0)])
def test_top1_routing_names_what_it_cannot_take(given):
    with pytest.raises(ValueError, match=r"probabilities must be a tensor \[\.\.\., R\]"):
        top1_routing(given)
