"""Modes of trained models: their definitions, their limits, and what every one must pass."""

import math

import pytest
import torch

from geometries import known_answers
from geometries.known_answers import DIM
from geometries.test_rivals import SHAPE, build
from mosar.core.positional import RESCALINGS, rescaled_frequencies
from mosar.geometries import MODES, VARIANTS, HeadShape
from mosar.geometries.prefill_modes import FlexPrefill, MInference, divergence
from mosar.geometries.rotation_modes import DynamicNTK
from mosar.geometries.window_modes import Streaming

WIDE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, max_length=64, hidden_size=5)
LENGTH = 150
SERVED = [
    (name, mode) for name, attention in VARIANTS.items() for mode in attention.build(WIDE).modes
]
ONE_EACH = list({mode: (name, mode) for name, mode in reversed(SERVED)}.values())


def tensors(length=LENGTH, shape=WIDE, seed=0):
    """q, k, v and hidden, so that scores differ by some units."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(count, shape.head_dim) for count in (shape.num_heads, *2 * (shape.num_kv_heads,))]
    sizes.append((shape.hidden_size,))
    return [
        torch.randn(2, length, *size, generator=generator, dtype=torch.float64) for size in sizes
    ]


def attend(geometry, q, k, v, hidden, **options):
    options = {"scale": 0.5, "softcap": 20.0} | options
    return geometry(q, k, v, hidden=hidden, **options)[0]


def entered(name, mode, shape=WIDE, length=LENGTH):
    geometry = build(VARIANTS[name].geometry, shape=shape)
    geometry.enter_mode(mode, length)
    return geometry


def test_which_modes_there_are():
    modes = {name: attention.build(WIDE).modes for name, attention in VARIANTS.items()}
    assert modes["rope"] == modes["p-rope"]
    assert {mode for found in modes.values() for mode in found} == set(MODES)
    assert set(modes["rope"]) == set(MODES) - {"lex", "acp"}
    assert modes["fox"] == ("acp",) and "lex" in modes["xpos"]
    assert modes["mosar"] == modes["gemma3"] == ()
    assert [name for name, mode in MODES.items() if not mode.prefix_invariant] == [*RESCALINGS]


@pytest.mark.parametrize(("name", "mode"), SERVED)
@torch.no_grad()
def test_later_tokens_change_nothing_where_a_mode_says_so(name, mode):
    inputs, wanted = tensors(), MODES[mode].prefix_invariant
    whole = attend(entered(name, mode), *inputs)
    assert whole.isfinite().all()
    for length in (1, 70, 131):
        prefix = attend(entered(name, mode, length=length), *(x[:, :length] for x in inputs))
        same = bool((prefix - whole[:, :length]).abs().max() < 1e-12)
        assert same == (wanted or length == 1), length


@pytest.mark.parametrize(("name", "mode"), SERVED)
@torch.no_grad()
def test_documents_are_read_one_by_one(name, mode):
    inputs, sizes = tensors(), (71, 1, 78)
    ids = torch.arange(3).repeat_interleave(torch.tensor(sizes)).expand(2, -1)
    geometry = entered(name, mode)
    packed = attend(geometry, *inputs, segment_ids=ids)
    pairs, parts = geometry.acting.count_pairs((2, LENGTH)), []
    counts = []
    for document in zip(*(x.split(sizes, dim=1) for x in inputs), strict=True):
        parts.append(attend(geometry, *document))
        counts.append(geometry.acting.count_pairs((2, document[0].shape[1])))
    if mode == "acp":
        # It bounds scores by all keys of a row, other documents too: what it drops is as little.
        assert (packed - torch.cat(parts, dim=1)).abs().max() < 1e-3
        return
    assert (packed - torch.cat(parts, dim=1)).abs().max() < 1e-12
    if pairs is not None:
        assert pairs == pytest.approx([sum(part) for part in zip(*counts, strict=True)])


@pytest.mark.parametrize(("name", "mode"), ONE_EACH)
@torch.no_grad()
def test_the_pairs_that_are_counted_are_those_that_are_read(name, mode):
    """A value so large that no weight hides it changes the queries that read it, and no others."""
    shape, length = WIDE._replace(max_length=32), 72
    q, k, v, hidden = tensors(length, shape)
    geometry = entered(name, mode, shape, length)
    plain, read = attend(geometry, q, k, v, hidden), 0
    counted = geometry.acting.count_pairs((2, length))
    for group in torch.arange(length).split(8):
        # Each key of the group in a channel of its own.
        other = v.clone()
        other[:, group, :, torch.arange(8)] += 1e12
        changed = attend(geometry, q, k, other, hidden) != plain
        read += int(changed.sum()) / shape.num_heads
    causal = length * (length + 1)
    pairs, there = counted or (causal, causal)
    assert there == causal and read == pairs


@torch.no_grad()
def test_text_modes_refuse_what_they_do_not_read():
    geometry, inputs = entered("rope", "streaming"), tensors(9)
    valid = torch.ones(2, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match="the mode streaming reads whole texts"):
        attend(geometry, *inputs, key_valid=valid)
    with pytest.raises(ValueError, match="got 1 queries and 9 keys"):
        attend(geometry, inputs[0][:, -1:], *inputs[1:])


@pytest.mark.parametrize("mode", RESCALINGS)
def test_a_mode_of_rope_lasts_until_it_is_left(mode):
    geometry, at = VARIANTS["rope"].build(SHAPE), torch.arange(known_answers.LENGTH)[None]
    q, k, _ = known_answers.heads()
    plain = geometry.transform(q, k, at, at)
    geometry.enter_mode(mode, SHAPE.max_length)  # no longer than in training
    assert torch.equal(geometry.acting.transform(q, k, at, at)[0], plain[0])
    geometry.enter_mode(mode, 4 * SHAPE.max_length)
    turned = geometry.acting.transform(q, k, at, at)
    assert not torch.allclose(turned[0], plain[0])
    frequencies, factor = rescaled_frequencies(mode, DIM, 10000.0, SHAPE.max_length, 4.0)
    half = torch.complex(*q.chunk(2, dim=-1))
    angles = at[..., None, None] * frequencies
    expected = factor * half * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned[0], torch.cat([expected.real, expected.imag], dim=-1))
    geometry.enter_mode(None)
    assert torch.equal(geometry.acting.transform(q, k, at, at)[1], plain[1])


@torch.no_grad()
def test_dynamic_ntk_is_decoding_with_unrotated_keys(monkeypatch):
    """Query by query: NTK for the length up to it, of all keys again."""
    monkeypatch.setattr(DynamicNTK, "steps", 8)
    shape = WIDE._replace(max_length=8)
    q, k, v, hidden = tensors(20, shape)
    found = attend(entered("p-rope", "dynamic-ntk", shape), q, k, v, hidden)
    for i in range(20):
        upto = [x[:, : i + 1] for x in (q, k, v, hidden)]
        expected = attend(entered("p-rope", "ntk", shape, i + 1), *upto)[:, -1]
        torch.testing.assert_close(found[:, i], expected)


@pytest.mark.parametrize("name", ["rope", "hope-high", "xpos", "nope", "alibi", "t5"])
@torch.no_grad()
def test_streaming_is_a_rolling_cache_with_its_own_positions(name):
    """4 sinks and 12 tokens; keys in the cache are not rotated yet, and stand where they lie."""
    q, k, v, _ = tensors(60)
    found = attend(entered(name, "streaming"), q, k, v, None)
    plain, cache = entered(name, None), []
    for i in range(60):
        cache = [*cache[:4], *cache[4:][-11:], i] if len(cache) == 16 else [*cache, i]
        expected = attend(plain, q[:, i : i + 1], k[:, cache], v[:, cache], None)
        torch.testing.assert_close(found[:, i : i + 1], expected)
    dense = attend(plain, q, k, v, None)
    torch.testing.assert_close(found[:, :16], dense[:, :16])


@torch.no_grad()
def test_lex_reads_its_block_and_the_one_before():
    inputs = tensors()
    found, plain = attend(entered("xpos", "lex"), *inputs), entered("xpos", None)
    # Everything up to the training length.
    torch.testing.assert_close(found[:, :64], attend(plain, *inputs)[:, :64])
    for i in (64, 95, 96, 149):
        near = [x[:, max(0, i // 32 * 32 - 32) : i + 1] for x in inputs]
        torch.testing.assert_close(found[:, i], attend(plain, *near)[:, -1])


def test_pruning_keeps_what_matters_and_counts_it():
    """With gates of about a half, and queries that differ, all but e^-10 of the weight is kept."""
    shape = HeadShape(4, 2, 8, 64, hidden_size=3)
    geometry, length = build("fox", shape=shape), 120
    generator = torch.Generator().manual_seed(0)
    q, k, v, hidden = (
        torch.randn(2, length, *size, generator=generator, dtype=torch.float64)
        for size in ((4, 8), (2, 8), (2, 8), (3,))
    )
    dense, _ = geometry(q, k, v, scale=0.1, hidden=hidden)
    geometry.enter_mode("acp", length)
    pruned, _ = geometry(q, k, v, scale=0.1, hidden=hidden)
    kept, causal = geometry.acting.count_pairs((2, length))
    assert (pruned - dense).abs().max() <= 2 * v.abs().max() * math.exp(-10)
    assert 0.2 < kept / causal < 0.6 and causal == 2 * length * (length + 1) // 2
    last, _ = geometry(q[:, :50], k[:, :50], v[:, :50], scale=0.1, hidden=hidden[:, :50])
    torch.testing.assert_close(last, pruned[:, :50])


@pytest.mark.parametrize("mode", ["minference", "flexprefill"])
@torch.no_grad()
def test_a_full_budget_is_dense_attention(mode, monkeypatch):
    for budget in ("columns", "diagonals"):
        monkeypatch.setattr(MInference, budget, 100.0)
    monkeypatch.setattr(FlexPrefill, "share", 1.0)
    inputs = tensors()
    for threshold in (0.0, 2.0):
        monkeypatch.setattr(FlexPrefill, "threshold", threshold)
        geometry = entered("rope", mode)
        found = attend(geometry, *inputs)
        torch.testing.assert_close(found, attend(entered("rope", None), *inputs))
        pairs, causal = geometry.acting.count_pairs((2, LENGTH))
        assert pairs == causal


def chosen(mode, weights, match=1.0):
    """What 8 queries after 32 keys read, by hand-made weights [e, 32]; q and k fit `match`."""
    ones = torch.ones(1, 1, 40, 8, dtype=torch.float64)
    distances = torch.arange(32, 40)[:, None] - torch.arange(40)
    found = mode.chosen(weights[None, None], match * ones, ones, distances, 1.0)
    return found[0, 0] & (distances >= 0), distances


def column_and_diagonal():
    """The last two of 32 queries read key 5, and the key 9 before them."""
    weights = torch.zeros(2, 32, dtype=torch.float64)
    weights[:, 5] = 0.4
    weights[[0, 1], [21, 22]] = 0.6
    return weights


def test_minference_finds_a_column_and_a_diagonal(monkeypatch):
    for name, value in {"columns": 1 / 64, "first_columns": 0, "diagonals": 2 / 64}.items():
        monkeypatch.setattr(MInference, name, value)
    monkeypatch.setattr(MInference, "last_diagonals", 1 / 64)
    mode = MInference(build("rope", shape=WIDE), 40)
    found, distances = chosen(mode, column_and_diagonal())
    column = torch.arange(40).expand(8, -1) == 5
    assert torch.equal(found, column | (distances == 9) | (distances == 0))


def test_minference_takes_the_pattern_that_holds_most(monkeypatch):
    monkeypatch.setattr(MInference, "columns", 1 / 64)
    monkeypatch.setattr(MInference, "first_columns", 1)
    monkeypatch.setattr(MInference, "diagonals", 1 / 64)
    mode = MInference(build("rope", shape=WIDE), 40)
    # Evenly over 15 keys: neither a line nor two of the blocks of 2, but sinks and a window.
    monkeypatch.setattr(MInference, "blocks", 2)
    near = torch.zeros(2, 32, dtype=torch.float64)
    near[:, 17:] = 1 / 15
    found, distances = chosen(mode, near)
    first = torch.arange(40).expand(8, -1) == 0
    assert torch.equal(found, (first | (distances < 15)) & (distances >= 0))
    # All blocks hold everything.
    monkeypatch.setattr(MInference, "blocks", 16)
    found, distances = chosen(mode, torch.full((2, 32), 1 / 32, dtype=torch.float64))
    assert torch.equal(found, distances >= 0)


def test_flexprefill_finds_lines_or_blocks(monkeypatch):
    monkeypatch.setattr(FlexPrefill, "least", 1 / 64)
    mode = FlexPrefill(build("rope", shape=WIDE), 40)
    # Equal pooled keys predict equal weights: these are not, so it reads lines.
    weights = torch.zeros(2, 32, dtype=torch.float64)
    weights[:, 5] = 1.0
    found, distances = chosen(mode, weights)
    place = torch.arange(40).expand(8, -1)
    lines = (place == 0) | (place == 5) | (distances == 0)
    # The column is also two diagonals of the estimate, 25 and 26.
    assert torch.equal(found, lines | (distances == 25) | (distances == 26))
    even = torch.full((2, 32), 1 / 32, dtype=torch.float64)
    blocks, _ = chosen(mode, even)
    # 15 of 16 equal blocks hold 0.9; and the chunk itself.
    assert (blocks.sum(dim=1) == 15 * 2 + torch.arange(1, 9)).all()
    monkeypatch.setattr(FlexPrefill, "threshold", 0.0)
    found, _ = chosen(mode, even)
    assert not torch.equal(found, blocks)


def test_divergence_is_zero_for_equals_and_ln_2_for_strangers():
    p, q = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.25, 0.75])
    assert divergence(p, p) == 0
    assert float(divergence(p, q)) == pytest.approx(math.log(2))


def test_streaming_is_named_in_shares_of_the_training_length():
    assert Streaming(build("rope", shape=WIDE._replace(max_length=512)), 2048).window == 124
