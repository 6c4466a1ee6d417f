"""examples/retrofit_smollm2.py runs from beginning to end, here with a tiny model."""

import importlib
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from integrations.retrofit.models import tiny_model

EXAMPLE = Path(__file__).parents[3] / "examples" / "retrofit_smollm2.py"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    return importlib.import_module(EXAMPLE.stem)


def run(example, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, *map(str, arguments)])
    example.main()


def test_from_model_to_text(tmp_path, example, monkeypatch, capsys):
    tiny_model().save_pretrained(tmp_path / "model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:90]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {x: 3 + i for i, x in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("A text that is read again and again, by letters. " * 40)
    run(
        *(example, monkeypatch, "--model", tmp_path / "model", "--data", tmp_path / "text.txt"),
        *("--out", tmp_path / "out", "--length", "128", "--steps", "2"),
    )
    lines = capsys.readouterr().out.splitlines()
    (change,) = (line for line in lines if line.startswith("largest change"))
    assert float(change.rsplit(" ", 1)[1]) < 1e-4
    assert [line.split(":")[0].strip() for line in lines if "perplexity" in line] == [
        *("dense", "soft", "top1", "sparse"),
    ]
    assert (tmp_path / "out" / "adapter.safetensors").exists()
