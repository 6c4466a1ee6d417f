"""Only routers are saved, and they go back onto their own base model and no other."""

import json
import os

import pytest
import torch

import mosar
from integrations.retrofit.models import GEOMETRY, scatter_choices, tiny_model, tokens
from mosar.integrations.retrofit import RetrofitError, load_adapter, load_retrofitted
from mosar.integrations.retrofit.adapter import DESCRIPTION, WEIGHTS, read_description


@pytest.fixture
def saved(tmp_path):
    """A folder with an adapter, and the logits of its model under sparse routing."""
    model = tiny_model()
    attached = mosar.retrofit(model, GEOMETRY)
    scatter_choices(attached)
    attached.set_routing("sparse")
    with torch.no_grad():
        logits = model(input_ids=tokens(1, 40), use_cache=False).logits
    attached.save(tmp_path / "adapter", why="a test")
    return tmp_path / "adapter", logits


def test_round_trip(saved):
    folder, logits = saved
    attached = load_adapter(tiny_model(), folder)
    assert attached.routing == "sparse"
    assert attached.config == GEOMETRY
    with torch.no_grad():
        out = attached.model(input_ids=tokens(1, 40), use_cache=False).logits
    assert torch.equal(out, logits)
    assert not any(parameter.requires_grad for parameter in attached.parameters())


def test_only_routers_are_saved(saved):
    folder, _ = saved
    assert sorted(path.name for path in folder.iterdir()) == [DESCRIPTION, WEIGHTS]
    routers = sum(
        parameter.numel() for parameter in mosar.retrofit(tiny_model(), GEOMETRY).parameters()
    )
    assert (folder / WEIGHTS).stat().st_size < 4 * routers + 4096
    description = read_description(folder)
    assert description["notes"] == {"why": "a test"}
    assert description["base"]["architecture"] == "LlamaForCausalLM"


def test_the_base_model_is_found_again(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    from mosar.integrations.retrofit.base_model import BaseIdentity, load_base

    loaded, _ = load_base(str(tmp_path / "base"), tokenizer=False)
    attached = mosar.retrofit(loaded, GEOMETRY)
    attached.save(tmp_path / "adapter")
    source = read_description(tmp_path / "adapter")["base"]["source"]
    assert source == str(tmp_path / "base")
    assert BaseIdentity.of(loaded).checksum == BaseIdentity.of(model).checksum
    with pytest.raises(RetrofitError, match="cannot load"):
        load_base(str(tmp_path / "missing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RetrofitError, match=r"holds no config\.json and 0 GGUF files"):
        load_base(str(tmp_path / "empty"))


def test_bfloat16_is_the_same_base(saved):
    folder, _ = saved
    attached = load_adapter(tiny_model().to(torch.bfloat16), folder)
    assert all(parameter.dtype == torch.float32 for parameter in attached.parameters())
    with torch.no_grad():
        out = attached.model(input_ids=tokens(1, 20)).logits
    assert out.dtype == torch.bfloat16 and out.isfinite().all()


def test_other_bases_are_refused(saved):
    folder, _ = saved
    with pytest.raises(RetrofitError, match="the weights of this model are others"):
        load_adapter(tiny_model(seed=1), folder)
    changed = tiny_model()
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    with pytest.raises(RetrofitError, match="checksum"):
        load_adapter(changed, folder)
    load_adapter(changed, folder, check=False)
    with pytest.raises(RetrofitError, match=r"belongs to LlamaForCausalLM .* MistralForCausalLM"):
        load_adapter(tiny_model("mistral"), folder)
    with pytest.raises(RetrofitError, match="belongs to LlamaForCausalLM with"):
        load_adapter(tiny_model(intermediate_size=32), folder)
    with pytest.raises(RetrofitError, match="does not say where its base model is"):
        load_retrofitted(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: os.truncate(f / WEIGHTS, 1000), "truncated or altered"),
        (lambda f: (f / WEIGHTS).unlink(), "cannot read"),
        (lambda f: (f / DESCRIPTION).unlink(), "holds no adapter"),
        (lambda f: (f / DESCRIPTION).write_text("{"), "is no adapter"),
        (lambda f: (f / DESCRIPTION).write_text('{"schema": 1}'), "is no adapter"),
        (lambda f: (f / DESCRIPTION).write_text('{"schema": 7}'), "has schema 7"),
    ],
)
def test_damage_is_one_clear_line(saved, damage, message):
    folder, _ = saved
    damage(folder)
    model = tiny_model()
    with pytest.raises(RetrofitError, match=message) as error:
        load_adapter(model, folder)
    assert "\n" not in str(error.value)
    # The model is left as it was.
    mosar.retrofit(model)


def test_routers_of_another_shape_are_refused(saved):
    folder, _ = saved
    path = folder / DESCRIPTION
    values = json.loads(path.read_text())
    values["geometry"]["router_hidden"] = 8
    path.write_text(json.dumps(values))
    model = tiny_model()
    with pytest.raises(RetrofitError, match="routers of another shape"):
        load_adapter(model, folder)
    mosar.retrofit(model)
