"""`mosar generate`: what it writes from which folder, and how it refuses."""

import json

import pytest
from typer.testing import CliRunner

from integrations.hf.conftest import bpe_dataset, dataset, run  # noqa: F401
from mosar.cli import app

pytest.importorskip("transformers", reason="exported models need transformers")


def generate(*arguments, stdin=None):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], input=stdin)


def test_a_run_and_its_export_write_the_same(run, tmp_path):  # noqa: F811
    from mosar.integrations.hf.export import export_run

    source = run()
    out = export_run(source, tmp_path / "out")
    options = ("--prompt", "The cat", "--max-new-tokens", 40, "--seed", 3)
    ours, theirs = (generate(folder, *options) for folder in (source, out))
    assert ours.exit_code == theirs.exit_code == 0, ours.output + theirs.output
    assert ours.stdout == theirs.stdout and len(ours.stdout.encode()) > 20
    assert ours.stderr == ""
    assert generate(source, *options, "--seed", 4).stdout != ours.stdout
    read = generate(source, *options, "--prompt", "-", stdin="The cat")
    assert read.stdout == ours.stdout
    assert generate(source, *options, "--echo").stdout == "The cat" + ours.stdout


def test_statistics(run):  # noqa: F811
    for variant, routing in (("mosar", "sparse"), ("rope", "native")):
        result = generate(
            run(variant), "--prompt", "", "--max-new-tokens", 30, "--temperature", 3, "--stats"
        )
        assert result.exit_code == 0, result.output
        lines = dict(line.split(maxsplit=1) for line in result.stderr.splitlines())
        assert list(lines) == ["routing", "prompt", "writing", "cache", "density"]
        assert lines["routing"] == routing
        assert lines["prompt"].startswith("1 tokens in ")
        assert "tokens/s" in lines["writing"] and "dense" in lines["cache"]
        assert "it reserves room for later keys" in lines["cache"]
        density = float(lines["density"].split()[0])
        assert density == 1.0 if variant == "rope" else 0 < density < 1


def test_routings_are_taken(run):  # noqa: F811
    source = run()
    options = ("--prompt", "abc " * 20, "--temperature", 3, "--max-new-tokens", 40)
    texts = {
        routing: generate(source, *options, "--routing", routing).stdout
        for routing in ("soft", "top1", "sparse")
    }
    assert generate(source, *options).stdout == texts["sparse"]
    assert texts["soft"] != texts["sparse"]


def test_failures_are_one_line(run, bpe_dataset, tmp_path):  # noqa: F811
    source = run("rope")
    task = run("mosar", None, "data.task=recall", "model.max_length=64", "model.vocab_size=200")
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text("{")
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    for folder, options, code, part in (
        (tmp_path / "none", (), 1, "there is no folder"),
        (empty, (), 1, "holds no model"),
        (damaged, (), 1, "is damaged"),
        (stranger, (), 1, "unheard-of"),
        (task, (), 1, "learnt the task recall"),
        (source, ("--step", 7), 1, "no checkpoint of step 7; there are 20"),
        (source, ("--data", tmp_path / "gone"), 1, "there is no dataset"),
        (source, ("--routing", "sparse"), 2, "routing must be one of native, since rope has no"),
        (source, ("--top-p", 2), 2, "top_p must be a number above 0 and at most 1"),
        (source, ("--top-k", 0), 2, "top-k"),
        (source, ("--temperature", -1), 2, "temperature"),
        (source, ("--max-new-tokens", 0), 2, "max-new-tokens"),
        (source, ("--seed", 2**64), 2, "seed"),
        (source, ("--data", bpe_dataset), 1, "is not the data that"),
        (source, ("--prompt", "\udcff"), 2, "must be UTF-8 text"),
    ):
        result = generate(folder, "--prompt", "x", *options)
        assert result.exit_code == code, (options, result.output)
        assert part in " ".join(result.stderr.split()), (options, result.stderr)
        assert result.stdout == "" and "Traceback" not in result.output
        if code == 1:
            assert len(result.stderr.splitlines()) == 1
    mosar = generate(run("mosar-cost"), "--prompt", "x", "--routing", "hard")
    assert mosar.exit_code == 2 and "one of soft, top1, sparse" in " ".join(mosar.stderr.split())
    assert generate(source).exit_code == 2
