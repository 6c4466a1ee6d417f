"""`mosar retrofit`, and `mosar evaluate` of what it makes."""

import json
import shutil
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from integrations.retrofit.models import GEOMETRY, tiny_model
from mosar.cli import app
from mosar.integrations.retrofit import evaluator, load_retrofitted
from mosar.integrations.retrofit.adapter import read_description
from mosar.records import RetrofitEvaluation, RetrofitNeedles, RetrofitSpeed, read_records

ARGUMENTS = (
    *("--length", "96", "--steps", "3", "--target-density", "0.4", "--no-progress"),
    *("--set", "updates=1", "--set", "queries=16"),
)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model's folder with a tokenizer of single letters, and text."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(folder / "model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:90]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {x: 3 + i for i, x in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder / "model")
    (folder / "geometry.json").write_text(GEOMETRY.to_json())
    (folder / "text.txt").write_text("A short text that is read again and again, by letters. " * 40)
    articles = ("too short", "a" * 60 + " first", "b" * 99 + " second", "c" * 200, "d" * 200)
    lines = "\n".join(json.dumps({"text": text}) for text in articles)
    (folder / "articles.jsonl").write_text(lines + "\n")
    return folder


@pytest.fixture(scope="module")
def retrofitted(base):
    out = base / "out"
    result = run(
        *("retrofit", base / "model", "--data", base / "text.txt", "--out", out),
        *("--config", base / "geometry.json", *ARGUMENTS),
    )
    assert result.exit_code == 0, result.output
    return out, result


def test_the_microscope_takes_the_folder_and_the_adapter(base, retrofitted, tmp_path):
    out, _ = retrofitted
    for given in ((out,), (base / "model", "--adapter", out)):
        page = tmp_path / "look.html"
        result = run("look", *given, "--text", base / "text.txt", "--tokens", "40", "--out", page)
        assert result.exit_code == 0, result.output
        assert "a look into out" in page.read_text()


def test_low_rank_changes_are_trained_and_go_along_to_another_density(base, tmp_path):
    arguments = ("retrofit", base / "model", "--data", base / "text.txt", "--no-evaluate")
    arguments += ("--length", "96", "--config", base / "geometry.json", "--no-progress")
    refused = run(*arguments, "--out", tmp_path / "no", "--lora", "2")
    assert refused.exit_code == 2 and "give tune_steps" in " ".join(refused.stderr.split())
    small = ("--steps", "1", "--set", "updates=1", "--set", "queries=16")
    first = run(
        *(*arguments, *small, "--out", tmp_path / "one", "--lora", "2", "--set", "tune_steps=2")
    )
    assert first.exit_code == 0, first.output
    assert read_description(tmp_path / "one")["lora"] == 2
    shift = ("--steps", "0", "--start-from", tmp_path / "one", "--target-density", "0.5")
    second = run(*arguments, *shift, "--out", tmp_path / "two")
    assert second.exit_code == 0, second.output
    one, two = (load_retrofitted(tmp_path / name).named_parameters() for name in ("one", "two"))
    changes = [name for name in one if ".lora." in name]
    assert len(changes) == 12 and all(torch.equal(one[name], two[name]) for name in changes)
    assert any(one[name].any() for name in changes if name.endswith("up"))


def test_the_folder_holds_an_adapter_and_a_report(retrofitted):
    out, result = retrofitted
    assert "density" in result.stdout and "report in" in result.stdout
    report = (out / "report.md").read_text()
    for heading in ("## Perplexity", "## Prefill, decoding and cache", "## Layers"):
        assert heading in report
    *records, speed = read_records(out / "evaluations" / "retrofit.jsonl")[:5]
    assert isinstance(speed, RetrofitSpeed) and speed.length == 95
    assert speed.prefill_speedup > 0 and speed.decode_speedup > 0
    # Two layers, two key/value heads of 8, keys and values of 95 tokens in float32.
    assert speed.cache_bytes["dense"] == 2 * 2 * 8 * 2 * 95 * 4
    assert [r.routing for r in records] == ["dense", "soft", "top1", "sparse"]
    assert all(isinstance(r, RetrofitEvaluation) for r in records)
    assert len({r.text for r in records}) == 1 and {r.base for r in records} == {"model"}
    assert records[0].density == 1 and 0 < records[-1].density <= 1
    assert len(records[-1].layer_density) == 2 and len(records[-1].layer_density[0]) == 2
    attached = load_retrofitted(out)
    assert attached.routing == "sparse" and attached.tokenizer is not None


