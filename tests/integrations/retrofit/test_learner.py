"""One layer's routers learn which tokens need far pairs, from what the layer computes."""

import torch

from mosar import MoSARConfig, Regime
from mosar.integrations.retrofit.config import RetrofitSettings
from mosar.integrations.retrofit.layer import RoutedLayer
from mosar.integrations.retrofit.learner import LayerInput, LayerLearner
from mosar.integrations.retrofit.objective import head_attention

LENGTH, HEADS, KV_HEADS, DIM = 256, 4, 2, 16
GEOMETRY = MoSARConfig(
    max_length=LENGTH,
    regimes=(Regime("S", 8, 1.0), Regime("M", 32, 1.0), Regime("G", LENGTH, 1.0)),
    composition="min",
    routing_groups=KV_HEADS,
    num_sinks=2,
    router_hidden=16,
)


def layer(window=None):
    made = RoutedLayer(
        GEOMETRY,
        index=0,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        project=lambda heads: heads,
    )
    made.window = window
    return made


def marked_window(seed):
    """Every eighth key, at random, draws the attention of every query however far it is."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(HEADS, LENGTH, DIM, generator=generator)
    k, v = torch.randn(2, KV_HEADS, LENGTH, DIM, generator=generator)
    marked = torch.rand(LENGTH, generator=generator) < 1 / 8
    q[..., 0] = 6.0
    k[..., 0] = torch.where(marked, 3.0, -3.0)
    residual = torch.randn(LENGTH, HEADS * DIM, generator=generator)
    return LayerInput(q, k, v, residual), marked


def trained(steps=25, cost_weight=0.02):
    settings = RetrofitSettings(
        length=LENGTH, steps=steps, updates=4, queries=64, learning_rate=1e-2
    )
    learner = LayerLearner(layer(), settings)
    for step in range(1, steps + 1):
        given, _ = marked_window(step)
        if step == 1:
            learner.soften(given)
        learner.learn(given, step, cost_weight)
    return learner


def test_trained_routers_read_marked_keys_from_afar_and_little_else():
    learner = trained()
    given, marked = marked_window(1000)
    routed = learner.layer.route(given.q[None], given.k[None])
    far = (routed.key.labels[0] == GEOMETRY.global_index).float()
    assert far[:, marked].mean() > 0.95
    assert far[:, ~marked].mean() < 0.05
    # Against a plain window with sinks that reads as many pairs.
    found = learner.measure(given, 0.02)
    queries = torch.arange(LENGTH)
    attention = head_attention(given.q, given.k, queries)
    distance = queries[:, None] - torch.arange(LENGTH)
    causal, sinks = distance >= 0, torch.arange(LENGTH) < GEOMETRY.num_sinks
    for reach in range(LENGTH):
        inside = causal & ((distance <= reach) | sinks)
        if inside.sum() / causal.sum() >= found.density.mean():
            break
    window = (attention * ~inside).sum(dim=-1).mean()
    assert found.density.mean() < 0.4
    assert found.lost.mean() < 0.25 * window


def test_a_higher_price_reads_fewer_pairs():
    given, _ = marked_window(1000)
    cheap, dear = (trained(12, weight).measure(given, 0.0).density for weight in (1e-4, 1.0))
    assert dear.mean() < 0.2 < cheap.mean()


def test_softening_keeps_the_global_regime_likeliest_and_hears_every_input():
    learner = LayerLearner(layer(), RetrofitSettings(length=LENGTH))
    given, _ = marked_window(3)
    given.k[..., 1] *= 1000
    learner.soften(given)
    for output in learner.layer.route(given.q[None], given.k[None]):
        probabilities = output.probabilities
        assert probabilities.max() < 0.99
        assert probabilities.mean(dim=(0, 1, 2)).argmax() == GEOMETRY.global_index
    # An input a thousand times larger gets a weight as much smaller.
    weight = learner.layer.key_router.weight1.abs().mean(dim=1)[0]
    assert weight[1] < 0.01 * weight[2:].mean()


def test_everything_global_is_no_error_and_all_that_a_window_allows():
    given, _ = marked_window(5)
    for window in (None, 15):
        learner = LayerLearner(layer(window), RetrofitSettings(length=LENGTH, queries=64))
        found = learner.measure(given, 0.1)
        torch.testing.assert_close(found.density, torch.ones(KV_HEADS))
        torch.testing.assert_close(found.lost, torch.zeros(KV_HEADS), atol=1e-6, rtol=0)
        assert found.error < 1e-10
