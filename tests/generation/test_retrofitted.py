"""`mosar generate` with routers that were attached to somebody else's model."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from mosar.cli import app
from mosar.core.config import MoSARConfig
from mosar.data.tokenizer import ByteTokenizer
from mosar.generation.source import open_source
from mosar.integrations import retrofit as retrofitting
from mosar.integrations.hf.tokenizer import fast_tokenizer
from mosar.integrations.retrofit.adapter import read_description


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Routers of a small random Llama, which choose every regime."""
    base, folder = (tmp_path_factory.mktemp(name) for name in ("base", "adapter"))
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=128, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(base)
    fast_tokenizer(ByteTokenizer(), 128).save_pretrained(base)
    model = LlamaForCausalLM.from_pretrained(base)
    attached = retrofitting.retrofit(model, MoSARConfig.scaled(64))
    with torch.no_grad():
        for parameter in attached.parameters():
            parameter.normal_(std=0.5)
    attached.save(folder)
    return folder


def generate(*arguments):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def test_text_and_statistics(adapter):
    options = (
        "--prompt",
        "some text " * 6,
        "--max-new-tokens",
        30,
        "--temperature",
        1.5,
        "--stats",
    )
    sparse, dense = generate(adapter, *options), generate(adapter, *options, "--routing", "dense")
    assert sparse.exit_code == dense.exit_code == 0, sparse.output + dense.output
    assert "routing    sparse" in sparse.stderr and "routing    dense" in dense.stderr
    assert "60 tokens in" in sparse.stderr and "tokens/s" in sparse.stderr
    densities = [float(r.stderr.split("density")[1].split()[0]) for r in (sparse, dense)]
    assert 0 < densities[0] < 0.95 and densities[1] == 1
    wrong = generate(adapter, *options, "--routing", "hard")
    assert wrong.exit_code == 2
    assert "one of dense, soft, top1, sparse" in " ".join(wrong.stderr.split())
    assert generate(adapter, *options, "--step", 3).exit_code == 2


def test_an_adapter_and_its_base_model_side_by_side(adapter, monkeypatch):
    monkeypatch.setattr("mosar.cli.generate._LONG", 64)
    result = generate("--adapter", adapter, "--compare", "--max-new-tokens", 4, "--temperature", 0)
    assert result.exit_code == 0, result.output
    assert "[sparse] " in result.stdout and "[dense] " in result.stdout
    lines = [line.split() for line in result.stderr.splitlines()]
    assert lines[0] == ["sparse", "dense"]
    assert [line[0] for line in lines[1:]] == ["prompt", "per", "cache", "pairs"]
    # 64 tokens and three of the four that were written, in two layers of two key/value heads of 8.
    assert f"{2 * 2 * 8 * 2 * 67 * 4 / 1024:.2f} KiB" in result.stderr
    assert float(lines[4][2]) < float(lines[4][3]) == 1
    one = generate(adapter, "--compare", "--prompt", "text", "--max-new-tokens", 1)
    assert one.exit_code == 0 and "per token" not in one.stderr
    base = read_description(adapter)["base"]["source"]
    named = generate(base, "--adapter", adapter, "--prompt", "text", "--max-new-tokens", 1)
    assert named.exit_code == 0, named.output
    narrow = generate(adapter, "--prompt", "text", "--max-new-tokens", 2, "--dtype", "bfloat16")
    assert narrow.exit_code == 0, narrow.output
    held = open_source(adapter, dtype="bfloat16").reader
    assert held.attached.model.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in held.attached.parameters())
    for arguments, message in (
        ((), "name a model's folder, or a ready adapter"),
        (("--adapter", adapter, "--dtype", "int4"), "dtype must be one of float32, bfloat16"),
        (("--adapter", adapter, "--step", 3), "--step is only for run folders"),
    ):
        wrong = generate(*arguments, "--prompt", "x")
        assert wrong.exit_code == 2 and message in " ".join(wrong.stderr.split())
    assert "--prompt is missing" in generate(adapter).stderr


@pytest.mark.parametrize("routing", ["dense", "soft", "sparse"])
def test_tokens_one_by_one_are_the_text_at_once(adapter, routing):
    tokens = list(b"one token after another, and so on and on " * 3)
    source = open_source(adapter, routing=routing)
    projected = []
    source.reader.attached.model.lm_head.register_forward_hook(
        lambda module, args, output: projected.append(args[0].shape[1])
    )
    source.reader.read(tokens[:50])
    assert projected == [1]
    for token in tokens[50:]:
        logits = source.reader.read([token])
    whole = open_source(adapter, routing=routing).reader.read(tokens)
    assert (logits - whole).abs().max() < 2e-5
    assert source.reader.num_tokens == len(tokens)
    assert source.reader.dense_bytes == len(tokens) * 2 * 2 * 2 * 8 * 4
    assert source.reader.cache_bytes > 0


def test_a_damaged_adapter_is_one_line(adapter, tmp_path):
    (tmp_path / "adapter.json").write_text("{}")
    result = generate(tmp_path, "--prompt", "x")
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
