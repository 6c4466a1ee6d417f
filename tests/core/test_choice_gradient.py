"""The gradient of hard routing is what each other choice would have changed."""

import pytest
import torch

from mosar import MoSARConfig, Regime, mosar_attention
from mosar.attention import attend
from mosar.core.bias import LabelBias, RoutingToLearn

REGIMES = (Regime("A", 2, 0.25), Regime("B", 7, 0.5), Regime("G", 24, 1.0))
TOKENS, HEADS, KV_HEADS, DIM = 19, 4, 2, 6


def problem(layout: str, *, groups: int, sinks: int, dtype=torch.float64, tokens=TOKENS):
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    config = MoSARConfig(max_length=24, regimes=REGIMES, num_sinks=sinks, routing_groups=groups)
    q, dout = (random(2, HEADS, tokens, DIM) for _ in range(2))
    k, v = (random(2, KV_HEADS, tokens, DIM) for _ in range(2))
    labels = [
        torch.randint(0, 3, (2, groups, tokens), generator=generator) for _ in ("query", "key")
    ]
    # Flat enough that hardly a key holds all of a query: there float32 has no digits left.
    options = {"softcap": 20.0, "scale": 0.2}
    if layout == "segments":
        options["segment_ids"] = (torch.arange(tokens) >= 8).long().expand(2, -1)
    elif layout == "padding":
        options["key_valid"] = torch.arange(tokens) >= torch.tensor([[0], [5]])
        options["key_positions"] = (torch.arange(tokens) * 3).expand(2, -1)
    elif layout == "window":
        options["window"] = 9
    elif layout == "bias of keys":
        # It grows along the text, as that of forget gates does.
        options["of_key"] = random(2, HEADS, tokens).double().abs().cumsum(dim=-1)
    return q, k, v, dout, labels, config, options


def attended(q, k, v, labels, config, options, *, learned=None, impl="reference"):
    options = dict(options)
    of_key = options.pop("of_key", None)
    bias = LabelBias(*labels, config, ends_at_reach=True, learned=learned, of_key=of_key)
    return attend(q, k, v, bias, impl=impl, **options)


