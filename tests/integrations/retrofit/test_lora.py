"""Low-rank changes beside the routers: none at first, trained in the second phase, saved."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import mosar
from integrations.retrofit.models import (
    FAMILIES,
    GEOMETRY,
    ROUTED,
    scatter_choices,
    tiny_model,
    tokens,
)
from integrations.retrofit.test_train import LENGTH, SETTINGS, windows
from mosar.errors import ModelError
from mosar.integrations.retrofit import load_adapter
from mosar.integrations.retrofit.adapter import copy_routers, read_description
from mosar.integrations.retrofit.base_model import BaseIdentity
from mosar.integrations.retrofit.config import RetrofitSettings
from mosar.integrations.retrofit.train import train_retrofit
from mosar.integrations.retrofit.windows import Windows

RANK = 3
TUNED = RetrofitSettings.from_dict(
    SETTINGS.to_dict()
    | {"steps": 3, "tune_steps": 24, "tune_rate": 1e-2, "lora_rate": 1e-2, "checkpoint_every": 30}
)
ADAPTED = {
    "phi3": {"qkv_proj", "o_proj"},
    "gpt_neox": {"query_key_value", "dense"},
}


def adapted_model(family="llama", rank=RANK):
    """Routers that choose every regime, and changes that change."""
    model = tiny_model(family)
    attached = mosar.retrofit(model, GEOMETRY, lora=rank)
    scatter_choices(attached)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in attached:
            for part in layer.lora.values():
                part.up.normal_(std=0.3, generator=generator)
    attached.set_routing("sparse")
    return model, attached


def logits_of(model, ids=None, **options):
    with torch.no_grad():
        ids = tokens(2, 40) if ids is None else ids
        return model(input_ids=ids, use_cache=False, **options).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_changes_change_nothing_and_dense_never_has_them(family):
    plain, model = tiny_model(family), tiny_model(family)
    dense = logits_of(model)
    attached = mosar.retrofit(model, GEOMETRY, lora=RANK)
    without = mosar.retrofit(plain, GEOMETRY)
    names = ADAPTED.get(family, {"q_proj", "k_proj", "o_proj"})
    assert all(set(layer.lora) == names for layer in attached)
    assert [layer.index for layer in attached] == ROUTED[family]
    for one in (attached, without):
        scatter_choices(one)
        one.set_routing("sparse")
    expected = logits_of(plain)
    assert torch.equal(logits_of(model), expected)
    with torch.no_grad():
        for layer in attached:
            layer.lora["o_proj" if "o_proj" in names else "dense"].up += 0.1
    assert not torch.allclose(logits_of(model), expected)
    attached.set_routing("dense")
    assert torch.equal(logits_of(model), dense)
    attached.set_routing("sparse")
    assert torch.equal(logits_of(attached.detach()), dense)


def test_a_change_is_the_product_of_its_matrices():
    """Against a model whose weights have it added."""
    model, attached = adapted_model()
    changed = copy.deepcopy(tiny_model())
    with torch.no_grad():
        for layer, block in zip(attached, changed.model.layers, strict=True):
            for name, part in layer.lora.items():
                getattr(block.self_attn, name).weight += part.up @ part.down
    other = mosar.retrofit(changed, GEOMETRY)
    scatter_choices(other)
    other.set_routing("sparse")
    torch.testing.assert_close(logits_of(model), logits_of(changed), atol=2e-4, rtol=1e-3)


def test_the_cache_copies_and_bfloat16_have_the_changes_too():
    model, attached = adapted_model()
    ids = tokens(1, 40)
    whole = logits_of(model, ids)
    with torch.no_grad():
        first = model(input_ids=ids[:, :30], use_cache=True)
        rest = model(input_ids=ids[:, 30:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 30:], atol=2e-4, rtol=1e-3)
    twin = copy.deepcopy(model)
    assert torch.equal(logits_of(twin, ids), whole)
    with torch.no_grad():
        for parameter in attached.parameters():
            parameter.zero_()
    assert torch.equal(logits_of(twin, ids), whole)
    twin.to(torch.bfloat16)
    assert logits_of(twin, ids).dtype == torch.bfloat16


def divergence(attached, window):
    """KL per token of the sparse model from the dense one."""
    logits = {}
    for routing in ("dense", "sparse"):
        attached.set_routing(routing)
        logits[routing] = F.log_softmax(logits_of(attached.model, window[None]), dim=-1)
    found = F.kl_div(logits["sparse"], logits["dense"], reduction="sum", log_target=True)
    return float(found) / len(window)


def test_trained_changes_lower_the_divergence_further_than_routers_alone(tmp_path):
    """On the text they learn from: random tokens have nothing to generalise to."""
    window = tokens(1, LENGTH, seed=4)
    found, densities = {}, {}
    for rank in (0, 8):
        model = tiny_model()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter *= 0.5
        attached = mosar.retrofit(model, GEOMETRY, lora=rank)
        settings = RetrofitSettings.from_dict(TUNED.to_dict() | {"lora": rank})
        text = Windows(window.repeat(settings.total_steps, 1), window)
        before = copy.deepcopy(model.state_dict())
        run = train_retrofit(attached, text, settings, tmp_path / str(rank), progress=False)
        assert all(torch.equal(after, before[name]) for name, after in model.state_dict().items())
        found[rank], densities[rank] = divergence(attached, window[0]), run.density
    assert densities[8] == pytest.approx(densities[0], rel=0.1)
    assert found[8] < 0.85 * found[0]


RELOAD = """
import sys
import torch
from mosar.integrations.retrofit import load_adapter
from mosar.integrations.retrofit.base_model import load_base
model, _ = load_base(sys.argv[1] + "/base", tokenizer=False)
attached = load_adapter(model, sys.argv[1] + "/adapter")
with torch.no_grad():
    out = attached.model(input_ids=torch.load(sys.argv[1] + "/ids.pt"), use_cache=False)
