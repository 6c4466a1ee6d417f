"""What every variant must pass: its law, causality, caches, documents, gradients, resuming.

The expected answers are in laws.py; everything else here knows no variant by name but for `UNUSED`.
"""

import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from geometries.laws import LAWS, SCALE, Case
from model.models import small_decoder, small_model
from mosar.geometries import (
    UNROUTED,
    VARIANTS,
    AttentionConfig,
    HeadShape,
    chunked,
    operator_routing,
    score_bias,
    window_modes,
)
from mosar.model.decoder import Decoder
from mosar.training.loop import train
from training.runs import assert_same_run

# Parameters outside the geometry that a variant has no use for.
UNUSED = {"reformer": "k_proj"}
# One head of keys for three of queries; every variant is defined at that.
HEADS = {"num_heads": 6, "num_kv_heads": 2}
HIDDEN, LENGTH = 32, 45
SIZES = HEADS | {"max_length": 64}
SHAPE = HeadShape(**HEADS, head_dim=8, max_length=64, hidden_size=HIDDEN)
# A layer's index and its soft-cap.
LAYERS = ((0, 1.5), (5, None))

every_variant = pytest.mark.parametrize("name", VARIANTS)
RUNS = [
    (name, routing)
    for name, attention in VARIANTS.items()
    for routing in attention.build(SHAPE).routings
    if routing != "top1"
]
every_run = pytest.mark.parametrize(("name", "routing"), RUNS)


def executed(routing):
    return "soft" if routing == UNROUTED else routing


def enliven(module, *, std=0.3):
    """Norms and the geometry's parameters away from where they start, so that every part shows."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1 or ".geometry." in name or not isinstance(module, Decoder):
                parameter.normal_(std=std, generator=generator)
    return module


@cache
def decoder_of(name):
    """One decoder per variant; the tests leave it as it is."""
    return enliven(small_decoder(name, init_std=0.2, **SIZES))


@cache
def wide_decoder_of(name):
    decoder = Decoder(small_model(**SIZES), VARIANTS[name]).double()
    decoder.load_state_dict(decoder_of(name).state_dict())
    return decoder


def some_tokens(batch=2, length=LENGTH, seed=0):
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


@cache
def heads(length=40):
    """q, k, v as the projections give them, and what they are projections of."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(count, SHAPE.head_dim) for count in (6, 2, 2)] + [(HIDDEN,)]
    return [
        torch.randn(2, length, *size, generator=generator, dtype=torch.float64) for size in sizes
    ]


def geometry_of(name, layer=0, **changes):
    attention = replace(VARIANTS[name], **changes)
    geometry = attention.geometry_class(attention, SHAPE._replace(layer=layer)).double()
    return enliven(geometry, std=0.5)


def check_law(geometry, softcap, routing):
    """Outputs and counted pairs are those of the equation."""
    q, k, v, hidden = heads()
    options = {"scale": SCALE, "softcap": softcap, "routing": executed(routing)}
    out, told = geometry(q, k, v, hidden=hidden, **options)
    law = LAWS[geometry.attention.geometry]
    answer = law(Case(geometry, q, k, v, hidden, softcap, executed(routing)))
    torch.testing.assert_close(out, answer.out)
    assert geometry.routed == hasattr(told, "labels")
    labels = told.labels if geometry.routed else None
    counted = geometry.count_pairs((2, 40), routing=routing, labels=labels)
    causal = 2 * 40 * 41 // 2
    if not geometry.routed or routing == "sparse":
        # Routing groups are counted one by one.
        inside, there = counted or (causal, causal)
        assert inside * causal == pytest.approx(answer.pairs * there) and there % causal == 0


@every_run
@torch.no_grad()
def test_it_is_its_law_and_its_density_is_counted(name, routing):
    for layer, softcap in LAYERS:
        check_law(geometry_of(name, layer), softcap, routing)


@pytest.mark.parametrize("routing", ["soft", "sparse"])
@pytest.mark.parametrize("name", ["mosar", "mosar-plus"])
@torch.no_grad()
def test_routing_groups_follow_the_law(name, routing):
    geometry = geometry_of(name, routing_groups=2)
    assert geometry.query_router.weight1.shape[0] == 2
    check_law(geometry, 1.5, routing)


