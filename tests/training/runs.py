"""Reading what a run left, to compare two of them."""

import json
from pathlib import Path

from mosar.training.checkpoints import list_steps
from mosar.training.run_folder import read_metrics


def steps(out: Path) -> list[int]:
    return list_steps(out / "checkpoints")


def lines(out: Path) -> list[dict]:
    """The metrics without what depends on the clock."""
    return [{**line, "tokens_per_second": None} for line in read_metrics(out)]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out, "train")]


def tensors(out: Path) -> dict[str, bytes]:
    """The newest checkpoint's parameters and optimizer, bit for bit."""
    folder = out / "checkpoints" / f"step-{steps(out)[-1]:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def assert_same_run(out: Path, other: Path) -> None:
    assert lines(out) == lines(other)
    assert tensors(out) == tensors(other)


def leftovers(out: Path) -> list[str]:
    """Files that no finished or interrupted run should leave."""
    known = {"config.json", "metrics.jsonl", "checkpoints", ".lock"}
    found = [path.name for path in out.iterdir() if path.name not in known]
    checkpoints = out / "checkpoints"
    if checkpoints.is_dir():
        found += [path.name for path in checkpoints.iterdir() if not path.name.startswith("step-")]
    return found


def saved_config(out: Path) -> dict:
    return json.loads((out / "config.json").read_text())
