"""What every `mosar bench` does alike: wrong usage, files that fail, labels, interruption."""

import json

import numpy as np
import pytest

from mosar.bench.attention import AttentionComparison
from mosar.records import read_records

ATTENTION = (
    "attention --shapes 4x2x8 --lengths 40,300 --seconds 0.001 --memory none "
    "--competitors sdpa,reference,ours"
)
DECODE = "decode --shapes 4x2x8 --lengths 40,300 --seconds 0.001"
MODEL = "decode --model tiny --lengths 40,200 --seconds 0.001"
TRAIN = "train --preset smoke --lengths 32 --seconds 0.001"
SHAPED = (ATTENTION, DECODE)
ROUTED = (*SHAPED, MODEL)
ALL = (*ROUTED, TRAIN)


@pytest.mark.parametrize(
    ("command", "columns", "competitors"),
    [
        (ATTENTION, "shape ρ SDPA reference ours plan memory GFLOP/s", "sdpa reference ours"),
        (DECODE, "shape keys SDPA ours GB/s cache", "sdpa ours"),
        (MODEL, "tokens/s transformers dense cache tiny", "transformers dense ours"),
        (f"{TRAIN} --softcap capped", "soft-caps rope mosar", "rope mosar gemma2-eager"),
    ],
)
def test_table_and_records(bench, tmp_path, command, columns, competitors):
    result = bench(command, "--json", tmp_path / "a.jsonl")
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in (*columns.split(), "target"))
    assert command.startswith("train") or "Labels: independent, seed 0" in result.stdout
    assert " 32 │" in result.stdout or "4x2x8, n = 40: " in result.stderr
    records = read_records(tmp_path / "a.jsonl")
    assert len(records) == (1 if command.startswith("train") else 2)
    for record, line in zip(records, (tmp_path / "a.jsonl").read_text().splitlines(), strict=True):
        assert record.correct and list(record.measurements) == competitors.split()
        assert all(len(m.samples_ms) >= 5 for m in record.measurements.values())
        assert json.loads(line)["derived"] == record.derived()


@pytest.mark.parametrize(
    ("command", "arguments", "part"),
    [
        *((c, "--lengths 2k", "--lengths takes numbers like 2048,8192, got '2k'") for c in ALL),
        *((c, "--lengths ,", "--lengths takes numbers") for c in ALL),
        *((c, "--seconds 0", "seconds must be more than 0") for c in ALL),
        *((c, "--threads 0", "--threads") for c in ALL),
        *((c, "--size 3", "--size") for c in ALL),
        *((c, "--labels random", "labels must be one of independent, clustered") for c in ROUTED),
        *((c, "--seed -1", "--seed") for c in ROUTED),
        *((c, "--shapes 8x1", "HEADSxKV_HEADSxHEAD_DIM like 8x1x256, got '8x1'") for c in SHAPED),
        *((c, "--shapes 8x3x64", "multiple of the key/value heads, got '8x3x64'") for c in SHAPED),
        *((c, "--shapes ,", "at least one shape is needed") for c in SHAPED),
        (f"{TRAIN} --run runs/a", "--variants fox", "--variants cannot be given with --run"),
        (f"{TRAIN} --run runs/a", "--preset quick", "--preset cannot be given with --run"),
        (TRAIN, "--data data/wiki", "--data is that of a run, so it needs --run RUN"),
        *((c, "--memory some", "--memory takes numbers") for c in (ATTENTION, TRAIN)),
        *((c, "--memory 0", "lengths must be at least 1, got 0") for c in (ATTENTION, TRAIN)),
        *((c, "--lengths 0", "lengths must be at least 1, got 0") for c in (ATTENTION, TRAIN)),
        (DECODE, "--lengths 1", "lengths must be at least 2, got 1"),
        (MODEL, "--lengths 16", "lengths must be at least 17, got 16"),
        (MODEL, "--model gpt", "model must be one of smollm2, tiny, got 'gpt'"),
        (TRAIN, "--softcap maybe", "softcap must be one of capped, plain, got 'maybe'"),
        (TRAIN, "--softcap ,", "at least one softcap is needed"),
        (TRAIN, "--preset huge", "preset must be one of"),
        (ATTENTION, "--mode dense", "mode must be one of sparse, sparse-train"),
        (ATTENTION, "--mode ,", "at least one mode is needed"),
        (ATTENTION, "--competitors flash", "competitor must be one of sdpa, reference, flex"),
        (ATTENTION, "--device tpu", "device must be one of cpu, cuda, got 'tpu'"),
        (ATTENTION, "--device cuda --dtype int8", "dtype must be one of float32"),
        (ATTENTION, "--dtype bfloat16", "on the CPU dtype must be float32"),
    ],
)
def test_wrong_usage_exits_2(bench, command, arguments, part):
    result = bench(f"{command} {arguments}")
    assert result.exit_code == 2
    assert part in result.stderr.splitlines()[-1]
    assert not result.stdout


@pytest.mark.parametrize(
    ("command", "arguments", "part"),
    [
        *((c, "--json no/a", "cannot write no/a: its folder does not exist") for c in ALL),
        *((c, "--labels no.npz", "no.npz: No such file") for c in ROUTED),
        *((c, "--config no.json", "cannot read no.json") for c in ROUTED),
        (ATTENTION, "--plot no/a.png", "cannot write no/a.png: its folder does not exist"),
        (ATTENTION, "--plot a.gif", "--plot must end in one of .png, .svg, .pdf"),
    ],
)
def test_failures_are_one_line_before_anything_is_measured(
    bench, tmp_path, monkeypatch, command, arguments, part
):
    monkeypatch.chdir(tmp_path)
    result = bench(f"{command} {arguments}")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("mosar: error: ") and part in line
    assert not result.stdout


@pytest.mark.parametrize("command", ROUTED)
def test_labels_of_a_file_by_its_name(bench, tmp_path, command):
    path = tmp_path / "mine.npz"
    np.savez(path, labels_q=np.zeros(40, dtype=int), labels_k=np.full(40, 2))
    result = bench(command, "--lengths", 40, "--labels", path)
    assert result.exit_code == 0, result.output
    assert "Labels: mine.npz" in result.stdout
    assert str(tmp_path) not in result.stdout


def test_interruption_keeps_what_was_measured(bench, tmp_path, monkeypatch):
    measure = AttentionComparison.measure

    def interrupted(self, case, report):
        if case.length == 300:
            raise KeyboardInterrupt
        return measure(self, case, report)

    monkeypatch.setattr(AttentionComparison, "measure", interrupted)
    path = tmp_path / "a.jsonl"
    result = bench(ATTENTION, "--json", path)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "mosar: stopped after 1 of 2 rows"
    assert "4x2x8" in result.stdout
    assert len(read_records(path)) == 1