def test_routers_can_be_trained_in_bfloat16(base, tmp_path):
    """The folder remembers it, and what is evaluated is the float32 model."""
    out = tmp_path / "out"
    arguments = ("retrofit", base / "model", "--data", base / "text.txt", "--out", out)
    arguments += ("--config", base / "geometry.json", *ARGUMENTS)
    result = run(*arguments, "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    speeds = [
        r
        for r in read_records(out / "evaluations" / "retrofit.jsonl")
        if isinstance(r, RetrofitSpeed)
    ]
    assert [speed.dtype for speed in speeds] == ["float32"]
    again = run(*arguments)
    assert again.exit_code == 1 and "a run with other dtype; give another --out" in again.stderr
    wrong = run(*arguments, "--dtype", "float8")
    assert wrong.exit_code == 2 and "dtype must be one of float32" in wrong.stderr


def test_the_same_command_goes_on(base, retrofitted):
    out, _ = retrofitted
    before = (out / "metrics.jsonl").read_bytes()
    result = run(
        *("retrofit", base / "model", "--data", base / "text.txt", "--out", out),
        *("--config", base / "geometry.json", *ARGUMENTS, "--no-evaluate"),
    )
    assert result.exit_code == 0, result.output
    after = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(after) == len({(line["step"], line["split"]) for line in after})
    assert len(after) == len(before.splitlines())