@every_run
@torch.no_grad()
def test_later_tokens_change_nothing(name, routing):
    """Other ones not a bit; fewer ones nothing in float64, where sizes of matrices do not show."""
    tokens, routing = some_tokens(), executed(routing)
    for decoder, lengths in ((decoder_of(name), (1, 32)), (wide_decoder_of(name), (17, 44))):
        whole = decoder(tokens, routing=routing).hidden
        assert whole.isfinite().all()
        for length in lengths:
            other = torch.cat([tokens[:, :length], (tokens[:, length:] + 7) % 61], dim=1)
            again = decoder(other, routing=routing).hidden
            assert torch.equal(again[:, :length], whole[:, :length]), length
            assert not torch.equal(again[:, length:], whole[:, length:])
    for length in (1, 17, 32, 44):
        prefix = decoder(tokens[:, :length], routing=routing).hidden
        assert (prefix - whole[:, :length]).abs().max() <= 1e-11, length


@every_run
@torch.no_grad()
def test_portions_and_padding_change_nothing(name, routing):
    """A text in portions, beside a shorter one that is padded on the left."""
    decoder, tokens, routing = wide_decoder_of(name), some_tokens(), executed(routing)
    whole = decoder(tokens[:1], routing=routing).hidden
    alone = decoder(tokens[1:, 11:], routing=routing).hidden
    valid = torch.arange(LENGTH) >= torch.tensor([0, 11])[:, None]
    padded = decoder(tokens, valid=valid, routing=routing).hidden
    for sizes in ((LENGTH,), (30, 1, 1, 13), (7, 1, 1, 3, *(1,) * 33)):
        cache = decoder.new_cache(routing)
        parts = [
            decoder(part, valid=mask, routing=routing, cache=cache).hidden
            for part, mask in zip(tokens.split(sizes, 1), valid.split(sizes, 1), strict=True)
        ]
        for found in (torch.cat(parts, dim=1), padded):
            assert (found[:1] - whole).abs().max() <= 1e-11, sizes
            assert (found[1:, 11:] - alone).abs().max() <= 1e-11, sizes
        assert cache.lengths.tolist() == [LENGTH, LENGTH - 11]


@every_variant
@torch.no_grad()
def test_places_and_padded_slots_change_nothing(name):
    """The last queries alone, positions that are given, and slots that were never written."""
    geometry = geometry_of(name)
    q, k, v, hidden = heads()
    if geometry.note(q, k, hidden) is not None or geometry.reads_hidden or name in UNUSED:
        # Its keys need more than k and v, which a cache keeps.
        return
    expected, _ = geometry(q, k, v, scale=SCALE)
    last, _ = geometry(q[:, -7:], k, v, scale=SCALE)
    torch.testing.assert_close(last, expected[:, -7:])
    at = torch.arange(40).expand(2, -1)
    given, _ = geometry(q, k, v, scale=SCALE, query_positions=at, key_positions=at)
    torch.testing.assert_close(given, expected)
    padded = [F.pad(x, (0, 0, 0, 0, 3, 0), value=torch.nan) for x in (k, v)]
    valid = F.pad(torch.ones(2, 40, dtype=torch.bool), (3, 0), value=False)
    places = F.pad(at, (3, 0), value=-1000)
    options = {"query_positions": at, "key_positions": places, "key_valid": valid}
    behind, _ = geometry(q, *padded, scale=SCALE, **options)
    torch.testing.assert_close(behind, expected)


@every_run
@torch.no_grad()
def test_documents_are_the_same_wherever_they_stand(name, routing):
    decoder, routing = wide_decoder_of(name), executed(routing)
    documents = [some_tokens(1, length, seed=length) for length in (13, 1, 20, 11)]
    packed = torch.cat(documents, dim=1)
    ids = torch.cat([torch.full_like(d, 9 - i) for i, d in enumerate(documents)], dim=1)
    # The second row is one document.
    ids = torch.cat([ids, torch.zeros_like(ids)])
    found = decoder(packed.expand(2, -1), segment_ids=ids, routing=routing).hidden
    separate = [decoder(document, routing=routing).hidden for document in documents]
    assert (found[:1] - torch.cat(separate, dim=1)).abs().max() <= 1e-11
    assert (found[1:] - decoder(packed, routing=routing).hidden).abs().max() <= 1e-11


