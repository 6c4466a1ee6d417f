"""Each geometry against its definition, and the variants against each other."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

from core.test_positional import rotate_by_definition
from mosar import Regime, distance_attention, forced_routing, mosar_attention
from mosar.core.layout import resolve_layout
from mosar.core.reference_attention import dense_attention
from mosar.geometries import (
    GEOMETRIES,
    MATCHED_VARIANTS,
    PAPER_VARIANTS,
    VARIANTS,
    AttentionConfig,
    Geometry,
    HeadShape,
    LayerRouting,
)
from mosar.geometries.geometry import plain_attention

SHAPE = HeadShape(num_heads=6, num_kv_heads=2, head_dim=8, max_length=32)
SCALE = 0.3


def a_geometry(attention, shape=SHAPE, dtype=torch.float64) -> Geometry:
    if isinstance(attention, str):
        attention = VARIANTS[attention]
    torch.manual_seed(0)
    geometry = GEOMETRIES[attention.geometry](attention, shape).to(dtype)
    with torch.no_grad():
        for parameter in geometry.parameters():
            parameter.normal_(std=0.5)
    return geometry


def heads(length=50, batch=2, shape=SHAPE, dtype=torch.float64):
    """q, k and v as the projections give them."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(batch, length, count, shape.head_dim, generator=generator, dtype=dtype)
        for count in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    ]


def by_definition(q, k, v, *, bias=None, window=None, softcap=None, rotated=None, rotation=True):
    """Dense attention in the layout of a geometry, rotated by complex numbers."""
    length = q.shape[1]
    if rotation:
        positions = torch.arange(length)[None]
        q, k = (rotate_by_definition(x, positions, rotated=rotated) for x in (q, k))
    layout = resolve_layout(q.shape[0], length, length, window=window)
    out, _, _ = dense_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        bias=bias,
        admissible=layout.exists()[:, None],
        key_valid=None,
        scale=SCALE,
        softcap=softcap,
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize("reach, window", [(7.9, 7), (8.0, 8), (8.1, 8)])
def test_the_mask_ends_at_the_reach_inclusive(reach, window):
    regimes = (Regime("S", 2, 0.75), Regime("M", reach, 0.5), Regime("G", 32, 1.0))
    geometry = a_geometry(AttentionConfig(geometry="rope-mask", regime="M", regimes=regimes))
    q, k, v = heads()
    out, _ = geometry(q, k, v, scale=SCALE)
    torch.testing.assert_close(out, by_definition(q, k, v, window=window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("routing", ["soft", "top1", "sparse"])
@pytest.mark.parametrize("regime", ["S", "M", "G"])
def test_fixed_is_forced_routing(regime, routing, softcap, dtype):
    attention = AttentionConfig(geometry="fixed", regime=regime)
    q, k, v = heads(dtype=dtype)
    geometry = a_geometry(attention, dtype=dtype)
    out, layer_routing = geometry(q, k, v, scale=SCALE, softcap=softcap, routing=routing)
    assert layer_routing is None
    config = attention.mosar_config(SHAPE.max_length)
    pi = forced_routing(config, regime, 2, 50, dtype=dtype)
    at = torch.arange(50)[None]
    q, k = geometry.transform(q, k, at, at)
    expected = mosar_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        *(pi, pi, config),
        routing=routing,
        scale=SCALE,
        softcap=softcap,
    )
    torch.testing.assert_close(out.transpose(1, 2), expected)


@pytest.mark.parametrize("routing", ["soft", "top1", "sparse"])
@pytest.mark.parametrize("groups", [1, 2])
def test_mosar_is_the_operator_on_rotated_heads(routing, groups):
    attention = AttentionConfig(geometry="mosar", routing_groups=groups, num_sinks=1)
    geometry = a_geometry(attention)
    q, k, v = heads()
    out, routed = geometry(q, k, v, scale=SCALE, softcap=1.5, routing=routing)
    at = torch.arange(50)[None]
    q, k = (rotate_by_definition(x, at) for x in (q, k))
    pi_q = geometry.query_router(q).probabilities
    pi_k = geometry.key_router(k).probabilities
    assert isinstance(routed, LayerRouting)
    torch.testing.assert_close(routed.query.probabilities, pi_q)
    torch.testing.assert_close(routed.key.probabilities, pi_k)
    assert len(routed.query.labels.unique()) == 3
    expected = mosar_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        *(pi_q, pi_k, attention.mosar_config(32)),
        routing=routing,
        scale=SCALE,
        softcap=1.5,
    )
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_mosar_takes_its_labels_from_the_logits():
    geometry = a_geometry(AttentionConfig(geometry="mosar", temperature=1e20), dtype=torch.float32)
    q, k, v = heads(dtype=torch.float32)
    out, routed = geometry(q, k, v, scale=SCALE, routing="top1")
    # So hot that all probabilities tie, while the logits do not.
    assert routed.query.probabilities.unique().numel() == 1
    cool = a_geometry("mosar", dtype=torch.float32)
    expected, _ = cool(q, k, v, scale=SCALE, routing="top1")
    assert torch.equal(out, expected)


def test_plain_attention_leaves_the_cpu_to_our_operator(monkeypatch):
    q, k, v = (x.transpose(1, 2).float() for x in heads())
    ours = plain_attention(q, k, v, scale=SCALE, softcap=None, segment_ids=None)
    torchs = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(ours, torchs)

    def refuse(*args, **kwargs):
        raise AssertionError("called")

    monkeypatch.setattr("mosar.geometries.geometry.distance_attention", refuse)
    elsewhere = [x.to("meta") for x in (q, k, v)]
    assert plain_attention(*elsewhere, scale=SCALE, softcap=None).shape == q.shape
    for options in (
        {"softcap": 50.0},
        {"softcap": None, "segment_ids": torch.zeros(2, 50, dtype=torch.int64)},
    ):
        with pytest.raises(AssertionError, match="called"):
            plain_attention(*elsewhere, scale=SCALE, **options)


