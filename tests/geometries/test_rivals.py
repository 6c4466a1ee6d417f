"""Other systems' positions and biases: their definitions, their limits, and known answers."""

import json

import pytest
import torch

from geometries import known_answers
from geometries.known_answers import DIM, HEADS
from mosar.attention import distance_attention, mosar_attention
from mosar.core.config import MoSARConfig, Regime
from mosar.core.layout import resolve_layout
from mosar.core.positional import RESCALINGS, rescaled_frequencies
from mosar.core.reference_attention import dense_attention
from mosar.geometries import VARIANTS, AttentionConfig, HeadShape
from mosar.geometries.learned_distance import t5_bucket

ANSWERS = json.loads(known_answers.FILE.read_text())
SHAPE = HeadShape(num_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM, max_length=8, hidden_size=3)


def build(variant, *, shape=SHAPE, **own):
    geometry = AttentionConfig(geometry=variant, own=own).geometry_class(
        AttentionConfig(geometry=variant, own=own), shape
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in geometry.named_parameters():
            geometry.init_parameter(name, parameter, generator)
    return geometry.double()


def dense(q, k, v, bias, *, admissible=True):
    """By definition, [B, T, H, D]."""
    layout = resolve_layout(q.shape[0], q.shape[1], k.shape[1])
    out, _, _ = dense_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        bias=bias,
        admissible=layout.exists()[:, None] & admissible,
        key_valid=None,
        scale=None,
        softcap=None,
    )
    return out.transpose(1, 2)


def distances(length):
    return torch.arange(length)[:, None] - torch.arange(length)


def test_xpos_gives_the_scores_of_rotary_embedding_torch():
    q, k, _ = known_answers.heads()
    at = torch.arange(known_answers.LENGTH)[None]
    turned = build("xpos").transform(q, k, at, at)  # B = N / 2 = 4
    scores = torch.einsum("bthd,bshd->bhts", *turned)
    torch.testing.assert_close(
        scores, torch.tensor(ANSWERS["xpos_scores"]).double(), atol=2e-6, rtol=1e-5
    )


LONG_SHAPE = HeadShape(
    HEADS, 1, DIM, max_length=known_answers.LONG, hidden_size=known_answers.HIDDEN
)


def unrotated(geometry, *, parameters=None, hidden=None, **own):
    """What it makes of the longer inputs where nothing rotates, [1, T, H, D]."""
    return attended(geometry, parameters=parameters, hidden=hidden, **own)[0]


def attended(geometry, *, parameters=None, hidden=None, **own):
    """The same, and the price."""
    attention = AttentionConfig(geometry=geometry, rope_fraction=0.0, own=own)
    built = attention.geometry_class(attention, LONG_SHAPE).double()
    with torch.no_grad():
        for name, values in (parameters or {}).items():
            built.get_parameter(name).copy_(values)
        hidden = known_answers.hidden() if hidden is None else hidden
        return built(*known_answers.long_heads(), scale=known_answers.SCALE, hidden=hidden)


def nsa(branch):
    """As the package has it: means of `BLOCK` tokens, and one branch alone."""
    gates = torch.full((3, HEADS, 1), -1e4).double()
    gates[branch] = 1e4
    block = known_answers.BLOCK
    parameters = {
        "gate.weight": gates.flatten(0, 1).expand(-1, known_answers.HIDDEN),
        **{f"{x}_weights": torch.full((block,), 1 / block) for x in ("key", "value")},
        **{f"{x}_map": torch.eye(DIM) for x in ("key", "value")},
    }
    own = {"overlap": 1, "block": 1, "selected": known_answers.TOP}
    own["stride"] = block / known_answers.LONG
    ones = torch.ones_like(known_answers.hidden())
    return unrotated("nsa", parameters=parameters, hidden=ones, **own)


def dsa():
    query, key, weight = known_answers.indexer()
    parameters = {
        "index_query.weight": query.flatten(0, 1),
        "index_key.weight": key,
        "index_weight.weight": weight,
    }
    top = known_answers.TOP / known_answers.LONG
    own = {"top": top, "index_heads": HEADS, "index_dim": DIM}
    return unrotated("dsa", parameters=parameters, **own)


def inkling():
    mixture, profiles, _ = known_answers.curves()
    extent = known_answers.EXTENT / known_answers.LONG
    parameters = {"mixture.weight": mixture, "profiles": profiles}
    return unrotated(
        "inkling", parameters=parameters, profiles=known_answers.PROFILES, extent=extent
    )


def cope():
    positions = known_answers.POSITIONS / known_answers.LONG
    embedding = known_answers.curves()[2]
    return unrotated("cope", parameters={"embedding": embedding}, positions=positions)


