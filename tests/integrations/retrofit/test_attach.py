"""Attaching routers: nothing changes at first, and what changes then is the definition."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import mosar
from integrations.retrofit.models import (
    FAMILIES,
    FAMILIES_BY_MASK,
    GEOMETRY,
    ROUTED,
    WINDOWS,
    routed_model,
    scatter_choices,
    tiny_model,
    tokens,
)
from mosar import mosar_attention, top1_routing
from mosar.errors import ModelError
from mosar.integrations.retrofit import default_config, retrofit
from mosar.integrations.retrofit.base_model import weights_dtype
from mosar.integrations.retrofit.hf_attention import ATTRIBUTE

ROUTINGS = ("soft", "top1", "sparse")
PADDING = 7


def padded(batch=2, length=40):
    ids = tokens(batch, length)
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", [*FAMILIES, *FAMILIES_BY_MASK])
def test_fresh_routers_change_nothing(family):
    """At a length beyond the windows of 16, which the default geometry leaves without routers."""
    model, batch = tiny_model(family), padded()
    valid = batch["attention_mask"].bool()
    weights = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        before = model(**batch).logits
        written = model.generate(**batch, max_new_tokens=12, do_sample=False)
        attached = mosar.retrofit(model)
        assert torch.equal(model(**batch).logits, before)
        for routing in ROUTINGS:
            attached.set_routing(routing)
            for use_cache in (False, True):
                after = model(**batch, use_cache=use_cache).logits
                # Scores are sums of 8 products of size 10: a few hundred roundings of 1.
                torch.testing.assert_close(after[valid], before[valid], atol=1e-4, rtol=1e-4)
                assert [layer.window for layer in attached.layers] == WINDOWS[family]
        assert torch.equal(model.generate(**batch, max_new_tokens=12, do_sample=False), written)
        attached.set_routing("dense")
        assert torch.equal(model(**batch).logits, before)
    after = model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in attached.parameters())


def test_fresh_routers_choose_the_global_regime_with_certainty():
    attached = mosar.retrofit(tiny_model(), GEOMETRY)
    q, k = torch.randn(1, 6, 30, 8) * 50, torch.randn(1, 2, 30, 8) * 50
    for layer in attached:
        for routed in layer.route(q, k):
            assert (routed.probabilities[..., -1] == 1).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routed_layers_compute_the_definition(family, routing):
    """What a layer of the model returns, against the float64 reference on its own q, k and v."""
    model, attached = routed_model(family, routing)
    batch = padded()
    seen, returned = {}, {}

    def look(layer, q, k, v, options):
        seen[layer.index] = (q, k, v, options)

    for layer in attached:
        # What the output projection is given is what attention returned.
        layer.project.output.register_forward_hook(
            lambda module, args, output, index=layer.index: returned.update({index: args[0]})
        )
    attached.observe(look)
    with torch.no_grad():
        model(**batch, use_cache=False)
    assert sorted(seen) == [layer.index for layer in attached] == ROUTED[family]
    for layer in attached:
        q, k, v, options = seen[layer.index]
        routed = layer.route(q, k)
        if routing == "soft":
            pi = [x.probabilities.double() for x in routed]
        else:
            pi = [top1_routing(x.logits).double() for x in routed]
            assert len(routed.key.labels.unique()) == 3
        exact = mosar_attention(
            *(x.double() for x in (q, k, v)),
            *pi,
            GEOMETRY,
            routing=routing,
            impl="reference",
            **options,
        )
        assert options["window"] == WINDOWS[family][layer.index]
        assert options["softcap"] == (5.0 if family == "gemma2" else None)
        got = returned[layer.index].view(2, 40, 6, 8).transpose(1, 2)
        torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "vaultgemma"])
def test_packed_sequences_are_those_of_the_model(family):
    """Fresh routers, in windows of 16 too."""
    model = tiny_model(family)
    attached = mosar.retrofit(model)
    places = torch.cat([torch.arange(20), torch.arange(30)])[None]
    batch = {"input_ids": tokens(2, 50), "position_ids": places, "use_cache": False}
    with torch.no_grad():
        before = model(**batch).logits
        attached.set_routing("sparse")
        torch.testing.assert_close(model(**batch).logits, before, atol=1e-4, rtol=1e-4)


# What reads the residual stream after attention has been added to it.
READS_NEXT = {
    "llama": "post_attention_layernorm",
    "gemma2": "pre_feedforward_layernorm",
    "vaultgemma": "pre_feedforward_layernorm",
    "exaone4": "mlp",
    "olmo2": "mlp",
    "glm4": "post_attention_layernorm",
    "gemma3_text": "pre_feedforward_layernorm",
    "phi3": "post_attention_layernorm",
}


@pytest.mark.parametrize("family", READS_NEXT)
def test_the_projection_is_what_the_layer_adds(family):
    model = tiny_model(family)
    attached = retrofit(model, layers=range(len(model.model.layers)))
    heads, after, residual = {}, {}, {}
    for index, block in enumerate(model.model.layers):
        attached.layers[index].project.output.register_forward_pre_hook(
            lambda module, args, index=index: heads.update({index: args[0]})
        )
        getattr(block, READS_NEXT[family]).register_forward_pre_hook(
            lambda module, args, index=index: after.update({index: args[0]})
        )
    attached.observe(lambda layer, *_: residual.update({layer.index: layer.residual}))
    with torch.no_grad():
        model(input_ids=tokens(1, 20), use_cache=False)
        for layer in attached:
            added = layer.project(heads[layer.index])
            torch.testing.assert_close(
                residual[layer.index] + added, after[layer.index], atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("family", ["gemma3_text", "exaone4"])
def test_short_windows_keep_their_layers_without_routers(family, routing):
    """What the local layers give is what they gave, whatever the global ones choose."""
    model = tiny_model(family, sliding_window=12)
    attached = mosar.retrofit(model, GEOMETRY)
    scatter_choices(attached)
    global_layers = [index for index, window in enumerate(WINDOWS[family]) if window is None]
    assert [layer.index for layer in attached] == global_layers
    assert len(attached) == len(global_layers) < len(attached.layers)
    names = {name.partition(".")[0] for name in attached.named_parameters()}
    assert names == {str(index) for index in global_layers}
    returned = []
    model.model.layers[0].self_attn.register_forward_hook(
        lambda module, args, output: returned.append(output[0])
    )
    ids = tokens(2, 40)
    with torch.no_grad():
        attached.set_routing(routing)
        routed = model(input_ids=ids, use_cache=False).logits
        attached.set_routing("dense")
        assert not torch.allclose(model(input_ids=ids, use_cache=False).logits, routed)
    # The first layer is local and reads the embeddings: the same input in both passes.
    torch.testing.assert_close(*returned, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window, routed", [(1024, [1]), (1025, [1]), (1026, [0, 1])])
def test_windows_beyond_the_longest_local_reach_get_routers(window, routed):
    """By default that reach is 1,024: Gemma 3 has windows of 512 and 1,024, Gemma 2 of 4,096."""
    model = tiny_model("gemma2", sliding_window=window)
    assert [layer.index for layer in mosar.retrofit(model)] == routed


def test_a_model_of_short_windows_alone_gets_routers_everywhere():
    model = tiny_model("gemma2", layer_types=["sliding_attention"] * 2)
    assert [layer.index for layer in mosar.retrofit(model)] == [0, 1]


@pytest.mark.parametrize("layers", [[], [2], [-1, 0]])
def test_layers_that_do_not_exist_are_refused(layers):
    with pytest.raises(ValueError, match=r"layers must be some of 0\.\.1, got \["):
        retrofit(tiny_model(), layers=layers)


def test_models_of_one_configuration_stay_apart():
    first = tiny_model()
    second = AutoModelForCausalLM.from_config(first.config)
    mosar.retrofit(first).set_routing("sparse")
    assert second.config._attn_implementation == "sdpa"
    with torch.no_grad():
        second(input_ids=tokens(1, 10))


def test_a_copy_routes_like_its_original():
    model, _ = routed_model()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(input_ids=tokens(1, 40), use_cache=False).logits
        assert torch.equal(twin(input_ids=tokens(1, 40), use_cache=False).logits, expected)
        twin.model.layers[0].self_attn.__dict__[ATTRIBUTE].query_router.weight2.zero_()
        assert torch.equal(model(input_ids=tokens(1, 40), use_cache=False).logits, expected)


def test_offloaded_models_keep_their_routers(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        before = model(input_ids=tokens(1, 40)).logits
        cpu_offload(model, execution_device=torch.device("cpu"))
        with torch.device("meta"):
            attached = mosar.retrofit(model)
        attached.set_routing("sparse")
        after = model(input_ids=tokens(1, 40)).logits
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    with pytest.raises(ModelError, match="is not in memory; load the model without offloading"):
        attached.save(tmp_path / "adapter")


def test_gradients_reach_the_routers_through_the_whole_model():
    model, attached = routed_model(routing="soft")
    ids = tokens(1, 30)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in attached.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_detach_gives_the_model_back():
    model = tiny_model()
    with torch.no_grad():
        before = model(input_ids=tokens(1, 20)).logits
    attached = mosar.retrofit(model)
    with pytest.raises(ModelError, match="already has routers"):
        mosar.retrofit(model)
    attached.set_routing("sparse")
    assert attached.detach() is model
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens(1, 20)).logits, before)
    mosar.retrofit(model)


def test_other_models_are_refused():
    with pytest.raises(ModelError, match="must be a transformers model, got Linear"):
        mosar.retrofit(torch.nn.Linear(2, 2))
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=10)
    with pytest.raises(ModelError, match=r"'gpt2': .*; tested families: llama, mistral") as e:
        mosar.retrofit(GPT2LMHeadModel(config))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("diffllama", "DiffLlamaAttention calls attention twice in one pass"),
        ("gpt_oss", "passes s_aux, which routing does not support"),
        ("moshi", "cannot retrofit a model of type 'moshi'"),
    ],
)
def test_models_of_another_attention_are_refused(family, message):
    shape = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64}
    shape |= {"intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(family, **shape, head_dim=8, num_local_experts=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match=message), torch.no_grad():
        mosar.retrofit(model).set_routing("sparse")
        model(input_ids=tokens(1, 8))


def test_layers_that_attend_by_themselves_are_refused(monkeypatch):
    """Else their routers would have no effect, without a word."""
    model = tiny_model()
    mosar.retrofit(model).set_routing("sparse")
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", AttentionInterface())
    monkeypatch.setattr(
        modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda name, own: plain
    )

    def plain(module, query, *args, **kwargs):
        return query.transpose(1, 2), None

    with pytest.raises(ModelError, match="does not call transformers' attention function"):
        model(input_ids=tokens(1, 8))


def test_masks_that_are_not_causal_are_refused():
    model = tiny_model()
    mosar.retrofit(model).set_routing("sparse")
    model.config.is_causal = False
    with pytest.raises(ModelError, match="mask that is not causal"):
        model(input_ids=tokens(1, 8))


def test_attention_probabilities_are_refused():
    model = tiny_model()
    attached = mosar.retrofit(model)
    attached.set_routing("sparse")
    with pytest.raises(ValueError, match="output_attentions must be False"):
        model(input_ids=tokens(1, 8), output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions must be False"):
        model.generate(
            tokens(1, 8), max_new_tokens=1, output_attentions=True, return_dict_in_generate=True
        )
    attached.set_routing("dense")
    model(input_ids=tokens(1, 8), output_attentions=True)


def test_wrong_groups_and_routings_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="routing_groups must divide the 2 key/value heads"):
        mosar.retrofit(model, default_config(model, routing_groups=3))
    attached = mosar.retrofit(model)
    with pytest.raises(ValueError, match=r"routing must be one of .*'dense'.*got 'hard'"):
        attached.set_routing("hard")
    attached.set_routing("sparse")
    with pytest.raises(ModelError, match=r"attention_mask must be \[batch, tokens\]"):
        model(input_ids=tokens(1, 4), attention_mask=torch.ones(1, 1, 4, 4))


@pytest.mark.parametrize("feature, has_it", [("amx_bf16", True), ("avx512_f", False)])
def test_the_automatic_dtype_is_what_the_cpu_multiplies_in(monkeypatch, feature, has_it):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True}, raising=False)
    assert weights_dtype("auto") == (torch.bfloat16 if has_it else torch.float32)
    assert weights_dtype("float32") == torch.float32
