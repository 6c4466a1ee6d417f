"""The evaluations of a run folder: one record a file, whole or not there.

RUN/evaluations/step-00001600-len-02048-sparse.json
"""

from __future__ import annotations

import json
from pathlib import Path

from mosar.records import EvaluationRecord, RetrievalRecord, read_records
from mosar.training.checkpoints import replace_synced

EVALUATIONS = "evaluations"
Evaluation = EvaluationRecord | RetrievalRecord


def evaluation_path(run: Path, step: int, length: int, routing: str) -> Path:
    return run / EVALUATIONS / f"step-{step:08d}-len-{length:05d}-{routing}.json"


def write_evaluation(run: Path, record: Evaluation) -> Path:
    """Writes one, in place of an older one of the same step, length and routing."""
    path = evaluation_path(run, record.step, record.length, record.routing)
    path.parent.mkdir(exist_ok=True)
    # On one line, so that `read_records` reads it.
    replace_synced(path, json.dumps(record.to_dict(), allow_nan=False).encode() + b"\n")
    return path


def read_evaluation(run: Path, step: int, length: int, routing: str) -> Evaluation | None:
    """The one that is there; None where there is none, or none that can be read."""
    try:
        (record,) = read_records(evaluation_path(run, step, length, routing))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, EvaluationRecord | RetrievalRecord) else None