def bigbird():
    """The blocks that a causal mask leaves of the authors'; the first and last two differ."""
    block = known_answers.BLOCK
    own = {"window": 2, "first": 1, "random": known_answers.RANDOM}
    out = unrotated("bigbird", block=block / known_answers.LONG, **own)
    return out[:, 2 * block : -2 * block]


def moba():
    block = known_answers.CHUNK / known_answers.LONG
    return unrotated("moba", block=block, top=known_answers.TOP)


def linformer():
    keys, values = known_answers.mixtures()
    own = {"block": known_answers.MIXED / known_answers.LONG}
    own["rank"] = known_answers.MIXTURES / known_answers.MIXED
    parameters = {"key_mixture": keys, "value_mixture": values}
    return unrotated("linformer", parameters=parameters, **own)


SHARE = known_answers.WINDOW / known_answers.LONG
OURS = {
    "selective": lambda: unrotated("selective"),
    "cope": cope,
    "inkling": inkling,
    "window": lambda: unrotated("longformer", windows=[SHARE], global_tokens=0.0),
    "reformer": lambda: unrotated("reformer", buckets=known_answers.BUCKETS),
    "nsa_compression": lambda: nsa(0),
    "nsa_selection": lambda: nsa(1),
    "dsa": dsa,
    "bigbird": bigbird,
    "moba": moba,
    "moba_fla": moba,
    "linformer": linformer,
}


@pytest.mark.parametrize("name", OURS)
def test_it_gives_what_the_others_give(name):
    expected = torch.tensor(ANSWERS[name]).double()
    torch.testing.assert_close(OURS[name](), expected, atol=2e-6, rtol=1e-5)


def test_gemma3_has_the_masks_of_transformers():
    *keys, windowed = ANSWERS["gemma3_mask"]
    for layer, has_window in enumerate(windowed):
        geometry = AttentionConfig(geometry="gemma3").build(SHAPE._replace(layer=layer))
        assert (geometry.window is not None) == has_window, layer
    few = [SHAPE._replace(layer=layer, num_layers=4) for layer in range(4)]
    windows = [AttentionConfig(geometry="gemma3").build(shape).window for shape in few]
    assert windows == [2, 2, 2, None]
    mask = torch.tensor(keys).bool()
    v = known_answers.long_heads()[2]
    scores = known_answers.causal_scores().masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(unrotated("gemma3", window=SHARE), known_answers.weighed(scores, v))


