"""Files of records, one per line."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path

from mosar.errors import DamagedFile
from mosar.files import LINE_DIGITS, parse_json, sealed, unsealed
from mosar.records.benchmarks import (
    AttentionBenchmark,
    DecodeBenchmark,
    ModelDecodeBenchmark,
    TrainingBenchmark,
)
from mosar.records.evaluation import EvaluationRecord, RetrievalRecord
from mosar.records.record import SCHEMA_VERSION, Record
from mosar.records.retrofit import RetrofitEvaluation, RetrofitNeedles, RetrofitSpeed
from mosar.records.training import TrainingRecord
from mosar.schema import decode

_KINDS: dict[str, type[Record]] = {
    cls.kind: cls
    for cls in (
        AttentionBenchmark,
        DecodeBenchmark,
        ModelDecodeBenchmark,
        TrainingBenchmark,
        TrainingRecord,
        EvaluationRecord,
        RetrievalRecord,
        RetrofitEvaluation,
        RetrofitNeedles,
        RetrofitSpeed,
    )
}


def record_line(record: Record) -> bytes:
    """A record as a line of a file, with its checksum."""
    return json.dumps(sealed(record.to_dict(), digits=LINE_DIGITS)).encode() + b"\n"


def append_record(path: Path | str, record: Record) -> None:
    """Appends one line to a file in one write, and flushes it to the disk."""
    line = record_line(record)
    with open(path, "ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                # A process died while writing the last line; do not join this one to it.
                line = b"\n" + line
        if file.write(line) != len(line):
            raise OSError(f"{path} took only a part of a record; is the disk full?")
        os.fsync(file.fileno())


def read_records(path: Path | str) -> list[Record]:
    """The records of a file, in order; DamagedFile names a line that was altered."""
    records = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                records.append(_decode(line))
            except (ValueError, TypeError, AttributeError) as error:
                raise DamagedFile(
                    f"{path}, line {number}: {error}; restore the file, or remove it to make "
                    "it again"
                ) from None
    return records


def _decode(line: bytes) -> Record:
    values, _ = unsealed(parse_json(line))
    schema, kind = values.pop("schema", None), values.pop("kind", None)
    if schema != SCHEMA_VERSION:
        raise ValueError(f"schema must be {SCHEMA_VERSION}, got {schema!r}")
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {sorted(_KINDS)}, got {kind!r}")
    values.pop("derived", None)
    # Older records lack what was added later, which says None then.
    later = {item.name: None for item in fields(_KINDS[kind]) if item.default is None}
    return decode(_KINDS[kind], later | values, _KINDS[kind].__name__, loose=True)
