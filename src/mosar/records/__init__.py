"""The schema of every result: JSON objects, one per line, appended and never changed.

A line holds `schema`, `kind`, `created`, `environment`, the fields of its kind, and `derived`: what
follows from them, written for readers of the file and computed again when it is read here. Its
`checksum` is compared where it is read; records of earlier versions have none.
"""

from __future__ import annotations

from mosar.records.benchmarks import (
    AttentionBenchmark,
    Benchmark,
    DecodeBenchmark,
    ModelDecodeBenchmark,
    TrainingBenchmark,
)
from mosar.records.evaluation import EvaluationRecord, RetrievalRecord
from mosar.records.files import append_record, read_records, record_line
from mosar.records.machine import environment
from mosar.records.measurement import ErrorCheck, Measurement
from mosar.records.record import SCHEMA_VERSION, Record
from mosar.records.retrofit import RetrofitEvaluation, RetrofitNeedles, RetrofitSpeed
from mosar.records.training import Cell, TrainingRecord

__all__ = [
    "SCHEMA_VERSION",
    "AttentionBenchmark",
    "Benchmark",
    "Cell",
    "DecodeBenchmark",
    "ErrorCheck",
    "EvaluationRecord",
    "Measurement",
    "ModelDecodeBenchmark",
    "Record",
    "RetrievalRecord",
    "RetrofitEvaluation",
    "RetrofitNeedles",
    "RetrofitSpeed",
    "TrainingBenchmark",
    "TrainingRecord",
    "append_record",
    "environment",
    "read_records",
    "record_line",
]
