"""The model of transformers is the decoder: the same numbers, saved and loaded to the bit."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from model.test_decoder import some_tokens
from mosar.errors import ModelError
from mosar.geometries import VARIANTS, AttentionConfig
from mosar.integrations.hf import MosarForCausalLM, MosarModel
from mosar.integrations.hf.folders import load_model

from .runs import assert_same_tensors, small_model

PADDING = torch.arange(45) >= torch.tensor([0, 11])[:, None]


@torch.no_grad()
def logits(model, *args, **options):
    return model(*args, use_cache=False, **options).logits


@pytest.mark.parametrize(
    ("variant", "routing"),
    [
        *((name, "soft") for name in VARIANTS),
        *(("mosar", "top1"), ("mosar", "sparse"), ("fixed-m", "sparse")),
    ],
)
@torch.no_grad()
def test_equals_the_decoder(variant, routing):
    model, tokens = small_model(variant, routing=routing), some_tokens()
    decoder = model.to_decoder()
    assert all(
        parameter.data_ptr() == model.decoder.get_parameter(name).data_ptr()
        for name, parameter in decoder.named_parameters()
    )
    for valid in (None, PADDING):
        whole = decoder.logits(decoder(tokens, valid=valid, routing=routing).hidden)
        assert torch.equal(logits(model, tokens, attention_mask=valid), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["rope", "mosar"])
def test_save_and_load_keep_every_bit(variant, dtype, tmp_path):
    whole = small_model(variant)
    whole.save_pretrained(tmp_path / "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=dtype)
    assert isinstance(model, MosarForCausalLM) and not model.training
    for name, parameter in model.named_parameters():
        router = "_router." in name
        assert parameter.dtype == (torch.float32 if router else dtype), name
        if router or dtype == torch.float32:
            assert torch.equal(parameter, whole.get_parameter(name))
    model.save_pretrained(tmp_path / "again")
    assert_same_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), model)
    out = logits(model, some_tokens())
    assert out.dtype == dtype and out.isfinite().all()


def test_the_embedding_is_saved_once(tmp_path):
    """Names in the file are those of the decoder after a prefix, as they always were."""
    model = small_model()
    model.save_pretrained(tmp_path)
    names = [f"decoder.{name}" for name in model.to_decoder().state_dict()]
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(names)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    assert shapes.count((61, 32)) == 1


def test_routers_that_a_checkpoint_lacks_are_initialised(tmp_path):
    """As the decoder makes them, whatever the memory held; the others are loaded."""
    whole = small_model()
    whole.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lacking = [name for name in weights if "_router." in name]
    kept = {name: weights[name] for name in weights if name not in lacking[::2]}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    part = MosarForCausalLM.from_pretrained(tmp_path)
    with torch.device("meta"):
        bare = MosarForCausalLM(whole.config)
    bare.to_empty(device="cpu")
    for parameter in bare.parameters():
        parameter.data.fill_(torch.nan)
    bare.init_weights()
    stds = {"weight1": 0.02, "weight2": 1e-3, "bias1": 0.0, "bias2": 0.0}
    for name, parameter in bare.named_parameters():
        std = 0.0 if "norm" in name else stds.get(name.rpartition(".")[2], 0.2)
        assert parameter.std().item() == pytest.approx(std, rel=0.3), name
        loaded = part.get_parameter(name)
        if name in kept:
            assert torch.equal(loaded, weights[name]), name
        else:
            assert loaded.std().item() == pytest.approx(std, rel=0.3), name


@pytest.mark.parametrize("variant", ["rope", "mosar"])
@torch.no_grad()
def test_offloaded_parameters_give_the_same_logits(variant, tmp_path):
    """Also the embedding, which is read twice: for the tokens and as the output head."""
    accelerate = pytest.importorskip("accelerate")
    model, tokens = small_model(variant), some_tokens()
    whole = logits(model, tokens)
    model.save_pretrained(tmp_path)
    parts = ["decoder.layers.0", "decoder.layers.1", "decoder.norm"]
    for place in ("disk", "cpu"):
        device_map = {"decoder.embedding": "disk", "lm_head": "disk", **dict.fromkeys(parts, place)}
        loaded = MosarForCausalLM.from_pretrained(
            tmp_path, device_map=device_map, offload_folder=tmp_path / "offload"
        )
        assert loaded.get_parameter("decoder.embedding.weight").is_meta
        assert torch.equal(logits(loaded, tokens), whole)
    assert torch.equal(logits(accelerate.cpu_offload(model, "cpu"), tokens), whole)
    decoder = load_model(tmp_path).to_decoder()
    accelerate.cpu_offload(decoder, "cpu")
    assert decoder.embedding.weight.is_meta
    assert torch.equal(decoder.logits(decoder(tokens).hidden), whole)


@torch.no_grad()
def test_the_base_model_and_a_classifier(tmp_path):
    model, tokens = small_model("mosar", pad_token_id=0), some_tokens().clamp_min(1)
    tokens[1, :9] = 0
    mask = tokens != 0
    model.save_pretrained(tmp_path / "whole")
    model.decoder.save_pretrained(tmp_path / "base")
    for folder in ("whole", "base"):
        base = AutoModel.from_pretrained(tmp_path / folder)
        assert isinstance(base, MosarModel)
        hidden = base(tokens, attention_mask=mask).last_hidden_state
        assert torch.equal(model.lm_head(hidden / 30).tanh() * 30, model(tokens, mask).logits)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert_same_tensors(again, model)
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole", num_labels=3)
    judge.set_routing("sparse")
    assert judge.decoder.routing == "sparse"
    labels = torch.tensor([0, 2])
    out = judge(tokens, attention_mask=mask, labels=labels)
    base.set_routing("sparse")
    last = base(tokens, attention_mask=mask).last_hidden_state[:, -1]
    torch.testing.assert_close(out.logits, judge.score(last))
    with torch.enable_grad():
        judge(tokens, attention_mask=mask, labels=labels).loss.backward()
    assert judge.decoder.embedding.weight.grad.abs().sum() > 0


def test_a_head_of_its_own(tmp_path):
    """Models may be untied, but are then no `Decoder`."""
    config = small_model().config
    config.tie_word_embeddings = False
    MosarForCausalLM(config).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert not torch.equal(loaded.lm_head.weight, loaded.decoder.embedding.weight)
    with pytest.raises(ModelError, match="tie_word_embeddings must be True"):
        loaded.to_decoder()


def test_adapters_find_their_targets():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(small_model(), peft.LoraConfig(task_type="CAUSAL_LM"))
    trained = {n.split(".lora")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"q_proj", "v_proj"}
    tokens = some_tokens()
    model(input_ids=tokens, labels=tokens).loss.backward()


def test_routing_belongs_to_a_model_not_to_its_configuration(tmp_path):
    config = small_model().config
    one, two = MosarForCausalLM(config), MosarForCausalLM(config)
    one.set_routing("sparse")
    assert (one.routing, two.routing, config.routing) == ("sparse", "soft", "soft")
    one.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).routing == "sparse"
    with pytest.raises(ValueError, match="routing must be one of"):
        one.set_routing("hard")


@pytest.mark.parametrize("routing", ["soft", "sparse"])
def test_padding_on_the_right_changes_nothing(routing):
    model, tokens = small_model(routing=routing).double(), some_tokens()
    right = logits(model, tokens.roll(-11, 1), attention_mask=PADDING.roll(-11, 1).long())
    assert (right[1:, :34] - logits(model, tokens[1:, 11:])).abs().max() < 1e-12


@pytest.mark.parametrize("routing", ["soft", "sparse"])
def test_packed_texts_do_not_see_each_other(routing):
    """Positions that start again are packed texts, for which no cache is made unasked."""
    model, tokens = small_model(routing=routing).double(), some_tokens(batch=1)
    positions = torch.cat([torch.arange(20), torch.arange(10), torch.arange(15)])[None]
    with torch.no_grad():
        packed = model(tokens, position_ids=positions)
    assert packed.past_key_values is None
    apart = [logits(model, part) for part in tokens.split([20, 10, 15], dim=1)]
    assert (packed.logits - torch.cat(apart, dim=1)).abs().max() < 1e-12
    with pytest.raises(ValueError, match="packed texts cannot be cached"):
        model(tokens, position_ids=positions, use_cache=True)


def test_positions():
    model, tokens = small_model().double(), some_tokens()
    plain = logits(model, tokens)
    count = torch.arange(45)[None]
    assert torch.equal(logits(model, tokens, position_ids=count), plain)
    stretched = logits(model, tokens, position_ids=2 * count)
    assert (stretched - plain).abs().max() > 1e-3
    # As generate counts a padded row.
    padded = (PADDING.cumsum(1) - 1).masked_fill(~PADDING, 0)
    told = logits(model, tokens, attention_mask=PADDING, position_ids=padded)
    counted = logits(model, tokens, attention_mask=PADDING)
    assert torch.equal(told[PADDING], counted[PADDING])


@torch.no_grad()
def test_hidden_states_tuples_and_chosen_logits():
    model, tokens = small_model(), some_tokens()
    out = model(tokens, output_hidden_states=True, use_cache=False)
    assert len(out.hidden_states) == 3
    assert torch.equal(model.to_decoder().logits(out.hidden_states[-1]), out.logits)
    model.config.output_hidden_states = True
    assert len(model(tokens).hidden_states) == 3
    assert torch.equal(model(tokens, use_cache=False, return_dict=False)[0], out.logits)
    last = model(tokens, logits_to_keep=3, use_cache=False).logits
    assert torch.equal(last, out.logits[:, -3:])


def test_loss_shifts_labels_and_skips_some():
    model, tokens = small_model().train(), some_tokens()
    labels = tokens.clone()
    labels[0, :20] = -100
    out = model(tokens, labels=labels)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert out.past_key_values is None
    parts = model(tokens, labels=labels, num_items_in_batch=1000).loss
    assert parts.item() == pytest.approx(expected.item() * 69 / 1000, rel=1e-5)


def test_the_routing_cost_enters_the_training_loss():
    attention = AttentionConfig(geometry="mosar", cost_weight=0.5, cost_warmup=10)
    model, tokens = small_model(attention), some_tokens()
    asked = model.eval()(tokens, labels=tokens)
    learnt = model.train()(tokens, labels=tokens)
    cost = learnt.routing_cost.item()
    assert 0.05 < cost < 1 and not learnt.routing_cost.requires_grad
    # Evaluations are of the language model alone.
    assert (learnt.loss - asked.loss).item() == pytest.approx(0.5 * cost, rel=1e-5)
    model.cost_step = 3
    assert (model(tokens, labels=tokens).loss - asked.loss).item() == pytest.approx(
        0.15 * cost, rel=1e-4
    )
    # Passes that together make an update: their parts of the cost make the whole.
    model.cost_step = None
    halves = [model(t, labels=t, num_items_in_batch=88) for t in tokens.split(1)]
    assert sum(h.loss.item() for h in halves) == pytest.approx(learnt.loss.item(), rel=1e-5)
    # It reaches the routers, and padding does not count.
    padded = model(
        F.pad(tokens, (7, 0)),
        attention_mask=F.pad(torch.ones_like(tokens), (7, 0)),
        labels=F.pad(tokens, (7, 0), value=-100),
    )
    assert padded.routing_cost.item() == pytest.approx(cost, rel=1e-5)


def test_the_discarded_mass_is_refused_in_training():
    model, tokens = small_model(AttentionConfig(geometry="mosar", mass_weight=0.5)), some_tokens()
    assert model.eval()(tokens, labels=tokens).loss > 0
    with pytest.raises(ValueError, match=r"mass_weight'\] to 0 in the configuration, got 0.5"):
        model.train()(tokens, labels=tokens)


def test_the_cost_reaches_routers_under_sparse_routing():
    attention = AttentionConfig(geometry="mosar", cost_weight=0.5)
    model, tokens = small_model(attention, routing="sparse").train(), some_tokens()
    model(tokens, labels=tokens).loss.backward()
    routers = {n: p for n, p in model.named_parameters() if "_router.bias2" in n}
    assert len(routers) == 4
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in routers.values())


@pytest.mark.parametrize(("every", "reentrant"), [(1, False), (2, False), (1, True)])
def test_gradient_checkpointing_changes_no_gradient(every, reentrant):
    attention = AttentionConfig(geometry="mosar", cost_weight=0.5)
    tokens = some_tokens()
    gradients = []
    for checkpoint in (False, True):
        model = small_model(attention).train()
        if checkpoint:
            options = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(options, every_n_layers=every)
            assert model.is_gradient_checkpointing
        model(tokens, labels=tokens).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][n], gradients[1][n]) for n in gradients[0])


def test_resized_vocabulary(tmp_path):
    model, tokens = small_model(), some_tokens()
    before = logits(model, tokens)
    model.resize_token_embeddings(70, mean_resizing=False)
    after = logits(model, tokens)
    assert after.shape[-1] == 70 and torch.equal(after[..., :61], before)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load_model(tmp_path), tokens), after)


def test_wrong_calls_are_named():
    model, tokens = small_model(), some_tokens()
    for options, rule in (
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": tokens, "inputs_embeds": torch.zeros(2, 45, 32)}, "either input_ids or"),
        ({"input_ids": tokens[0]}, r"input_ids must be \[B, T\] with T >= 1, got \[45\]"),
        ({"inputs_embeds": torch.zeros(2, 45, 31)}, r"must be \[B, T, 32\], got \[2, 45, 31\]"),
        ({"input_ids": tokens, "output_attentions": True}, "output_attentions must be False"),
        (
            {"input_ids": tokens, "attention_mask": torch.ones(2, 1, 45, 45)},
            r"attention_mask must be \[2, 45\]",
        ),
        ({"input_ids": tokens, "position_ids": tokens[:, 1:]}, "position_ids must be"),
        (
            {"input_ids": tokens, "position_ids": torch.arange(45).flip(0)[None]},
            "position_ids must not decrease",
        ),
        ({"input_ids": tokens, "past_key_values": []}, "must be a MosarCache"),
        ({"input_ids": tokens[:, :0]}, "with T >= 1"),
        ({"input_ids": torch.tensor([[3, 61]])}, r"0\.\.60, got 61"),
        ({"input_ids": torch.tensor([[-1, 3]])}, r"0\.\.60, got -1"),
        ({"input_ids": tokens, "labels": tokens[:, 1:]}, r"labels must be \[2, 45\]"),
    ):
        with pytest.raises(ValueError, match=rule):
            model(**options)
    with pytest.raises(ValueError, match=r"options of a cache are crop_margin.*got 'foo'"):
        model.new_cache(foo=1)


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(ModelError, match="there is no folder"):
        load_model(tmp_path / "none")
    with pytest.raises(ModelError, match="is not an exported model"):
        load_model(tmp_path)
    small_model().save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, values = weights.read_bytes(), json.loads(config.read_text())
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot load"):
        load_model(tmp_path)
    weights.write_bytes(whole)
    for change, rule in (
        ({"num_hidden_layers": 3}, "not those of its config.json"),
        ({"attention": {"geometry": "rope"}}, "not those of its config.json"),
        ({"routing": "hard"}, "routing must be one of"),
    ):
        config.write_text(json.dumps(values | change))
        with pytest.raises(ModelError, match=rule):
            load_model(tmp_path)


@pytest.mark.parametrize(("routing", "given"), [("soft", "positions"), ("sparse", "mask")])
def test_training_compiles_in_one_piece(routing, given):
    """With labels, their cost, and what a collator adds."""
    attention = AttentionConfig(geometry="mosar", cost_weight=0.5)
    model = small_model(attention, routing=routing, num_layers=1).train()
    tokens = some_tokens()
    packed = torch.cat([torch.arange(20), torch.arange(25)])[None]
    options = {
        "mask": {"attention_mask": PADDING.long()},
        "positions": {"position_ids": packed},
    }[given]
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses, gradients = [], []
    for forward in (model, compiled):
        model.zero_grad()
        loss = forward(input_ids=tokens, labels=tokens, **options).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append(model.decoder.embedding.weight.grad)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_export_of_any_length():
    model, inputs = small_model(routing="sparse", num_layers=1), {"input_ids": some_tokens()}
    dynamic = {"input_ids": {1: torch.export.Dim("length", min=2, max=4096)}}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=dynamic).module()
    longer = some_tokens(length=400)
    found = exported(input_ids=longer)
    assert found.past_key_values is None
    torch.testing.assert_close(found.logits, logits(model, longer), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="use_cache must be False"):
        torch.export.export(model, (), inputs | {"use_cache": True})
