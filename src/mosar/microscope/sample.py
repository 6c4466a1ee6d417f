"""The page of a fixed paragraph that an experiment keeps for a routed variant.

DIR/looks/<cell>.html    made from the cell's run folder, and kept when that folder is gone
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from mosar.microscope.look import look


def sample_text() -> str:
    """The paragraph: names, a number and a piece of code, some of them told again far away."""
    return files("mosar.microscope").joinpath("sample.txt").read_text(encoding="utf-8")


def keep_look(run: Path, page: Path) -> bool:
    """Writes `page` for the model in `run` unless it is newer than the run's checkpoints.

    Returns whether it was written.
    """
    newest = max((path.stat().st_mtime for path in run.glob("checkpoints/*/state.json")), default=0)
    if page.exists() and page.stat().st_mtime >= newest:
        return False
    seen = look(run, sample_text())
    page.parent.mkdir(exist_ok=True)
    seen.save(page)
    return True