def test_bigbird_draws_as_many_blocks_and_from_where_the_authors_draw():
    """Blocks that are read besides the first two, the query's own and the two before it."""
    blocks, heads = known_answers.ROWS, 8
    shape = HeadShape(heads, heads, head_dim=blocks, max_length=blocks)
    attention = AttentionConfig(geometry="bigbird", own={"block": 1 / blocks})
    own, block = torch.arange(blocks)[:, None], torch.arange(blocks)
    others = (block >= 2) & ((block < own - 2) | (block > own))
    zeros = torch.zeros(1, blocks, heads, blocks).double()
    v = torch.eye(blocks).double()[None, :, None].expand(zeros.shape)
    drawn = []
    for layer in range(known_answers.DRAWS // heads):
        geometry = attention.geometry_class(attention, shape._replace(layer=layer))
        read_HTS = geometry(zeros, zeros, v, scale=1.0)[0][0].transpose(0, 1) > 0
        drawn.append(read_HTS & others)
    drawn = torch.cat(drawn)
    counts = drawn.sum(dim=-1)
    assert (counts == counts[0]).all()
    found = torch.cat([counts[0][:, None], drawn.any(dim=0)], dim=-1)
    assert found.tolist() == ANSWERS["bigbird_draws"]


SPANS = torch.tensor(known_answers.SPANS).double()


@pytest.mark.parametrize(
    ("geometry", "parameters"),
    [
        ("adaptive-span", {"span": SPANS}),
        # Spans that do not depend on the query.
        (
            "dynamic-span",
            {"weight": torch.zeros(HEADS, known_answers.HIDDEN), "bias": torch.logit(SPANS)},
        ),
    ],
)
def test_spans_mask_and_cost_what_the_authors_say(geometry, parameters):
    out, price = attended(geometry, parameters=parameters, ramp=known_answers.RAMP)
    expected = ANSWERS["adaptive_span"]
    torch.testing.assert_close(out, torch.tensor(expected["out"]).double(), atol=2e-6, rtol=1e-5)
    # Theirs is in tokens.
    assert float(price) * known_answers.LONG == pytest.approx(expected["loss"])


def test_every_answer_can_be_asked_for_again():
    sources = {name: source for name, (_, _, source) in known_answers.REPOSITORIES.items()}
    assert ANSWERS["sources"] == sources
    assert set(ANSWERS) == {*known_answers.PACKAGES, *sources, "sources"}


@pytest.mark.rivals
@pytest.mark.parametrize("name", known_answers.PACKAGES)
def test_the_packages_still_give_what_is_recorded(name):
    """Those of the extra `rivals`; a package that is missing fails."""
    torch.testing.assert_close(known_answers.answer(name), ANSWERS[name], atol=2e-6, rtol=1e-5)


@pytest.mark.rivals
@pytest.mark.parametrize("name", known_answers.REPOSITORIES)
def test_the_repositories_give_what_is_recorded(name):
    """Skipped where the authors' module is not on the path."""
    _, module, source = known_answers.REPOSITORIES[name]
    pytest.importorskip(module, reason=f"needs {source}")
    torch.testing.assert_close(known_answers.answer(name), ANSWERS[name], atol=2e-6, rtol=1e-5)


def test_xpos_refuses_positions_that_it_cannot_compute():
    q, k, _ = known_answers.heads()
    at = torch.tensor([[0, 1, 2, 3, 4, 241]])
    with pytest.raises(ValueError, match=r"xpos computes positions up to 240 .*, got 241"):
        build("xpos").transform(q, k, at, at)


@pytest.mark.parametrize(("length", "dim", "rotated"), [(512, 64, 16), (64, 64, 9), (4, 8, 0)])
def test_hope_high_is_p_rope_by_wavelength(length, dim, rotated):
    shape = HeadShape(2, 1, dim, length)
    geometry = VARIANTS["hope-high"].build(shape)
    assert geometry.fraction == rotated / (dim // 2)
    q = torch.randn(1, 5, 2, dim)
    same = AttentionConfig(geometry="p-rope", rope_fraction=rotated / (dim // 2)).build(shape)
    at = torch.arange(5)[None]
    assert torch.equal(geometry.transform(q, q, at, at)[0], same.transform(q, q, at, at)[0])


@pytest.mark.parametrize("mode", RESCALINGS)
def test_rescaled_rotations_are_those_of_transformers(mode):
    frequencies, factor = rescaled_frequencies(mode, 64, 10000.0, 512, 4.0)
    found = torch.tensor([*frequencies.tolist(), factor])
    torch.testing.assert_close(found, torch.tensor(ANSWERS["rescaled"][mode]), rtol=2e-6, atol=0)


def test_t5_has_the_buckets_of_transformers():
    assert t5_bucket(torch.arange(300), 32, 128).tolist() == ANSWERS["t5_buckets"]


def test_t5_is_a_table_of_buckets():
    geometry = build("t5", buckets=4, max_distance=5)
    assert t5_bucket(torch.arange(8), 4, 5).tolist() == [0, 1, 2, 2, 3, 3, 3, 3]
    q, k, v = known_answers.heads()
    buckets = t5_bucket(distances(q.shape[1]).clamp_min(0), 4, 5)
    bias = geometry.table.reshape(HEADS, 4)[:, buckets]
    torch.testing.assert_close(geometry(q, k, v, scale=DIM**-0.5)[0], dense(q, k, v, bias))


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_kerple_is_its_kernel(kernel):
    geometry = build("kerple", kernel=kernel)
    with torch.no_grad():
        geometry.rate[0], geometry.power[0] = -1.0, 3.0  # held at 0.01 and 2
    q, k, v = known_answers.heads()
    far = distances(q.shape[1]).clamp_min(0).double()
    rate, power = (x.clamp(0.01, 2)[:, None, None] for x in (geometry.rate, geometry.power))
    bias = -power * torch.log1p(rate * far) if kernel == "log" else -rate * far**power
    torch.testing.assert_close(geometry(q, k, v, scale=DIM**-0.5)[0], dense(q, k, v, bias))


def test_kerple_of_power_one_is_alibi():
    geometry, slopes = build("kerple", kernel="power"), torch.tensor([0.5, 0.0625]).double()
    with torch.no_grad():
        geometry.power.fill_(1.0)
        geometry.rate.copy_(slopes)
    q, k, v = known_answers.heads()
    expected = distance_attention(*(x.transpose(1, 2) for x in (q, k, v)), slopes=slopes)
    torch.testing.assert_close(geometry(q, k, v, scale=DIM**-0.5)[0], expected.transpose(1, 2))


def forgetting(logits):
    """Gates whose logits are given: the hidden size is the number of heads."""
    geometry = build("fox", shape=SHAPE._replace(hidden_size=HEADS))
    with torch.no_grad():
        geometry.weight.copy_(torch.eye(HEADS))
    q, k, v = known_answers.heads()
    return geometry(q, k, v, scale=DIM**-0.5, hidden=logits)[0]


def test_fox_is_the_naive_form_of_flash_linear_attention():
    found = forgetting(known_answers.gates())
    torch.testing.assert_close(found, torch.tensor(ANSWERS["fox"]).double(), atol=1e-6, rtol=1e-5)


def test_fox_with_constant_gates_is_alibi():
    slopes = torch.tensor([0.5, 0.0625]).double()
    q, k, v = (x.transpose(1, 2) for x in known_answers.heads())
    logits = torch.logit((-slopes).exp()).expand(1, known_answers.LENGTH, HEADS)
    expected = distance_attention(q, k, v, slopes=slopes).transpose(1, 2)
    torch.testing.assert_close(forgetting(logits), expected)


@pytest.mark.parametrize(("start", "kept"), [(0.0, 0.5), (5.0, 0.9933)])
def test_fox_starts_at_its_bias(start, kept):
    geometry = build("fox", gate_bias=start)
    assert torch.allclose(torch.sigmoid(geometry.bias), torch.tensor(kept).double(), atol=1e-4)


def test_a_span_of_zero_is_the_ramp_and_a_full_one_is_rope():
    q, k, v = known_answers.heads()
    geometry = build("adaptive-span", ramp=4)
    out, price = geometry(q, k, v, scale=0.3)
    at = torch.arange(q.shape[1])[None]
    turned = geometry.transform(q, k, at, at)
    weights = ((4 - distances(q.shape[1])) / 4).clamp(0, 1).double()
    # Weights that are multiplied and normalised again are logits with the logarithm added.
    exact = torch.softmax(
        0.3 * torch.einsum("bthd,bshd->bhts", *turned).masked_fill(distances(6) < 0, -1e9), dim=-1
    )
    exact = exact * weights
    exact = exact / exact.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(out, torch.einsum("bhts,bshd->bthd", exact, v))
    assert price == 0 and geometry.count_pairs((3, 6)) == (3 * (1 + 2 + 3 + 4 + 4 + 4), 3 * 21)
    with torch.no_grad():
        geometry.span.fill_(2.0)  # held at 1
    out, price = geometry(q, k, v, scale=0.3)
    torch.testing.assert_close(out, VARIANTS["rope"].build(SHAPE)(q, k, v, scale=0.3)[0])
    assert price == 1 and geometry.band("native") == 8 + 4 - 1


@pytest.mark.parametrize(("ramp", "span"), [(2, 2), (6, 4)])
def test_dynamic_spans_start_at_the_ramp(ramp, span):
    geometry = build("dynamic-span", ramp=ramp)
    assert torch.allclose(8 * torch.sigmoid(geometry.bias), torch.tensor(span).double())


def test_selective_lowers_nothing_where_head_0_likes_nothing():
    q, k, v = known_answers.heads()
    q[:, :, 0], k[:, :, 0] = q[:, :, 0].abs(), -k[:, :, 0].abs()
    attention = AttentionConfig(geometry="selective", rope_fraction=0.0)
    found, _ = attention.geometry_class(attention, SHAPE)(q, k, v, scale=0.3)
    torch.testing.assert_close(found, VARIANTS["nope"].build(SHAPE)(q, k, v, scale=0.3)[0])


@pytest.mark.parametrize("routing", ["soft", "top1", "sparse"])
def test_switch_is_mosar_attention_with_global_keys(routing):
    """Two regimes, the smaller reach of both; keys that are global leave it to the query."""
    attention = VARIANTS["switch"]
    geometry = attention.geometry_class(attention, SHAPE).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in geometry.parameters():
            parameter.normal_(generator=generator)
    q, k, v = known_answers.heads()
    found, routed = geometry(q, k, v, scale=0.3, routing=routing)
    at = torch.arange(q.shape[1])[None]
    q, k = geometry.transform(q, k, at, at)
    keys = torch.tensor([0.0, 1.0]).double().expand(*q.shape[:2], 2)
    config = MoSARConfig(
        max_length=8,
        regimes=(Regime("M", 2, 1.0), Regime("G", 8, 1.0)),
        composition="min",
        barrier=attention.barrier,
    )
    expected = mosar_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        *(routed.query.probabilities, keys, config),
        scale=0.3,
        routing=routing,
    )
    torch.testing.assert_close(found, expected.transpose(1, 2))
