"""Training with hard routing: what is trained is what is executed, and it resumes bit for bit."""

import shutil
from dataclasses import replace

import pytest
import torch

from mosar.attention import ROUTINGS
from mosar.core.bias import MixtureBias
from mosar.core.hard_domain import build_hard_domain
from mosar.core.layout import resolve_layout
from mosar.core.losses import expected_density, expected_discarded_mass, normalized_reach_cost
from mosar.core.reference_attention import attend_routed
from mosar.core.regimes import RegimeKernel, support_reach
from mosar.evaluation.loaded_run import LoadedRun
from mosar.geometries import AttentionConfig
from mosar.model.decoder import Decoder
from mosar.training.config import RunConfig, resolve_config
from mosar.training.loop import train
from mosar.training.objective import Objective
from mosar.training.run_folder import read_metrics

HARD = (
    "attention.hard_from=0.5",
    "attention.router_queries=32",
    "attention.cost_of=pairs",
    "attention.cost_weight=0.1",
    'attention.start_regimes=["S"]',
    "attention.position_range=3",
    "train.steps=8",
    "train.eval_every=4",
    "train.checkpoint_every=4",
    "train.keep_every=4",
)


def hard_config(*changes: str) -> RunConfig:
    return resolve_config(
        variant="mosar",
        preset="smoke",
        data="unused",
        changes=["data.task=recall", "model.max_length=64", *HARD, *changes],
    )


@pytest.fixture(scope="module")
def hard_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("hard") / "run"
    train(hard_config(), out, progress=False)
    return out


def test_soft_means_what_was_trained(hard_run):
    """Before the switch the mixture, after it the sparse pass itself."""
    tokens = torch.randint(0, 20, (2, 48), generator=torch.Generator().manual_seed(0))
    for step, is_hard in ((4, True), (8, True), (0, False)):
        loaded = LoadedRun.open(hard_run, step or None)
        if not step:
            loaded.decoder.begin_step(3, 8)
        *others, sparse = (loaded.decoder(tokens, routing=r).hidden for r in ROUTINGS)
        assert all(torch.equal(hidden, sparse) is is_hard for hidden in others)


def test_the_metrics_say_reach_whatever_has_the_price(hard_run):
    geometry = LoadedRun.open(hard_run).geometry
    for line in read_metrics(hard_run):
        shares = [torch.tensor(line["regime_shares"][role]) for role in ("query", "key")]
        expected = normalized_reach_cost(*shares, geometry.config)
        assert line["expected_reach"] == pytest.approx(float(expected), rel=1e-5)


def test_routers_learn_while_hard(hard_run):
    before, after = (LoadedRun.open(hard_run, step).decoder for step in (4, 8))
    for name, parameter in after.named_parameters():
        if "router" in name and "weight" in name:
            assert not torch.equal(parameter, before.get_parameter(name)), name


