"""A run's checkpoint becomes a model of transformers and a run again, and no bit is lost."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from mosar.cli import app
from mosar.data.tokenizer import load_tokenizer
from mosar.errors import ModelError, TrainingError
from mosar.evaluation.loaded_run import LoadedRun
from mosar.files import sealed
from mosar.integrations.hf import MosarForCausalLM
from mosar.integrations.hf.export import export_run
from mosar.integrations.hf.folders import load_model
from mosar.integrations.hf.run_import import import_model
from mosar.records import EvaluationRecord
from mosar.training.config import changed_config
from mosar.training.loop import train
from mosar.training.run_folder import (
    read_config,
    read_data_fingerprint,
    read_metrics,
    write_config,
)
from processes import file_size_limit

from .runs import STEP, parameters_of

TOKENS = torch.arange(60)[None] % 57


def evaluation(loaded, routing, loss):
    """A record as `mosar evaluate` writes it."""
    empty = {name: [] for name in ("buckets", "layer_density", "discarded_mass", "regimes")}
    return EvaluationRecord(
        cell=loaded.cell,
        step=loaded.step,
        train_length=32,
        length=64,
        routing=routing,
        windows=3,
        tokens=192,
        loss=loss,
        loss_stderr=0.01,
        seconds=1.0,
        density=0.321,
        reach_soft=0.25,
        reach_top1=0.125,
        shares_soft={},
        shares_top1={},
        example_labels={},
        inputs={"checkpoint": loaded.checksum},
        **empty,
    )


@pytest.mark.parametrize("variant", ["rope", "fixed-m", "mosar-cost"])
def test_there_and_back(variant, run, dataset, tmp_path):
    source = run(variant)
    folder = export_run(source, tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(folder)
    loaded = LoadedRun.open(source)
    with torch.no_grad():
        theirs = model(TOKENS, use_cache=False).logits
        ours = loaded.decoder.logits(loaded.decoder(TOKENS).hidden)
    assert torch.equal(theirs, ours)
    again = import_model(folder, tmp_path / "again", data=dataset)
    assert parameters_of(again) == parameters_of(source)
    assert read_config(again) == read_config(source)
    assert LoadedRun.open(again).checksum == loaded.checksum
    assert read_metrics(again) == read_metrics(source)


def test_narrow_export(run, tmp_path):
    source = run()
    model = AutoModelForCausalLM.from_pretrained(
        export_run(source, tmp_path / "out", dtype="bfloat16", routing="sparse")
    )
    assert model.routing == "sparse"
    whole = LoadedRun.open(source).decoder
    for name, parameter in model.decoder.named_parameters():
        kept = whole.get_parameter(name)
        if "_router." in name:
            assert torch.equal(parameter, kept)
        else:
            assert torch.equal(parameter, kept.bfloat16())
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert size < 0.85 * len(parameters_of(source))


@pytest.mark.parametrize("kind", ["dataset", "bpe_dataset"])
def test_the_tokenizer_comes_with_it(kind, request, run, tmp_path):
    data = request.getfixturevalue(kind)
    folder = export_run(run("rope", data), tmp_path / "out")
    ours, theirs = load_tokenizer(data), AutoTokenizer.from_pretrained(folder)
    assert theirs("Ein Café\n")["input_ids"] == ours.encode("Ein Café\n")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == ours.end_of_text
    # A batch with left padding, by nothing but what the folder holds.
    batch = theirs(["The", "The cat and"], return_tensors="pt", padding=True)
    out = model.generate(**batch, max_new_tokens=5, do_sample=False)
    assert out.shape[1] <= batch["input_ids"].shape[1] + 5


def test_the_card_tells_what_was_measured(run, dataset, tmp_path):
    source = run("mosar")
    loaded = LoadedRun.open(source)
    (source / "evaluations").mkdir()
    for index, (routing, loss) in enumerate((("soft", 2.0), ("sparse", 2.1))):
        path = source / "evaluations" / f"{index}.json"
        path.write_text(json.dumps(evaluation(loaded, routing, loss).to_dict()) + "\n")
    stranger = evaluation(loaded, "top1", 9.0)
    stranger.inputs["checkpoint"] = "another"
    (source / "evaluations" / "9.json").write_text(json.dumps(stranger.to_dict()) + "\n")
    (source / "evaluations" / "damaged.json").write_text("{")
    card = (export_run(source, tmp_path / "out") / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for part in (
        "# mosar:",
        "- mosar",
        "step | 20 of 20",
        "3.2500 (perplexity 25.79)",
        "train.jsonl",
        "| 64 | soft | 7.39 | 2.0000 ± 0.0100 | 0.321 | 0.250 |",
        "| 64 | sparse | 8.17 | 2.1000 ± 0.0100 | 0.321 | 0.125 |",
        "tokenizer | byte",
    ):
        assert part in card, part
    assert "top1 |" not in card
    for path in (tmp_path / "out").iterdir():
        for place in (tmp_path, dataset.parent):
            assert str(place).encode() not in path.read_bytes(), path.name
    code = card.partition("```python\n")[2].partition("```")[0]
    exec(compile(code.replace("FOLDER", str(tmp_path / "out")), "<card>", "exec"), {})


def test_a_task_has_no_tokenizer(run, tmp_path):
    task = ("data.task=recall", "model.max_length=64", "model.vocab_size=200")
    folder = export_run(run("mosar", None, *task), tmp_path / "out")
    assert not list(folder.glob("tokenizer*"))
    assert "synthetic task recall" in (folder / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(folder).config.eos_token_id is None


def test_an_imported_run_trains_on(run, dataset, tmp_path):
    folder = export_run(run(), tmp_path / "exported")
    again = import_model(folder, tmp_path / "again", data=dataset)
    longer = ["train.steps=22", "train.decay_steps=20"]
    result = train(changed_config(read_config(again), longer), again, progress=False)
    assert (result.resumed_from, result.step) == (STEP, 22)


def test_a_model_of_no_run_is_trained_on_and_not_anew(run, dataset, tmp_path):
    model = MosarForCausalLM.from_pretrained(export_run(run("rope"), tmp_path / "exported"))
    model.config.provenance = None
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="was not exported from a run: say with --data"):
        import_model(tmp_path / "model", tmp_path / "run")
    made = import_model(tmp_path / "model", tmp_path / "run", data=dataset)
    assert (LoadedRun.open(made).step, LoadedRun.open(made).config.variant) == (0, "rope")
    config = changed_config(
        read_config(made),
        ["train.learning_rate=0", "train.min_learning_rate=0", "train.weight_decay=0"],
    )
    write_config(made, config, read_data_fingerprint(made))
    state = made / "checkpoints" / "step-00000000" / "state.json"
    values = json.loads(state.read_text()) | {"config_hash": config.fingerprint()}
    del values["checksum"]
    state.write_text(json.dumps(sealed(values)))
    assert train(config, made, progress=False).step == 1
    trained, started = LoadedRun.open(made).decoder, model.decoder
    for name, parameter in started.named_parameters():
        assert torch.equal(trained.get_parameter(name), parameter), name


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_an_altered_export_is_refused(run, bpe_dataset, tmp_path, name):
    folder = export_run(run("mosar", bpe_dataset), tmp_path / "exported")
    path = folder / name
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)
    message = rf"{name} is not what was exported: its checksum is wrong; export it again"
    if name == "config.json":
        message = rf"{message}|is not an exported model"
    with pytest.raises(ModelError, match=message):
        import_model(folder, tmp_path / "again", data=bpe_dataset)
    assert not (tmp_path / "again").exists()
    path.unlink()
    with pytest.raises(ModelError, match=rf"{name} is missing|is not an exported model"):
        load_model(folder)


def test_weights_changed_on_purpose_are_loaded(run, dataset, tmp_path):
    """As `save_pretrained` writes them, into the folder of an export or another."""
    folder = export_run(run(), tmp_path / "exported")
    model = load_model(folder)
    with torch.no_grad():
        model.decoder.embedding.weight[0, 0] += 1
    model.save_pretrained(tmp_path / "other")
    load_model(tmp_path / "other")
    model.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"or remove checksums\.json if it was changed on"):
        load_model(folder)
    (folder / "checksums.json").unlink()
    load_model(folder)


@pytest.mark.parametrize("room", [1_000, 20_000])
def test_a_full_disk(run, bpe_dataset, tmp_path, room):
    """No file may grow beyond `room`: now the configuration fails, now the weights."""
    source, out = run("mosar", bpe_dataset), tmp_path / "out"
    with file_size_limit(room):
        result = CliRunner().invoke(app, ["export", str(source), "--out", str(out)])
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("mosar: error: ") and line.endswith("File too large")
    assert [path.name for path in tmp_path.iterdir()] == ["mosar"]


def test_altered_metrics_are_not_exported(run, tmp_path):
    source = run()
    (source / "metrics.jsonl").write_text('{"step": 20, "split": "valid", "loss": 1\n')
    with pytest.raises(TrainingError, match=r"metrics\.jsonl, line 1 or one before it was changed"):
        export_run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported(run, dataset, bpe_dataset, tmp_path):
    source, out = run("rope"), tmp_path / "out"
    for options, error, rule in (
        ({"dtype": "int8"}, ValueError, "dtype must be one of float32, bfloat16, float16"),
        ({"routing": "hard"}, ValueError, "routing must be one of"),
        ({"step": 7}, ModelError, "has no checkpoint of step 7; there are 20"),
        ({"data": bpe_dataset}, ModelError, "is not the data that"),
    ):
        with pytest.raises(error, match=rule):
            export_run(source, out, **options)
        assert not out.exists() and not list(tmp_path.glob(".out*"))
    with pytest.raises(ModelError, match="there is no run folder"):
        export_run(tmp_path / "none", out)
    moved = shutil.copytree(source, tmp_path / "moved")
    config = json.loads((moved / "config.json").read_text())
    config["data"]["folder"] = str(tmp_path / "gone")
    (moved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"is no longer in .*; give its path with --data"):
        export_run(moved, out)
    export_run(moved, out, data=dataset)
    with pytest.raises(ModelError, match="holds an exported model already; --force replaces"):
        export_run(source, out)
    export_run(source, out, force=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match=r"holds notes.txt, which no export wrote"):
        export_run(source, out, force=True)
    (out / "notes.txt").unlink()
    for force in (False, True):
        # --force would not help here, so it is not named.
        with pytest.raises(ModelError, match="an exported model; choose another --out"):
            export_run(source, moved, force=force)
    with pytest.raises(ModelError, match="is not the data that the run of"):
        import_model(out, tmp_path / "again", data=bpe_dataset)
    with pytest.raises(ModelError, match="is not empty"):
        import_model(out, moved)


def test_commands(run, dataset, tmp_path):
    out, again = tmp_path / "out", tmp_path / "again"
    invoke = lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])  # noqa: E731
    assert invoke("export", run(), "--out", out).stdout == f"The model: {out}\n"
    result = invoke("import", out, "--out", again, "--data", dataset)
    assert (result.exit_code, result.stdout) == (0, f"The run: {again}\n")
    result = invoke("export", tmp_path / "none", "--out", tmp_path / "x")
    assert result.exit_code == 1
    assert result.stderr.startswith("mosar: error: there is no run folder")
    assert len(result.stderr.splitlines()) == 1
    assert invoke("export", again, "--out", tmp_path / "x", "--routing", "hard").exit_code == 2
    assert invoke("import", tmp_path, "--out", tmp_path / "x").exit_code == 1
