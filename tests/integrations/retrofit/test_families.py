"""What every family does besides test_attach.py and test_cache.py: beams, bfloat16, reloading."""

import subprocess
import sys

import pytest
import torch

import mosar
from integrations.retrofit.models import FAMILIES, GEOMETRY, routed_model, tiny_model, tokens
from mosar.integrations.retrofit.attach import FAMILIES as TESTED


def test_the_families_that_are_named_are_those_of_the_tests():
    assert set(TESTED) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_are_those_of_the_dense_model(family):
    model = tiny_model(family)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :5] = 0
    batch = {"input_ids": tokens(2, 24), "attention_mask": mask}
    with torch.no_grad():
        before = model.generate(**batch, **options)
        mosar.retrofit(model, GEOMETRY).set_routing("sparse")
        assert torch.equal(model.generate(**batch, **options), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_writes_with_the_cache_what_it_writes_without(family):
    model, attached = routed_model(family)
    model.to(torch.bfloat16)
    ids = tokens(1, 40)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[:, -1]
        first = model(input_ids=ids[:, :30], use_cache=True)
        parts = model(input_ids=ids[:, 30:], past_key_values=first.past_key_values).logits[:, -1]
    assert whole.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in attached.parameters())
    # Labels of near ties and sums in another order: a few roundings of logits of this size.
    assert (whole - parts).float().abs().max() < 0.06 * whole.float().abs().max()


RELOAD = """
import sys
from pathlib import Path
import torch
from mosar.integrations.retrofit import load_adapter
from mosar.integrations.retrofit.base_model import load_base
folder = Path(sys.argv[1])
logits = {}
for path in sorted(folder.glob("*/adapter")):
    model, _ = load_base(str(path.parent / "base"), tokenizer=False)
    load_adapter(model, path)
    with torch.no_grad():
        out = model(input_ids=torch.load(folder / "ids.pt"), use_cache=False)
    logits[path.parent.name] = out.logits
torch.save(logits, folder / "logits.pt")
"""


def test_adapters_of_all_families_are_the_same_in_a_new_process(tmp_path):
    ids = tokens(2, 40)
    torch.save(ids, tmp_path / "ids.pt")
    expected = {}
    for family in FAMILIES:
        model, attached = routed_model(family)
        folder = tmp_path / family
        model.save_pretrained(folder / "base")
        attached.save(folder / "adapter")
        with torch.no_grad():
            expected[family] = model(input_ids=ids, use_cache=False).logits
    subprocess.run([sys.executable, "-c", RELOAD, tmp_path], check=True, capture_output=True)
    found = torch.load(tmp_path / "logits.pt")
    for family in FAMILIES:
        assert torch.equal(found[family], expected[family]), family