class LargestTensor(TorchDispatchMode):
    """The most numbers that any result of an operator has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().nbytes():
                held = each.untyped_storage().nbytes() // each.element_size()
                self.numbers = max(self.numbers, held)
        return found


# Each mode of one variant.
MODES_OF = {m: (n, m) for n, a in VARIANTS.items() for m in a.build(SHAPE).modes}
EXECUTED = [*RUNS, *MODES_OF.values()]


@pytest.mark.parametrize(("name", "routing"), EXECUTED)
@torch.no_grad()
def test_no_tensor_holds_all_pairs(name, routing, monkeypatch):
    """With chunks of 32 queries; the native kernels hold none, and the reference is not asked."""
    length = 512
    for module in (chunked, score_bias, window_modes):
        monkeypatch.setattr(module, "PAIRS", 32 * length)
    geometry = geometry_of(name).float()
    if routing in geometry.modes:
        geometry.enter_mode(routing, length)
    q, k, v, hidden = (x[:1].float() for x in heads(length))
    with LargestTensor() as largest:
        out, _ = geometry(q, k, v, hidden=hidden, scale=SCALE, routing=operator_routing(routing))
    assert out.isfinite().all() and q.numel() <= largest.numbers < length**2


@every_variant
def test_shared_weights_start_alike_and_all_of_them_learn(name):
    """Of the loss with its price; what is outside of the geometry starts as in `rope`."""
    rope = dict(small_decoder("rope", **SIZES).named_parameters())
    decoder = small_decoder(name, **SIZES)
    names = [n for n, _ in decoder.named_parameters() if ".geometry." not in n]
    assert names == list(rope)
    assert all(torch.equal(decoder.get_parameter(n), rope[n]) for n in names)
    exact = gradients(enliven(decoder))
    recomputed = gradients(decoder, checkpoint_activations=True)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = gradients(decoder)
    for parameter, gradient in exact.items():
        unused = UNUSED.get(VARIANTS[name].geometry, "nothing") in parameter
        assert bool(gradient.count_nonzero()) != unused, parameter
        assert torch.equal(recomputed[parameter], gradient), parameter
        assert narrow[parameter].isfinite().all(), parameter


def gradients(decoder, **options):
    """Of the loss with its price, by name; 0 where there is none."""
    tokens, parameters = some_tokens(), dict(decoder.named_parameters())
    output = decoder(tokens[:, :-1], **options)
    logits = decoder.logits(output.hidden).float()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    geometry = decoder.geometries[0]
    basis = geometry.price_basis(output.routings or output.prices)
    if basis is not None:
        loss = loss + geometry.price(basis)
    found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    assert all(gradient.isfinite().all() for gradient in found)
    return dict(zip(parameters, found, strict=True))


def filled(**values):
    """Sets parameters whose names end so; the others stay."""

    def change(geometry):
        for name, parameter in geometry.named_parameters():
            for end, value in values.items():
                if name.endswith(end):
                    parameter.copy_(torch.as_tensor(value, dtype=parameter.dtype))

    return change


def all_global(geometry):
    """Routers that are sure of the last regime."""
    for router in (getattr(geometry, f"{side}_router", None) for side in ("query", "key")):
        if router is not None:
            filled(weight2=0.0)(router)
            router.bias2.copy_(torch.eye(router.bias2.shape[-1])[-1] * 1e4)


def all_global_and_kept(geometry):
    all_global(geometry)
    filled(forget_weight=0.0, forget_bias=1e4)(geometry)


def selection_alone(geometry):
    """NSA's second branch; hidden is 1."""
    gates = torch.tensor([-1e4, 1e4, -1e4]).repeat_interleave(SHAPE.num_heads)
    geometry.gate.weight.copy_(gates[:, None].expand(-1, HIDDEN))