def learn(q, k, v, dout, labels, config, options, *, queries=None, impl="reference"):
    """dpi_q and dpi_k of the operator."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    pi = [torch.rand(*x.shape, 3, dtype=wide).requires_grad_() for x in labels]
    learned = RoutingToLearn(*pi, queries=queries)
    attended(q, k, v, labels, config, options, learned=learned, impl=impl).backward(dout)
    return [x.grad for x in pi]


@pytest.mark.parametrize("layout", ["ordinary", "segments", "padding", "window", "bias of keys"])
@pytest.mark.parametrize(("groups", "sinks"), [(1, 0), (2, 2)])
def test_it_is_the_change_of_the_output(layout, groups, sinks):
    q, k, v, dout, labels, config, options = problem(layout, groups=groups, sinks=sinks)

    def output(labels):
        return attended(q, k, v, labels, config, options)

    before = output(labels)
    for side, gradient in enumerate(learn(q, k, v, dout, labels, config, options)):
        expected = torch.zeros_like(gradient)
        for index in torch.cartesian_prod(*map(torch.arange, gradient.shape)):
            row, group, token, regime = index.tolist()
            changed = [x.clone() for x in labels]
            changed[side][row, group, token] = regime
            expected[row, group, token, regime] = ((output(changed) - before) * dout).sum()
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)
        assert gradient.abs().max() > 0.1


@pytest.mark.parametrize("groups", [1, 2])
def test_the_public_operator_learns_routing_on_request(groups):
    q, k, v, dout, labels, config, options = problem("segments", groups=groups, sinks=2)
    pi = [torch.nn.functional.one_hot(x, 3).double() * 0.6 + 0.4 / 3 for x in labels]
    # One group may be an axis or not.
    pi = [(x[:, 0] if groups == 1 else x).requires_grad_() for x in pi]
    plain = mosar_attention(q, k, v, *pi, config, routing="sparse", **options)
    assert not plain.requires_grad
    out = mosar_attention(q, k, v, *pi, config, routing="sparse", learn_routing=True, **options)
    assert torch.equal(out, plain)
    out.backward(dout)
    expected = learn(q, k, v, dout, labels, config, options)
    for given, gradient in zip(pi, expected, strict=True):
        assert torch.equal(given.grad, gradient.view_as(given))


@pytest.mark.parametrize("layout", ["ordinary", "segments", "padding", "window", "bias of keys"])
@pytest.mark.parametrize(("groups", "sinks", "tokens"), [(1, 0, 19), (2, 2, 300)])
def test_the_native_pass_gives_the_same(layout, groups, sinks, tokens):
    given = problem(layout, groups=groups, sinks=sinks, dtype=torch.float32, tokens=tokens)
    in_double = [x.double() for x in given[:4]]
    for queries in (None, torch.arange(0, tokens, 3)):
        exact = learn(*in_double, *given[4:], queries=queries)
        plain = learn(*given, queries=queries)
        native = learn(*given, queries=queries, impl="native")
        for ours, torchs, law in zip(native, plain, exact, strict=True):
            allowed = 2 * (torchs - law).abs().max()
            allowed += 4 * torch.finfo(torch.float32).eps * law.abs().max()
            assert (ours - law).abs().max() <= allowed


def test_a_sample_of_queries_expects_the_gradient_of_all():
    given = problem("ordinary", groups=2, sinks=0)
    whole = learn(*given)
    parts = torch.randperm(TOKENS - 1, generator=torch.Generator().manual_seed(1)).view(6, 3)
    # Every query but the last stands in one of six samples; the last is added to a seventh.
    samples = [*parts.sort(dim=1).values, torch.tensor([TOKENS - 1])]
    sums = [torch.zeros_like(x) for x in whole]
    for queries in samples:
        for total, part in zip(sums, learn(*given, queries=queries), strict=True):
            total += part * len(queries) / TOKENS
    for total, expected in zip(sums, whole, strict=True):
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-12)


def test_draws_average_to_the_gradient():
    given = problem("ordinary", groups=1, sinks=0)
    whole, generator = learn(*given), torch.Generator().manual_seed(5)
    draws = [torch.randperm(TOKENS, generator=generator)[:5] for _ in range(300)]
    estimates = [learn(*given, queries=draw.sort().values) for draw in draws]
    for side, expected in enumerate(whole):
        values = torch.stack([estimate[side] for estimate in estimates])
        error = values.std(dim=0) / len(draws) ** 0.5
        # Five standard errors, over a few hundred numbers.
        assert ((values.mean(dim=0) - expected).abs() <= 5 * error + 1e-12).all()


@pytest.mark.parametrize("impl", ["reference", "tiled", "native"])
def test_what_padded_slots_hold_does_not_matter(impl):
    dtype = torch.float32 if impl == "native" else torch.float64
    q, k, v, *rest = problem("padding", groups=1, sinks=0, dtype=dtype)
    clean = learn(q, k, v, *rest, impl=impl)
    padded = ~rest[-1]["key_valid"][:, None, :, None]
    spoilt = learn(*(q, *(x.masked_fill(padded, torch.nan) for x in (k, v))), *rest, impl=impl)
    for one, other in zip(clean, spoilt, strict=True):
        assert torch.equal(one, other)


def test_a_choice_with_weak_keys_alone_is_not_an_empty_one():
    """All that the other regime leaves weighs e^-90 of what is read now."""
    config = MoSARConfig(max_length=24, regimes=REGIMES)
    q, k, v = (torch.zeros(1, 1, 2, 2) for _ in range(3))
    q[..., 1, 0], k[..., 0, 0], k[..., 1, 0] = 10.0, 4.5, -4.5
    v[..., 0, 0], v[..., 1, 1] = 1.0, 1.0
    k, v = (torch.cat([x[:, :, :1], x.new_zeros(1, 1, 4, 2), x[:, :, 1:]], dim=2) for x in (k, v))
    q = torch.cat([q.new_zeros(1, 1, 5, 2), q[:, :, 1:]], dim=2)
    k[:, :, 1:5, 0] = -40.0
    labels = [torch.full((1, 1, 6), 2) for _ in range(2)]
    dout = torch.zeros_like(q)
    dout[..., 5, :] = 1.0
    given = (q, k, v, dout, labels, config, {"scale": 1.0})
    exact = learn(*(x.double() for x in given[:4]), *given[4:])
    for impl in ("reference", "native"):
        for ours, law in zip(learn(*given, impl=impl), exact, strict=True):
            torch.testing.assert_close(ours.double(), law, rtol=1e-4, atol=1e-4)
