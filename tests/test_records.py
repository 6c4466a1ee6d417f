"""Records: what is written can be read, a damaged line is named, nothing is lost around it."""

import json
from pathlib import Path

import pytest

from benchmark_records import make_benchmark
from mosar.errors import DamagedFile
from mosar.records import (
    SCHEMA_VERSION,
    ErrorCheck,
    Measurement,
    append_record,
    environment,
    read_records,
)


def test_round_trip(tmp_path):
    path = tmp_path / "records.jsonl"
    written = [make_benchmark(seed=seed) for seed in range(3)]
    for record in written:
        append_record(path, record)
    assert read_records(path) == written
    assert len(path.read_text().splitlines()) == 3


def test_a_line_says_what_it_is_and_where_it_was_made(tmp_path):
    append_record(tmp_path / "a.jsonl", make_benchmark())
    line = json.loads((tmp_path / "a.jsonl").read_text())
    assert (line["schema"], line["kind"]) == (SCHEMA_VERSION, "bench.attention")
    assert line["created"].endswith("+00:00")
    assert line["environment"] == environment()


def test_derived_figures():
    record = make_benchmark()
    assert record.density == 0.1
    assert record.speedup == 8.0
    assert record.speedup_times_density == pytest.approx(0.8)
    assert record.plan_share == pytest.approx(0.02)
    assert record.memory_ratio == 1.5
    # 4 operations x 8 heads x 256 dims x a million pairs in 10 ms.
    assert record.gflops == pytest.approx(4 * 8 * 256 * 1e6 / 0.010 / 1e9)
    assert make_benchmark(mode="sparse-train").gflops == pytest.approx(3.5 * record.gflops)
    derived = record.to_dict()["derived"]
    assert derived["median_ms"] == {"sdpa": 80.0, "flex": None, "ours": 10.0}
    assert derived["min_ms"] == {"sdpa": 70.0, "flex": None, "ours": 8.0}
    assert derived["gemm_share"] == pytest.approx(record.gflops / 1000)


@pytest.mark.parametrize("error", [None, 2e-6])
def test_a_wrong_result_has_no_speedup(error):
    record = make_benchmark(checks={"out": ErrorCheck(error=error, budget=1e-6)})
    assert not record.correct
    assert record.speedup is None and record.speedup_times_density is None
    assert record.gflops is None


def test_nothing_timed_gives_nothing():
    record = make_benchmark(measurements={}, plan=Measurement())
    assert record.speedup is None and record.plan_share is None and record.memory_ratio is None
    assert record.derived()["gemm_share"] is None


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"schema": 1, "kind"', "line 2: "),
        ("\n", "line 2: "),
        ("[1]", "line 2: it must be a JSON object, got list"),
        ('{"schema": 99, "kind": "bench.attention"}', "line 2: schema must be 1, got 99"),
        ('{"schema": 1, "kind": "poem"}', r"line 2: kind must be one of .* got 'poem'"),
        ('{"schema": 1, "kind": "bench.attention"}', "line 2: AttentionBenchmark lacks"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, part):
    path = tmp_path / "a.jsonl"
    append_record(path, make_benchmark())
    with path.open("a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=part) as caught:
        read_records(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("field", ["checks", "measurements", "plan"])
@pytest.mark.parametrize("value", [7, None, {"out": 7}, {"samples_ms": 5}])
def test_a_damaged_field_is_named(tmp_path, field, value):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(make_benchmark().to_dict() | {field: value}) + "\n")
    with pytest.raises(ValueError, match="line 1: "):
        read_records(path)


def test_appending_after_a_broken_line_loses_only_that_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"schema": 1, "ki')
    append_record(path, make_benchmark())
    broken, whole = path.read_text().splitlines()
    assert broken == '{"schema": 1, "ki'
    path.write_text(whole + "\n")
    assert len(read_records(path)) == 1


def test_not_a_number_is_not_written(tmp_path):
    path = tmp_path / "a.jsonl"
    with pytest.raises(ValueError, match="JSON"):
        append_record(path, make_benchmark(gemm_gflops=float("nan")))
    assert not path.exists()


def test_an_altered_digit_is_noticed(tmp_path):
    path = tmp_path / "a.jsonl"
    for flops in (11.5, 22.5, 33.5):
        append_record(path, make_benchmark(gemm_gflops=flops))
    text = path.read_text()
    assert text.count("22.5") == 1
    path.write_text(text.replace("22.5", "22.6"))
    with pytest.raises(DamagedFile, match=r"a\.jsonl, line 2: it was altered .* or remove it"):
        read_records(path)


def test_records_of_earlier_versions_have_no_checksum(tmp_path):
    path, record = tmp_path / "a.jsonl", make_benchmark()
    path.write_text(json.dumps(record.to_dict()) + "\n")
    append_record(path, record)
    assert read_records(path) == [record, record]


def test_a_variant_has_the_name_of_today():
    """A checked-in record, as it was written, names its variant as it was called then."""
    path = Path(__file__).parents[1] / "results/small/records/mosar-plus-seed0.jsonl"
    assert {json.loads(line)["cell"]["variant"] for line in path.open()} == {"mosar-forget"}
    assert {record.cell.name for record in read_records(path)} == {"mosar-plus-seed0"}
