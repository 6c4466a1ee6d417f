"""The decoder: what holds for every variant, and what routing, segments and precision change."""

import pytest
import torch
import torch.nn.functional as F

from mosar.geometries import PAPER_VARIANTS, VARIANTS, AttentionConfig
from mosar.model.config import ModelConfig
from mosar.model.decoder import Decoder

from .models import small_decoder, small_model

ROUTED = [name for name in PAPER_VARIANTS if VARIANTS[name].geometry == "mosar"]
PAPER = ModelConfig(
    vocab_size=256000,
    hidden_size=1024,
    num_layers=18,
    num_heads=8,
    num_kv_heads=1,
    head_dim=256,
    ffn_size=8192,
    query_pre_attn_scalar=256,
    attn_softcap=50.0,
    final_softcap=30.0,
    max_length=2048,
)


def some_tokens(batch=2, length=45, seed=0):
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_of(decoder, tokens, **options):
    return decoder.logits(decoder(tokens, **options).hidden)


def loss_of(decoder, tokens, **options):
    logits = logits_of(decoder, tokens[:, :-1], **options)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def make_lively(decoder, std=0.3):
    """Norms and routers away from their initial values, so that every part shows."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 1 or ".geometry." in name:
                parameter.normal_(std=std, generator=generator)
    return decoder


def test_variants_with_the_same_routers_start_alike():
    a, b = (small_decoder(name).state_dict() for name in ROUTED)
    assert list(a) == list(b) and all(torch.equal(a[n], b[n]) for n in a)


def test_initial_weights():
    decoder = small_decoder("mosar", hidden_size=256, head_dim=32, init_std=0.05)
    again, other = (small_decoder("mosar", hidden_size=256, head_dim=32, seed=s) for s in (0, 1))
    seen = set()
    for name, parameter in decoder.named_parameters():
        if "norm" in name or "bias" in name:
            assert parameter.eq(0).all(), name
            continue
        expected = {"weight1": 0.02, "weight2": 1e-3}.get(name.rsplit(".", 1)[1], 0.05)
        assert parameter.std().item() == pytest.approx(expected, rel=0.2), name
        seen.add(tuple(parameter.flatten()[:4].tolist()))
        if ".geometry." in name:
            assert torch.equal(parameter, again.get_parameter(name))
        assert not torch.equal(parameter, other.get_parameter(name))
    assert len(seen) == sum(p.std() > 0 for p in decoder.parameters())


def test_initialisation_leaves_the_global_generator_alone():
    decoder = Decoder(small_model(), VARIANTS["mosar"])
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    decoder.init_weights(0)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("name", PAPER_VARIANTS)
def test_variants_differ(name):
    decoder, rope = make_lively(small_decoder(name)), make_lively(small_decoder("rope"))
    tokens = some_tokens()
    rope.load_state_dict(decoder.state_dict(), strict=False)
    equal = torch.allclose(logits_of(decoder, tokens), logits_of(rope, tokens), atol=1e-5)
    assert equal == (name == "rope")


@pytest.mark.parametrize("routing", ["soft", "top1", "sparse"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_all_global_mosar_is_rope(routing, softcap):
    mosar = small_decoder("mosar", attn_softcap=softcap, init_std=0.2)
    rope = small_decoder("rope", attn_softcap=softcap, init_std=0.2)
    with torch.no_grad():
        for name, parameter in mosar.named_parameters():
            if name.endswith("bias2"):
                parameter.copy_(torch.tensor([-200.0, -200.0, 200.0]))
    tokens = some_tokens()
    difference = logits_of(mosar, tokens, routing=routing) - logits_of(rope, tokens)
    assert difference.abs().max() <= 1e-5


@pytest.mark.parametrize("routing", ["top1", "sparse"])
@pytest.mark.parametrize("length", [20, 200])
def test_hard_routing_at_any_length(routing, length):
    decoder = make_lively(small_decoder("mosar", init_std=0.2)).eval()
    tokens = some_tokens(length=length)
    with torch.inference_mode():
        soft, hard = decoder(tokens), decoder(tokens, routing=routing)
    labels = torch.stack([r.query.labels for r in hard.routings])
    assert labels.shape == (2, 2, length) and len(labels.unique()) == 3
    # The first layer's input does not depend on the routing, so neither does what its routers say.
    assert torch.equal(soft.routings[0].query.probabilities, hard.routings[0].query.probabilities)
    assert hard.hidden.isfinite().all()
    assert not torch.allclose(soft.hidden, hard.hidden, atol=1e-4)


def test_routing_of_no_concern_is_still_checked():
    decoder = small_decoder("rope")
    tokens = some_tokens()
    assert torch.equal(decoder(tokens, routing="sparse").hidden, decoder(tokens).hidden)
    with pytest.raises(ValueError, match="routing must be one of"):
        decoder(tokens, routing="hard")


@pytest.mark.parametrize(
    "tokens, segment_ids, message",
    [
        (torch.zeros(3, dtype=torch.int64), None, "tokens must be integers"),
        (torch.zeros(1, 3), None, "tokens must be integers"),
        (torch.zeros(1, 3).long(), torch.zeros(1, 4).long(), "segment_ids must have the shape"),
        (torch.zeros(1, 3).long(), torch.tensor([[1, 2, 1]]), "segment_ids must be one run"),
    ],
)
def test_wrong_input_is_refused_by_name(tokens, segment_ids, message):
    with pytest.raises(ValueError, match=message):
        small_decoder()(tokens, segment_ids=segment_ids)


@pytest.mark.parametrize("name", PAPER_VARIANTS)
def test_checkpointing_gives_the_same_gradients(name):
    decoder = make_lively(small_decoder(name))
    tokens = some_tokens()
    gradients = []
    for checkpointed in (False, True):
        output = decoder(tokens, checkpoint_activations=checkpointed)
        loss = decoder.logits(output.hidden).pow(2).mean()
        # The cost reaches the routers through the checkpoint as well.
        loss = loss + sum(r.query.probabilities[..., 0].mean() for r in output.routings)
        decoder.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in decoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("way", ["autocast", "module"])
@pytest.mark.parametrize("name", PAPER_VARIANTS)
def test_bfloat16(name, way):
    decoder = make_lively(small_decoder(name), std=0.1)
    tokens = some_tokens()
    exact = logits_of(decoder, tokens)
    if way == "module":
        decoder.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        output = decoder(tokens)
        logits = decoder.logits(output.hidden)
        loss = loss_of(decoder, tokens)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - exact).abs().max() < 0.1 * exact.abs().max()
    for routing in output.routings:
        for routed in routing:
            assert routed.logits.dtype == routed.probabilities.dtype == torch.float32
    loss.backward()
    for parameter_name, parameter in decoder.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), parameter_name


def test_training_after_inference_mode():
    decoder = small_decoder("fixed-m", max_length=48, head_dim=10)
    with torch.inference_mode():
        decoder(some_tokens())
    loss_of(decoder, some_tokens()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in decoder.parameters())


def count(decoder):
    return sum(parameter.numel() for parameter in decoder.parameters())


@pytest.mark.parametrize("name", PAPER_VARIANTS)
def test_the_paper_s_model(name):
    with torch.device("meta"):
        decoder = Decoder(PAPER, VARIANTS[name])
    # W1, b1, W2 and b2 of a layer's query router (8 heads of 256) and of its key router (1 head).
    routers = 18 * sum(x * 64 + 64 + 64 * 3 + 3 for x in (8 * 256, 256))
    assert routers == 2_663_532
    assert count(decoder) == 800_138_240 + (routers if name in ROUTED else 0)
    assert count(decoder) - decoder.embedding.weight.numel() - 537_994_240 in (0, routers)
    with pytest.raises(ValueError, match="to_empty"):
        decoder.init_weights(0)


def test_a_model_built_without_storage_is_the_same():
    with torch.device("meta"):
        decoder = Decoder(small_model(), VARIANTS["mosar"])
    decoder.to_empty(device="cpu").init_weights(0)
    tokens = some_tokens()
    assert torch.equal(decoder(tokens).hidden, small_decoder("mosar")(tokens).hidden)


@pytest.mark.parametrize("groups", [1, 2])
def test_router_parameters(groups):
    attention = AttentionConfig(geometry="mosar", routing_groups=groups, router_hidden=5)
    decoder = small_decoder(attention)
    extra = count(decoder) - count(small_decoder("rope"))
    assert extra == 2 * sum(groups * (x // groups * 5 + 5 + 5 * 3 + 3) for x in (4 * 8, 2 * 8))
    probabilities = decoder(some_tokens()).routings[0].key.probabilities
    assert probabilities.shape == ((2, 45, 3) if groups == 1 else (2, groups, 45, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER_VARIANTS)
def test_torch_compile(name):
    torch.compiler.reset()
    decoder = make_lively(small_decoder(name))
    tokens = some_tokens()
    expected = torch.autograd.grad(loss_of(decoder, tokens), list(decoder.parameters()))
    compiled = torch.compile(decoder)
    hidden = compiled(tokens[:, :-1]).hidden
    loss = F.cross_entropy(decoder.logits(hidden).flatten(0, 1), tokens[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, list(decoder.parameters()))
    for (parameter_name, _), a, b in zip(
        decoder.named_parameters(), gradients, expected, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=parameter_name)
