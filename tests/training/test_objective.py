"""The objective against its definition: plain logits, plain cross-entropy, cost by hand."""

import pytest
import torch
import torch.nn.functional as F

from mosar.core.losses import normalized_reach_cost
from mosar.geometries import GEOMETRIES, Geometry
from mosar.model.decoder import Decoder
from mosar.training.objective import Objective, linear_cross_entropy

CHUNKS = (0, 1, 7, 16, 37, 100)


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 12, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(29, 12, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(29, (37,), generator=generator)


def plain(hidden, weight, targets, softcap):
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked_cross_entropy_is_cross_entropy(chunk, softcap):
    hidden, weight, targets = problem()
    expected = plain(hidden, weight, targets, softcap)
    expected_gradients = torch.autograd.grad(3 * expected, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets, softcap=softcap, chunk=chunk)
    gradients = torch.autograd.grad(3 * loss, (hidden, weight))
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_what_asks_for_a_gradient_gets_one(frozen):
    tensors = [*problem()[:2]]
    tensors[frozen] = tensors[frozen].detach()
    targets = problem()[2]
    loss = linear_cross_entropy(*tensors, targets, softcap=3.0, chunk=8)
    (gradient,) = torch.autograd.grad(loss, tensors[1 - frozen])
    (expected,) = torch.autograd.grad(plain(*tensors, targets, 3.0), tensors[1 - frozen])
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-14)
    with torch.no_grad():
        alone = linear_cross_entropy(*tensors, targets, softcap=3.0, chunk=8)
    assert torch.equal(alone, loss.detach()) and not alone.requires_grad


def test_large_logits_stay_finite():
    hidden, weight, targets = (tensor.detach() for tensor in problem(torch.float32))
    hidden = (1e4 * hidden).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets, softcap=None, chunk=8)
    torch.testing.assert_close(loss, plain(hidden, weight, targets, None))
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient.isfinite().all()


def test_autocast_computes_in_bfloat16_and_gives_float32():
    hidden, weight, targets = problem(torch.float32)
    exact = torch.autograd.grad(plain(hidden, weight, targets, 3.0), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, softcap=3.0, chunk=8)
    assert loss.dtype == torch.float32
    for ours, theirs in zip(torch.autograd.grad(loss, (hidden, weight)), exact, strict=True):
        assert ours.dtype == torch.float32
        # bfloat16 has 8 bits: a few times 2^-8 of the largest entry.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.03 * float(theirs.abs().max()))
        assert not torch.equal(ours, theirs)


def run_objective(config, step=1):
    torch.manual_seed(0)
    decoder = Decoder(config.model, config.attention)
    decoder.init_weights(0)
    # Away from the start, where all regimes are alike.
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    tokens = torch.randint(config.model.vocab_size, (2, config.model.max_length + 1))
    terms = Objective(config)(decoder, tokens, None, step=step)
    return decoder, tokens, terms


@pytest.mark.parametrize("changes", [(), ("train.loss_chunk=13",)])
def test_language_model_loss_is_that_of_the_logits(smoke, changes):
    config = smoke("rope", *changes)
    decoder, tokens, terms = run_objective(config)
    logits = decoder.logits(decoder(tokens[:, :-1]).hidden)
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(terms.loss, expected)
    assert torch.equal(terms.loss.detach(), terms.lm_loss)
    assert terms.expected_reach is None and terms.shares is None
    ours = torch.autograd.grad(terms.loss, list(decoder.parameters()))
    theirs = torch.autograd.grad(expected, list(decoder.parameters()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [(), ("attention.routing_groups=2",)])
def test_cost_is_the_mean_over_batch_layers_and_tokens(smoke, changes):
    config = smoke("mosar-cost", "attention.cost_weight=0.5", *changes)
    decoder, tokens, terms = run_objective(config, step=5)
    routings = decoder(tokens[:, :-1]).routings
    geometry = config.attention.mosar_config(config.model.max_length)
    costs = [
        normalized_reach_cost(routing.query.probabilities, routing.key.probabilities, geometry)
        for routing in routings
    ]
    expected = sum(costs) / len(costs)
    torch.testing.assert_close(terms.expected_reach, expected.detach())
    # 5 of 25 steps of warm-up.
    torch.testing.assert_close(terms.loss.detach(), terms.lm_loss + 0.1 * expected.detach())
    assert terms.shares.shape == (2, len(routings), 3)
    torch.testing.assert_close(terms.shares.sum(dim=-1), torch.ones(2, len(routings)))


def test_the_cost_reaches_the_routers_and_only_where_it_weighs(smoke):
    gradients = {}
    for variant, step in (("mosar", 100), ("mosar-cost", 0), ("mosar-cost", 100)):
        decoder, _, terms = run_objective(smoke(variant), step)
        routers = [p for name, p in decoder.named_parameters() if "router" in name]
        gradients[variant, step] = torch.autograd.grad(terms.loss, routers)
    unweighted = zip(gradients["mosar", 100], gradients["mosar-cost", 0], strict=True)
    for plain_gradient, none in unweighted:
        assert torch.equal(plain_gradient, none)
    changed = zip(gradients["mosar", 100], gradients["mosar-cost", 100], strict=True)
    assert all(not torch.equal(one, other) for one, other in changed)


class Priced(Geometry):
    """Looks at the layer's input, and asks a price that depends on it and on the layer."""

    reads_hidden = True

    def attend(self, q, k, v, *, hidden, **options):
        out, _ = super().attend(q, k, v, **options)
        return out * hidden.mean(), (1 + self.shape.layer) * hidden.square().mean()


@pytest.mark.parametrize("checkpointed", ["false", "true"])
def test_the_objective_adds_a_geometrys_own_price(smoke, monkeypatch, checkpointed):
    monkeypatch.setitem(GEOMETRIES, "priced", Priced)
    gradients, prices = [], []
    for weight in (0.0, 0.5):
        decoder, tokens, terms = run_objective(
            smoke(
                *("rope", "attention.geometry=priced", f"attention.cost_weight={weight}"),
                f"train.checkpoint_activations={checkpointed}",
            ),
            step=1000,
        )
        given = []
        for layer in decoder.layers:
            layer.pre_attention_norm.register_forward_hook(
                lambda _, __, out, given=given: given.append(out)
            )
        decoder(tokens[:, :-1])
        price = sum((1 + i) * x.square().mean() for i, x in enumerate(given)) / len(given)
        torch.testing.assert_close(terms.expected_reach, price.detach())
        torch.testing.assert_close(terms.loss.detach(), terms.lm_loss + weight * price.detach())
        assert terms.shares is None
        norm = decoder.layers[0].pre_attention_norm.weight
        gradients.append(torch.autograd.grad(terms.loss, norm)[0])
        prices.append(torch.autograd.grad(price, norm)[0])
    torch.testing.assert_close(gradients[1], gradients[0] + 0.5 * prices[0])