# What has no such limit within its settings; test_rivals.py has what is known of these.
NO_LIMIT = ("alibi", "kerple", "hope-high", "reformer", "selective")
# Settings and parameters with which a geometry is plain attention, and which one that is.
LIMITS = {
    "nope": ({}, None, "nope"),
    "rope": ({}, None, "rope"),
    "p-rope": ({"rope_fraction": 1.0}, None, "rope"),
    "fixed": ({"regime": "G"}, None, "rope"),
    "rope-mask": ({"regime": "G"}, None, "rope"),
    "mosar": ({}, all_global, "rope"),
    "mosar-forget": ({"hard_from": 0.0, "rope_fraction": 0.0}, all_global_and_kept, "nope"),
    "xpos": ({"own": {"base": 1e15}}, None, "rope"),
    "t5": ({}, filled(table=0.0), "nope"),
    "fox": ({}, filled(weight=0.0, bias=1e4), "nope"),
    "adaptive-span": ({}, filled(span=1.0), "rope"),
    "dynamic-span": ({}, filled(weight=0.0, bias=1e4), "rope"),
    "switch": ({"composition": "min"}, all_global, "rope"),
    "gemma3": ({"own": {"window": 1.0}}, None, "rope"),
    "longformer": ({"own": {"windows": [1.0]}}, None, "rope"),
    "bigbird": ({"own": {"random": 100}}, None, "rope"),
    "moba": ({"own": {"top": 100}}, None, "rope"),
    "dsa": ({"own": {"top": 1.0}}, None, "rope"),
    "nsa": ({"own": {"selected": 100}}, selection_alone, "rope"),
    "linformer": (
        {"own": {"rank": 1.0}, "rope_fraction": 0.0},
        filled(mixture=torch.eye(4)),
        "nope",
    ),
    "cope": ({}, filled(embedding=0.0), "nope"),
    "inkling": ({}, filled(profiles=0.0), "nope"),
    "hope-hyperbolic": ({"own": {"half_life": 1e15}}, None, "nope"),
}


@pytest.mark.parametrize("geometry", LIMITS)
@torch.no_grad()
def test_its_limit_is_plain_attention(geometry):
    """A full budget, an open gate, no bias."""
    settings, change, limit = LIMITS[geometry]
    attention = AttentionConfig(geometry=geometry, **settings)
    layer = enliven(attention.geometry_class(attention, SHAPE).double(), std=0.5)
    if change is not None:
        change(layer)
    q, k, v, hidden = heads()
    found, _ = layer(q, k, v, scale=SCALE, softcap=1.5, hidden=torch.ones_like(hidden))
    expected, _ = geometry_of(limit)(q, k, v, scale=SCALE, softcap=1.5)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_global_tokens_that_forget_are_fox():
    forget, fox = geometry_of("mosar-plus"), geometry_of("fox")
    all_global(forget)
    fox.weight.copy_(forget.forget_weight)
    fox.bias.copy_(forget.forget_bias)
    q, k, v, hidden = heads()
    found, expected = (
        layer(q, k, v, scale=SCALE, softcap=1.5, hidden=hidden)[0] for layer in (forget, fox)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert forget.forget_weight.count_nonzero()


@pytest.mark.parametrize("limit", [True, False])
@torch.no_grad()
def test_gates_with_slopes_are_mosar_over_alibi(limit):
    attention = replace(VARIANTS["mosar-plus"], own={"gates": "alibi"})
    geometry = enliven(attention.geometry_class(attention, SHAPE).double(), std=0.5)
    assert all("router" in name for name, _ in geometry.named_parameters())
    q, k, v, hidden = heads()
    if limit:
        all_global(geometry)
        expected = geometry_of("alibi")(q, k, v, scale=SCALE, softcap=1.5)[0]
    else:
        expected = LAWS["mosar-forget"](Case(geometry, q, k, v, hidden, 1.5, "sparse")).out
    found = geometry(q, k, v, scale=SCALE, softcap=1.5, hidden=hidden)[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_every_geometry_has_a_limit_or_says_that_it_has_none():
    assert set(LIMITS) | set(NO_LIMIT) == {v.geometry for v in VARIANTS.values()}


TINY = [
    *("train.steps=4", "train.checkpoint_every=2", "train.eval_every=4", "train.keep_last=2"),
    *("model.num_layers=1", "model.hidden_size=16", "model.ffn_size=16"),
    *("train.micro_batch=2", "train.eval_batches=1", "train.warmup_steps=1"),
]


@every_variant
def test_resuming_is_bit_for_bit_one_run(name, smoke, tmp_path):
    config, whole, again = smoke(name, *TINY), tmp_path / "whole", tmp_path / "again"
    train(config, whole, progress=False)
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step-00000004")
    assert train(config, again, progress=False).resumed_from == 2
    assert_same_run(again, whole)