torch.save(out.logits, sys.argv[1] + "/logits.pt")
"""


def test_a_saved_adapter_gives_the_same_bits_in_a_new_process(tmp_path):
    model, attached = adapted_model()
    ids = tokens(2, 40)
    torch.save(ids, tmp_path / "ids.pt")
    model.save_pretrained(tmp_path / "base")
    folder = attached.save(tmp_path / "adapter")
    assert read_description(folder)["lora"] == RANK
    subprocess.run([sys.executable, "-c", RELOAD, tmp_path], check=True, capture_output=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits_of(model, ids))
    # Without them nothing is written about them.
    plain = mosar.retrofit(tiny_model(), GEOMETRY).save(tmp_path / "plain")
    assert "lora" not in read_description(plain)


def test_starting_from_other_adapters(tmp_path):
    _, attached = adapted_model()
    with_changes = attached.save(tmp_path / "with")
    without = mosar.retrofit(tiny_model(), GEOMETRY).save(tmp_path / "without")
    base = BaseIdentity.of(tiny_model())
    fresh = mosar.retrofit(tiny_model(), GEOMETRY, lora=RANK)
    copy_routers(fresh, without, base)
    assert all((part.up == 0).all() for layer in fresh for part in layer.lora.values())
    copy_routers(fresh, with_changes, base)
    for name, parameter in attached.named_parameters().items():
        assert torch.equal(fresh.named_parameters()[name], parameter), name
    with pytest.raises(ModelError, match="has lora 3, and this run 0"):
        copy_routers(mosar.retrofit(tiny_model(), GEOMETRY), with_changes, base)


@pytest.mark.parametrize("rank", [-1, True, 2.0, "8"])
def test_wrong_ranks_are_refused(rank):
    with pytest.raises(ValueError, match="lora must be a rank, an integer >= 0, got"):
        mosar.retrofit(tiny_model(), GEOMETRY, lora=rank)


def test_ranks_that_cannot_be_trained_are_refused(tmp_path):
    # Keys have 2 heads of 8.
    with pytest.raises(ValueError, match=r"lora must not exceed 16, .* got 17"):
        mosar.retrofit(tiny_model(), GEOMETRY, lora=17)
    with pytest.raises(ValueError, match=r"without a second phase.* got 8; give tune_steps"):
        RetrofitSettings(lora=8)
    with pytest.raises(ValueError, match="lora must be the rank of the model's retrofit, 0, got 3"):
        settings = RetrofitSettings.from_dict(TUNED.to_dict() | {"lora": 3})
        train_retrofit(mosar.retrofit(tiny_model(), GEOMETRY), windows(), settings, tmp_path)


def test_an_altered_rank_is_refused(tmp_path):
    _, attached = adapted_model()
    folder = attached.save(tmp_path / "adapter")
    path = folder / "adapter.json"
    path.write_text(path.read_text().replace('"lora": 3', '"lora": 2'))
    with pytest.raises(ModelError, match="was altered after it was written"):
        load_adapter(tiny_model(), folder)