def test_it_resumes_bit_for_bit(hard_run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(hard_run, out)
    shutil.rmtree(out / "checkpoints" / "step-00000008")
    assert train(hard_config(), out, progress=False).resumed_from == 4
    one, two = (LoadedRun.open(run, 8).checksum for run in (hard_run, out))
    assert one == two


@pytest.mark.parametrize(("groups", "sinks"), [(1, 0), (2, 0), (2, 3)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_expected_pairs_of_one_hot_routing_are_the_density(groups, sinks, packed, window):
    settings = AttentionConfig(geometry="mosar", routing_groups=groups, num_sinks=sinks)
    config = settings.mosar_config(64)
    generator = torch.Generator().manual_seed(2)
    shape = (3, 90) if groups == 1 else (3, groups, 90)
    labels = [torch.randint(0, 3, shape, generator=generator) for _ in range(2)]
    pi = [torch.nn.functional.one_hot(x, 3).double() for x in labels]
    segment_ids = (torch.arange(90) // torch.tensor([[90], [30], [41]])) if packed else None
    density = build_hard_domain(*labels, config, segment_ids=segment_ids, window=window).density
    found = expected_density(*pi, config, segment_ids, window=window)
    assert float(found) == pytest.approx(density, rel=1e-12)
    assert torch.autograd.gradcheck(
        lambda q, k: expected_density(q, k, config, segment_ids, window=window),
        [x.requires_grad_() for x in pi],
        fast_mode=True,
    )


def test_padding_has_no_expected_pairs():
    config = AttentionConfig(geometry="mosar").mosar_config(64)
    pi_q, pi_k = torch.rand(2, 1, 70, 3, dtype=torch.float64).softmax(dim=-1)
    valid = torch.arange(90)[None] >= 20
    padded = [torch.nn.functional.pad(pi, (0, 0, 20, 0), value=0.3) for pi in (pi_q, pi_k)]
    alone = expected_density(pi_q, pi_k, config)
    torch.testing.assert_close(expected_density(*padded, config, valid=valid), alone)
    # A window that a regime reaches beyond takes its far pairs away.
    near = expected_density(pi_q, pi_k, config, window=30)
    found = expected_density(*padded, config, valid=valid, window=30)
    torch.testing.assert_close(found, near)
    assert near != alone


def test_expected_pairs_are_wide_under_autocast():
    config = AttentionConfig(geometry="mosar").mosar_config(2048)
    pi = torch.rand(2, 4, 2048, 3).softmax(dim=-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = expected_density(*pi, config)
    assert found.dtype == torch.float32 and torch.equal(found, expected_density(*pi, config))


def test_groups_start_in_their_regimes():
    config = hard_config(
        'attention.start_regimes=["S","M"]', "attention.routing_groups=2", "train.steps=1"
    )
    decoder = Decoder(config.model, config.attention)
    decoder.init_weights(0)
    tokens = torch.randint(0, 20, (2, 48), generator=torch.Generator().manual_seed(0))
    for routing in decoder(tokens).routings:
        for labels in routing.labels:
            assert torch.equal(labels[:, 0].unique(), torch.tensor([0]))
            assert torch.equal(labels[:, 1].unique(), torch.tensor([1]))


@pytest.mark.parametrize(
    ("ladder", "reaches"),
    [
        *((True, [4, 16, 64, 100]), (4, [4, 16, 64, 100]), (2, [2, 4, 8, 16, 32, 64, 100])),
        *((16, [16, 100]), (100, [50, 100]), (False, [6.25, 25, 100])),
    ],
)
def test_a_ladder_has_a_ratio_and_a_plateau(ladder, reaches):
    attention = AttentionConfig(geometry="mosar", ladder=ladder, ladder_plateau=0.5)
    regimes = attention.mosar_config(100).regimes
    assert [regime.reach for regime in regimes] == reaches
    assert regimes[-1].name == "G" and regimes[-1].plateau == 1
    if ladder:
        assert {regime.plateau for regime in regimes[:-1]} == {0.5}


@pytest.mark.parametrize("segments", [False, True])
def test_windows_begin_at_a_position_that_follows_from_the_step(segments):
    """It moves what routers read, while they train, and no distance."""
    config = hard_config("attention.hard_from=none")
    decoder, still = (
        Decoder(config.model, replace(config.attention, position_range=r)).double()
        for r in (3.0, 1.0)
    )
    for model in (decoder, still):
        model.init_weights(0)
    firsts = []
    for step in range(1, 100):
        decoder.begin_step(step, 100)
        (first,) = {geometry.first_position for geometry in decoder.geometries}
        firsts.append(first)
    assert 0 <= min(firsts) < 10 and 118 < max(firsts) <= 128 and len(set(firsts)) > 40
    tokens = torch.randint(0, 20, (2, 48), generator=torch.Generator().manual_seed(0))
    ids = (torch.arange(48) // 20).expand(2, -1) if segments else None
    moved, other = (m(tokens, segment_ids=ids).routings[0].query.logits for m in (decoder, still))
    assert not torch.allclose(moved, other, atol=1e-9)
    with torch.no_grad():
        assert torch.equal(*(m(tokens, segment_ids=ids).hidden for m in (decoder, still)))
    # Without routers that read them, rotated q and k have the same products wherever they begin.
    rope = AttentionConfig().build(config.model.head_shape)
    q, k, v = torch.randn(3, 2, 48, 4, 16, dtype=torch.float64)
    first, later = (
        rope(q, k, v, scale=0.2, segment_ids=ids, position_offset=n)[0] for n in (0, 300)
    )
    torch.testing.assert_close(first, later, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("setting", "value", "what"),
    [
        ("hard_from", 1.5, "hard_from"),
        ("router_queries", 0, "router_queries"),
        ("cost_of", "tokens", "cost_of"),
        ("start_regimes", ("X",), "regime"),
        ("start_regimes", "S", "start_regimes must be a list of names, got 'S'"),
        ("ladder", "false", "ladder must be true, false or an integer >= 2, got 'false'"),
        ("ladder", 1, "ladder must be true, false or an integer >= 2, got 1"),
        ("ladder_plateau", 1.5, "ladder_plateau"),
        ("position_range", 1e18, "position_range"),
        ("floor", -0.1, "floor must be"),
        ("floor_until", {"floor_from": 0.5, "floor_until": 0.4}, "floor_until must be"),
    ],
)
def test_wrong_settings_are_named(setting, value, what):
    with pytest.raises(ValueError, match=what):
        AttentionConfig(
            geometry="mosar", **(value if isinstance(value, dict) else {setting: value})
        )


def test_settings_of_older_runs_mean_what_they_meant():
    config = resolve_config(variant="mosar", preset="smoke", data="unused", vocab_size=99)
    values = config.to_dict()
    for section, added in {
        "attention": (
            *("cost_of", "hard_from", "router_queries", "start_regimes", "start_logit"),
            *("ladder", "ladder_plateau", "mass_weight", "position_range"),
            *("floor", "floor_from", "floor_until"),
        ),
    }.items():
        for name in added:
            del values[section][name]
    # A setting that is gone, at the value that every variant of today has.
    values["attention"]["per_head"] = False
    again = RunConfig.from_dict(values)
    assert again == config and again.fingerprint() == config.fingerprint()


def test_a_cache_of_a_hard_model_gives_the_same(hard_run):
    decoder = LoadedRun.open(hard_run).decoder
    tokens = torch.randint(0, 20, (2, 48), generator=torch.Generator().manual_seed(1))
    whole = decoder(tokens, routing="soft").hidden
    cache = decoder.new_cache("soft")
    assert {layer.routing for layer in cache} == {"sparse"}
    parts = [decoder(part, routing="soft", cache=cache).hidden for part in tokens.split(16, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_transformers_train_and_reload_it(tmp_path):
    from mosar.integrations.hf import MosarDecoderConfig, MosarForCausalLM

    config = hard_config()
    theirs = MosarDecoderConfig.from_decoder(config.model, config.attention)
    theirs.save_pretrained(tmp_path)
    theirs = MosarDecoderConfig.from_pretrained(tmp_path)
    assert theirs.attention_config == config.attention
    model = MosarForCausalLM(theirs)
    tokens = torch.randint(0, 20, (2, 48), generator=torch.Generator().manual_seed(2))
    model(input_ids=tokens, labels=tokens).loss.backward()
    routers = [p for name, p in model.named_parameters() if "router" in name and "weight2" in name]
    assert routers and all(p.grad is not None and p.grad.abs().sum() > 0 for p in routers)
    with torch.no_grad():
        logits = [model(input_ids=tokens).logits]
        model.set_routing("sparse")
        logits.append(model(input_ids=tokens).logits)
    assert torch.equal(*logits)


def test_transformers_price_packed_texts_as_texts():
    from mosar.integrations.hf import MosarDecoderConfig, MosarForCausalLM

    config = hard_config()
    theirs = MosarDecoderConfig.from_decoder(config.model, config.attention)
    model = MosarForCausalLM(theirs).decoder
    tokens = torch.randint(0, 20, (3, 16), generator=torch.Generator().manual_seed(3))
    packed, positions = tokens.reshape(1, 48), torch.arange(16).repeat(3)[None]
    alone = model(input_ids=tokens, output_routing_cost=True).routing_cost
    together = model(input_ids=packed, position_ids=positions, output_routing_cost=True)
    torch.testing.assert_close(together.routing_cost, alone)


def test_a_checkpoint_of_before_the_switch_is_exported_as_the_soft_model_it_is(hard_run):
    from mosar.integrations.hf import MosarForCausalLM

    decoder = LoadedRun.open(hard_run).decoder
    tokens = torch.randint(0, 20, (2, 48), generator=torch.Generator().manual_seed(4))
    for step in (2, 8):
        decoder.begin_step(step, 8)
        expected = decoder.logits(decoder(tokens, routing="soft").hidden)
        logits = MosarForCausalLM.from_decoder(decoder)(input_ids=tokens).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


FLOOR = (
    "attention.hard_from=null",
    "attention.barrier=3",
    "attention.floor=0",
    "attention.floor_from=0.25",
    "attention.floor_until=0.75",
)


@pytest.fixture(scope="module")
def floor_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("floor") / "run"
    train(hard_config(*FLOOR), out, progress=False)
    return out


def test_the_floor_falls_with_the_steps_and_the_slope_stays(floor_run):
    decoder = LoadedRun.open(floor_run).decoder
    geometry = decoder.geometries[0]
    floors = []
    for step in range(9):
        decoder.begin_step(step, 8)
        floors.append(geometry.config.floor)
        assert (geometry.executed("top1") == "sparse") is (floors[-1] == 0)
        assert geometry.executed("soft") == "soft"
    assert floors == [1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    inside, outside = torch.arange(64), torch.tensor([10**6])
    decoder.begin_step(0, 8)
    first = RegimeKernel(geometry.config)
    decoder.begin_step(4, 8)
    half = RegimeKernel(geometry.config)
    within = inside[:, None, None] <= support_reach(geometry.config)
    assert torch.equal(first(inside)[within], half(inside)[within])
    local = ~torch.isinf(support_reach(geometry.config))
    torch.testing.assert_close(first(outside)[0][local] / 2, half(outside)[0][local])


def test_a_run_with_a_falling_floor_resumes_bit_for_bit(floor_run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(floor_run, out)
    shutil.rmtree(out / "checkpoints" / "step-00000008")
    assert train(hard_config(*FLOOR), out, progress=False).resumed_from == 4
    assert LoadedRun.open(floor_run, 8).checksum == LoadedRun.open(out, 8).checksum


def test_without_a_floor_top1_is_sparse_and_soft_is_not(floor_run):
    tokens = torch.randint(0, 20, (2, 48), generator=torch.Generator().manual_seed(6))
    for step, same in ((4, False), (8, True)):
        decoder = LoadedRun.open(floor_run, step).decoder
        soft, top1, sparse = (decoder(tokens, routing=r).hidden for r in ROUTINGS)
        assert torch.equal(top1, sparse) is same
        assert not torch.equal(soft, sparse)


@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.parametrize("routing", ["soft", "top1"])
def test_caches_and_exports_have_the_floor_of_the_step(floor_run, step, routing):
    from mosar.integrations.hf import MosarForCausalLM

    decoder = LoadedRun.open(floor_run, step).decoder
    tokens = torch.randint(0, 20, (2, 48), generator=torch.Generator().manual_seed(7))
    whole = decoder(tokens, routing=routing).hidden
    cache = decoder.new_cache(routing)
    parts = [decoder(part, routing=routing, cache=cache).hidden for part in tokens.split(16, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
    model = MosarForCausalLM.from_decoder(decoder, routing=routing)
    logits = model(input_ids=tokens).logits
    torch.testing.assert_close(logits, decoder.logits(whole), rtol=1e-4, atol=1e-5)


def test_a_compiled_hard_decoder_trains(hard_run):
    decoder = LoadedRun.open(hard_run).decoder.requires_grad_(True)
    tokens = torch.randint(0, 20, (2, 48), generator=torch.Generator().manual_seed(5))
    for geometry in decoder.geometries:
        geometry.step = None
    plain = torch.autograd.grad(decoder(tokens).hidden.sum(), list(decoder.parameters()))
    compiled = torch.compile(decoder, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(tokens).hidden.sum(), list(decoder.parameters()))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_discarded_mass_is_the_attention_outside_of_a_drawn_support(packed, monkeypatch):
    """By its definition in float64, whatever the chunks; in a hard model it is what is dropped."""
    config = AttentionConfig(geometry="mosar", routing_groups=2, num_sinks=1).mosar_config(32)
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(2, h, 50, 8, dtype=torch.float64, generator=generator) for h in (4, 2))
    pi = torch.rand(2, 2, 2, 50, 3, dtype=torch.float64, generator=generator).softmax(dim=-1)
    segment_ids = (torch.arange(50) // 20).expand(2, -1) if packed else None
    given = {"scale": 0.4, "softcap": 5.0, "segment_ids": segment_ids}
    monkeypatch.setattr("mosar.core.losses._CHUNK", 2 * 18 * 50 * 7)

    layout = resolve_layout(2, 50, 50, segment_ids=segment_ids)
    soft = attend_routed(q, k, k, layout, MixtureBias(*pi, config), scale=0.4, softcap=5.0)
    inside = layout.distances()[..., None, None] <= support_reach(config)
    keep = torch.einsum("bgtm,btsmn,bgsn->bgts", pi[0], inside.double().expand(2, *[-1] * 4), pi[1])
    keep = keep.masked_fill(layout.sinks(1)[:, None, None], 1.0).repeat_interleave(2, dim=1)
    rows = (soft.attention * (1 - keep)).sum(dim=-1)
    assert float(expected_discarded_mass(q, k, MixtureBias(*pi, config), **given)) == pytest.approx(
        float(rows.mean()), rel=1e-12
    )
    some = torch.tensor([3, 9, 44])
    found = expected_discarded_mass(q, k, MixtureBias(*pi, config), queries=some, **given)
    assert float(found) == pytest.approx(float(rows[..., some].mean()), rel=1e-12)
    inputs = [x.requires_grad_() for x in (q, k, *pi.clone())]
    assert torch.autograd.gradcheck(
        lambda q, k, *pi: expected_discarded_mass(
            q, k, MixtureBias(*pi, config), queries=some, **given
        ),
        inputs,
        fast_mode=True,
    )


def test_the_mass_lowers_what_sparse_execution_drops():
    """With its weight the loss has the mean of the layers' masses, and the routers follow it."""
    settings = ("attention.mass_weight=3", "attention.cost_warmup=0", "attention.cost_weight=0")
    config = resolve_config(
        variant="mosar", preset="smoke", data="unused", changes=["data.task=recall", *settings]
    )
    decoder, objective = Decoder(config.model, config.attention), Objective(config)
    decoder.init_weights(0)
    tokens = torch.randint(0, 20, (2, 49), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD([p for n, p in decoder.named_parameters() if "router" in n], 3.0)
    masses = []
    for step in range(1, 6):
        terms = objective(decoder, tokens, None, step=step)
        masses.append(float((terms.loss - terms.lm_loss).detach()) / 3)
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
    assert 0 < masses[-1] < masses[0] < 1
    layers = [float(layer.discarded.detach()) for layer in decoder(tokens[:, :-1]).routings]
    terms = objective(decoder, tokens, None, step=6)
    assert float((terms.loss - terms.lm_loss).detach()) == pytest.approx(3 * sum(layers) / 2, 1e-4)