def test_an_estimate_trains_nothing(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("retrofit", base / "model", "--data", base / "text.txt", "--length", "96")
    result = run(*arguments, "--estimate", "2", "--no-progress")
    assert result.exit_code == 0, result.output
    first, head, *rows, last = result.stdout.splitlines()
    assert first.startswith("2 windows of 96 tokens; attention is ") and "window" in head
    assert [row.split()[0] for row in rows] == ["0.10", "0.20", "0.33", "0.50"] and "lost" in last
    assert not list(tmp_path.iterdir())
    missing = run(*arguments)
    assert missing.exit_code == 2 and "--out is missing" in missing.stderr


def test_windows_are_by_default_no_longer_than_the_context(base, tmp_path):
    result = run(
        *("retrofit", base / "model", "--data", base / "text.txt", "--out", tmp_path / "out"),
        *("--config", base / "geometry.json", *ARGUMENTS[2:], "--no-evaluate"),
    )
    assert result.exit_code == 0, result.output
    assert "windows of 512 tokens: the base model reads no more" in result.stderr
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["settings"]
    assert settings["length"] == 512


def test_evaluate_takes_the_folder(retrofitted, tmp_path):
    out, _ = retrofitted
    result = run(
        *("evaluate", out, "--lengths", "48,1x,1024", "--routing", "dense,sparse"),
        *("--json", tmp_path / "records.jsonl", "--timing", "0", "--no-progress"),
    )
    assert result.exit_code == 0, result.output
    records = read_records(tmp_path / "records.jsonl")
    assert [(r.length, r.routing) for r in records] == [
        *((48, "dense"), (96, "dense"), (48, "sparse"), (96, "sparse")),
    ]
    assert "left out 1024" in result.stderr


def test_evaluate_times_prompts_beyond_the_context(retrofitted, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(retrofitted[0], out)
    arguments = ("--lengths", "48", "--routing", "sparse", "--timing", "1", "--no-progress")
    result = run("evaluate", out, *arguments, "--speed-lengths", "600")
    assert result.exit_code == 0, result.output
    speeds = [
        r for r in read_records(out / "evaluations" / "retrofit.jsonl") if hasattr(r, "prefill")
    ]
    assert [speed.length for speed in speeds] == [95, 48, 600]
    # Two layers, two key/value heads of 8, keys and values in float32.
    assert speeds[-1].cache_bytes["dense"] == 2 * 2 * 8 * 2 * 600 * 4


def test_a_run_can_start_from_an_included_adapter(base, tmp_path):
    arguments = ("retrofit", base / "model", "--data", base / "text.txt", "--out", tmp_path / "out")
    found = run(*arguments, "--length", "96", "--steps", "0", "--start-from", "smollm2-135m")
    # Its geometry is found, which has a routing group for each of three key/value heads.
    assert found.exit_code == 2 and "key/value heads of layer 0, got 3" in found.stderr
    absent = run(*arguments, "--steps", "0", "--start-from", "smollm2-999m")
    assert absent.exit_code == 1 and "smollm2-999m" in absent.stderr
    assert not (tmp_path / "out").exists()


def test_evaluate_times_batches_and_bfloat16(retrofitted, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(retrofitted[0], out)
    more = ("--lengths", "48", "--routing", "sparse", "--timing", "1", "--no-progress")
    arguments = ("evaluate", out, *more, "--speed-batch", "1,3", "--speed-dtype", "bfloat16")
    for _ in range(2):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        found = read_records(out / "evaluations" / "retrofit.jsonl")
        speeds = [r for r in found if isinstance(r, RetrofitSpeed)]
        assert [speed.setting for speed in speeds] == [
            *((1, "float32", 95), (1, "bfloat16", 48), (3, "bfloat16", 48)),
        ]
    # Keys and values of three prompts take two bytes a number; those of one took four.
    assert speeds[2].cache_bytes["dense"] == 3 * speeds[1].cache_bytes["dense"]
    assert speeds[1].cache_bytes["dense"] == 2 * 2 * 8 * 2 * 48 * 2
    report = (out / "report.md").read_text()
    assert "| 48 | 3 | bfloat16 |" in report and "| 95 | 1 | float32 |" in report
    for wrong, message in (("float8", "dtype must be one of float32"), ("auto", None)):
        result = run("evaluate", out, *more, "--speed-dtype", wrong)
        assert (result.exit_code != 0) == (message is not None)
        assert message is None or message in result.stderr
    result = run("evaluate", out, *more, "--speed-batch", "0")
    assert result.exit_code != 0 and "--speed-batch must be positive" in result.stderr


def test_evaluate_finds_needles_and_makes_nothing_twice(retrofitted, tmp_path, monkeypatch):
    out = tmp_path / "copy"
    shutil.copytree(retrofitted[0], out)
    arguments = ("evaluate", out, "--lengths", "490", "--routing", "sparse", "--timing", "0")

    def needles(*more):
        result = run(*arguments, "--needles", "1", "--tokens", "400", "--no-progress", *more)
        assert result.exit_code == 0, result.output
        records = read_records(out / "evaluations" / "retrofit.jsonl")
        return [r for r in records if isinstance(r, RetrofitNeedles)]

    # The random model does no task, so the others are not asked.
    chosen = needles("--needle-tasks", "tracking,multi-key")
    assert [r.task for r in chosen] == ["tracking", "multi-key"]
    assert [r.routing for r in needles()] == ["dense"] * 5
    report = (out / "report.md").read_text()
    assert "## Needles" in report and "does not count" in report and "no task counts" in report
    monkeypatch.setattr("mosar.integrations.retrofit.needles.score", lambda answer, expected: 1.0)
    found = needles("--force")[5:]
    assert [r.routing for r in found] == ["dense"] * 5 + ["sparse"] * 5 + ["window"] * 5
    assert len({r.task for r in found}) == 5 and len(found[1].scores) == 4
    densities = [sum(r.density for r in found[i : i + 5]) / 5 for i in (0, 5, 10)]
    assert densities[0] == 1 and densities[2] == pytest.approx(densities[1], rel=0.25)
    assert len(needles()) == 20
    assert "(5 tasks count)" in (out / "report.md").read_text()


def test_evaluate_compares_with_windows_and_makes_nothing_twice(base, retrofitted, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(retrofitted[0], out)
    (out / "evaluations" / "retrofit.jsonl").unlink()
    arguments = ("evaluate", out, "--data", base / "articles.jsonl", "--documents", "2")
    arguments += ("--lengths", "40,100", "--timing", "1", "--no-progress")
    routings = ("--routing", "dense,sparse")
    result = run(*arguments, *routings, "--baseline-windows", "4,24")
    assert result.exit_code == 0, result.output
    first = read_records(out / "evaluations" / "retrofit.jsonl")
    found = [r for r in first if isinstance(r, RetrofitEvaluation)]
    windows = [r for r in found if r.routing == "window"]
    assert [(r.length, r.regimes["S"]) for r in windows] == [(40, 4), (100, 4), (40, 24), (100, 24)]
    assert all(r.windows == 2 and len(r.window_losses) == 2 for r in found)
    # A band of 25 diagonals and two sinks, of 40 tokens.
    pairs = sum(min(i + 1, 25) + max(0, min(2, i - 24)) for i in range(40))
    assert windows[2].density == pytest.approx(pairs / (40 * 41 / 2))
    assert windows[0].loss != windows[2].loss
    report = (out / "report.md").read_text()
    assert "| 100 | window 24 |" in report and "## Frontier" in report
    assert (out / "frontier.png").read_bytes().startswith(b"\x89PNG")

    again = run(*arguments, "--routing", "dense,top1,sparse", "--baseline-windows", "24")
    assert again.exit_code == 0, again.output
    more = read_records(out / "evaluations" / "retrofit.jsonl")[len(first) :]
    assert [(r.length, r.routing) for r in more] == [(40, "top1"), (100, "top1")]
    assert "| 100 | window 4 |" in (out / "report.md").read_text()

    forced = run(*arguments, "--routing", "dense", "--force")
    assert forced.exit_code == 0, forced.output
    more = read_records(out / "evaluations" / "retrofit.jsonl")[len(first) + 2 :]
    assert [r.kind for r in more] == ["retrofit"] * 2 + ["retrofit.speed"] * 2
    dense = [r.loss for r in found if r.routing == "dense"]
    assert [r.loss for r in more[:2]] == pytest.approx(dense)

    # The second document alone is another text: its records stand beside the others.
    other = ("--documents", "1", "--skip-documents", "1", "--routing", "dense", "--timing", "0")
    fresh = run(*arguments, *other)
    assert fresh.exit_code == 0, fresh.output
    newest = read_records(out / "evaluations" / "retrofit.jsonl")[-1]
    both = next(r for r in found if (r.length, r.routing) == (100, "dense"))
    assert newest.length == 100
    assert newest.window_losses == pytest.approx(both.window_losses[1:])


def test_a_folder_of_runs_has_one_report(retrofitted, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(retrofitted[0], tmp_path / name)
    result = run("report", tmp_path)
    assert result.exit_code == 0, result.output
    report = (tmp_path / "report.md").read_text()
    assert "| sparse, one |" in report and "| sparse, two |" in report


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (("--documents", "9"), 1, "has 3 documents of at least 101 tokens, and 9 are needed"),
        (("--documents", "2", "--skip-documents", "2"), 1, "and 4 are needed"),
        (("--skip-documents", "1"), 2, "--skip-documents 1 needs --documents"),
        (("--needle-tasks", "single"), 2, "--needle-tasks single needs --needles"),
        (("--needles", "1", "--needle-tasks", "far"), 2, "--needle-tasks must be some of single"),
        (("--documents", "1", "--tokens", "100"), 2, "give one"),
        (("--baseline-windows", "far"), 2, "--baseline-windows takes numbers"),
        (("--routing", "hard"), 2, "routing must be some of"),
        (("--step", "3"), 2, "--step is for runs of mosar train"),
    ],
)
def test_evaluate_says_what_is_wrong(base, retrofitted, change, code, message):
    arguments = ("evaluate", retrofitted[0], "--data", base / "articles.jsonl", "--lengths", "100")
    result = run(*arguments, *change, "--no-progress")
    assert result.exit_code == code
    assert message in " ".join(result.stderr.replace("│", "").split())


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (("--target-density", "3"), 2, "target_density must be a number in"),
        (("--set", "update=1"), 2, "there is no key 'update'; did you mean 'updates'?"),
        (("--set", "updates=many"), 2, "updates must be an integer, got 'many'"),
        (("--data", "missing.txt"), 1, "missing.txt does not exist"),
        (("--length", "512"), 1, "windows of 512 tokens"),
        (("--length", "513"), 1, "the 512 tokens that the base model reads, got 513; give --len"),
        (("--set", "length=513"), 1, "the 512 tokens that the base model reads, got 513"),
        (("--config", "missing.json"), 1, "cannot read missing.json"),
    ],
)
def test_wrong_use_is_one_line(base, tmp_path, monkeypatch, change, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short " * 30)
    arguments = ("retrofit", base / "model", "--out", tmp_path / "out", *ARGUMENTS)
    data = () if "--data" in change else ("--data", "short.txt")
    result = run(*arguments, *data, *change)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.replace("│", "").split())
    assert not (tmp_path / "out" / "adapter.json").exists()


def test_a_missing_extra_is_said_before_the_evaluation(retrofitted, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(evaluator, "evaluate_folder", lambda *a, **k: pytest.fail("too late"))
    result = run("evaluate", retrofitted[0], "--baseline-windows", "4,24")
    assert result.exit_code == 1 and "matplotlib, which is not installed" in result.stderr


def test_a_missing_model_is_one_line(tmp_path):
    result = run("retrofit", tmp_path / "nothing", "--out", tmp_path / "out", *ARGUMENTS)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("mosar: error: cannot load")