def test_the_matched_set():
    names = "rope alibi p-rope fixed-s fixed-m rope-m-mask mosar mosar-cost"
    assert list(PAPER_VARIANTS) == names.split()
    assert list(MATCHED_VARIANTS) == [*PAPER_VARIANTS, "mosar-hard", "mosar-plus"]
    assert VARIANTS["p-rope"].rope_fraction == 0.75
    assert VARIANTS["mosar-cost"].cost_weight == 0.01
    assert VARIANTS["mosar-cost"].cost_warmup == 500
    assert [name for name in PAPER_VARIANTS if VARIANTS[name].cost_weight] == ["mosar-cost"]


def differing_fields(a, b):
    return {
        field.name
        for field in dataclasses.fields(a)
        if getattr(a, field.name) != getattr(b, field.name)
    }


@pytest.mark.parametrize(
    "name, changed",
    [
        ("rope", set()),
        ("alibi", {"geometry"}),
        ("p-rope", {"geometry", "rope_fraction"}),
        ("fixed-s", {"geometry", "regime"}),
        ("fixed-m", {"geometry", "regime"}),
        ("rope-m-mask", {"geometry", "regime"}),
        ("mosar", {"geometry"}),
        ("mosar-cost", {"geometry", "cost_weight"}),
    ],
)
def test_a_variant_is_a_small_difference(name, changed):
    assert differing_fields(VARIANTS["rope"], VARIANTS[name]) == changed


def test_regimes_scale_with_the_training_length():
    config = VARIANTS["mosar"].mosar_config(512)
    assert [regime.reach for regime in config.regimes] == [32, 128, 512]
    assert config.max_length == 512
    regimes = (Regime("S", 3, 0.5), Regime("G", 9, 1.0))
    assert AttentionConfig(regimes=regimes).mosar_config(512).regimes == regimes


def test_settings_survive_json():
    regimes = (Regime("S", 3, 0.5), Regime("G", 9, 1.0))
    attention = AttentionConfig(geometry="mosar", regimes=regimes, num_sinks=2)
    assert AttentionConfig(**json.loads(json.dumps(dataclasses.asdict(attention)))) == attention


@pytest.mark.parametrize(
    "field, value",
    [
        ("geometry", "rop"),
        ("rope_theta", 0.5),
        ("rope_fraction", 1.5),
        ("rope_fraction", "all"),
        ("regime", "X"),
        ("regimes", (Regime("S", 3, 0.5),)),
        ("router_hidden", 0),
        ("temperature", 0.0),
        ("barrier", -1.0),
        ("exponent", 0.0),
        ("epsilon", 0.1),
        ("composition", "median"),
        ("routing_groups", 0),
        ("num_sinks", -1),
        ("cost_weight", -0.1),
        ("cost_warmup", 1.5),
    ],
)
def test_wrong_settings_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        AttentionConfig(**{field: value})


@pytest.mark.parametrize(
    "attention, shape, message",
    [
        (AttentionConfig(geometry="fixed"), SHAPE, "needs a regime, one of"),
        (AttentionConfig(geometry="rope-mask"), SHAPE, "needs a regime, one of"),
        (AttentionConfig(geometry="fixed", regime="S", num_sinks=1), SHAPE, "num_sinks"),
        (AttentionConfig(geometry="mosar", routing_groups=3), SHAPE, "routing_groups"),
        (AttentionConfig(), SHAPE._replace(head_dim=7), "head_dim must be even"),
    ],
)
def test_what_does_not_fit_together_is_refused(attention, shape, message):
    with pytest.raises(ValueError, match=message):
        GEOMETRIES[attention.geometry](attention, shape)


def test_a_new_geometry_is_one_class(monkeypatch):
    class Near(GEOMETRIES["rope"]):
        def attend(self, q, k, v, *, routing, **options):
            return distance_attention(q, k, v, window=3, **options), None

    with pytest.raises(ValueError, match="geometry"):
        AttentionConfig(geometry="near")
    monkeypatch.setitem(GEOMETRIES, "near", Near)
    q, k, v = heads()
    out, _ = a_geometry(AttentionConfig(geometry="near"))(q, k, v, scale=SCALE)
    torch.testing.assert_close(out, by_definition(q, k, v, window=3))


def test_forgetting_heads_start_short_and_a_quarter_long():
    shape = SHAPE._replace(num_heads=8, hidden_size=4)
    attention = VARIANTS["mosar-plus"]
    geometry = attention.geometry_class(attention, shape)
    with torch.no_grad():
        for name, parameter in geometry.named_parameters():
            geometry.init_parameter(name, parameter, torch.Generator().manual_seed(0))
    memory = geometry.forget_bias.exp()
    torch.testing.assert_close(memory, torch.tensor([1.0] * 6 + [32.0] * 2))
    assert geometry.query_router.bias2.argmax(-1).tolist() == [geometry.config.global_index]


@pytest.mark.parametrize("hard_from", [None, 0.5])
def test_forget_gates_need_hard_routing(hard_from):
    attention = dataclasses.replace(VARIANTS["mosar-plus"], hard_from=hard_from)
    with pytest.raises(ValueError, match=f"hard_from must be 0 .* got {hard_from}"):
        attention.geometry_class(attention, SHAPE)
