"""The evaluations of a run folder: one record per file, written whole or not at all.

RUN/evaluations/step-00001600-len-02048-sparse.json
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mosar.files import replace_synced
from mosar.records import EvaluationRecord, RetrievalRecord, read_records, record_line

EVALUATIONS = "evaluations"
Evaluation = EvaluationRecord | RetrievalRecord


def evaluation_path(run: Path, step: int, length: int, routing: str) -> Path:
    return run / EVALUATIONS / f"step-{step:08d}-len-{length:05d}-{routing}.json"


def write_evaluation(run: Path, record: Evaluation) -> Path:
    """Writes a record, replacing an older one of the same step, length and routing."""
    path = evaluation_path(run, record.step, record.length, record.routing)
    path.parent.mkdir(exist_ok=True)
    replace_synced(path, record_line(record))
    return path


def read_evaluation(
    run: Path, step: int, length: int, routing: str, report: Callable[[str], None]
) -> Evaluation | None:
    """The stored record, or None; `report` is told what is wrong with a damaged one.

    It can be computed again, so a damaged file stops nobody.
    """
    path = evaluation_path(run, step, length, routing)
    try:
        (record,) = read_records(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        record = None
    if isinstance(record, EvaluationRecord | RetrievalRecord):
        return record
    report(f"{path} is damaged or was altered; computing it again")
    return None
