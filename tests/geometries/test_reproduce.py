"""`mosar reproduce --variants all`: every variant is trained, evaluated and in the report."""

from typer.testing import CliRunner

from mosar.cli import app
from mosar.geometries import VARIANTS
from mosar.records import EvaluationRecord, read_records

SMALLEST = [
    *("train.steps=2", "train.warmup_steps=1", "train.eval_batches=1", "train.micro_batch=1"),
    *("model.num_layers=1", "model.hidden_size=16", "model.ffn_size=16"),
]


def test_all_variants_in_one_experiment(dataset, tmp_path):
    command = ["reproduce", "--preset", "smoke", "--variants", "all", "--data", str(dataset)]
    command += ["--lengths", "1x,2x", "--eval-tokens", "128", "--out", str(tmp_path / "all")]
    for change in SMALLEST:
        command += ["--set", change]
    told = CliRunner().invoke(app, [*command, "--jobs", "1", "--no-progress"])
    assert told.exit_code == 0, told.output
    page = (tmp_path / "all" / "report" / "index.html").read_text(encoding="utf-8")
    for name, attention in VARIANTS.items():
        training, *evaluations = read_records(tmp_path / "all" / "records" / f"{name}-seed0.jsonl")
        assert training.cell.variant == name and attention.geometry in page
        assert {record.length for record in evaluations} == {64, 128}
        for record in evaluations:
            assert isinstance(record, EvaluationRecord)
            assert 100 < record.perplexity < 400 and 0 < record.density <= 1
