"""Which data a run reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from mosar.core.checks import check_counts

Task = Literal["text", "passkey", "recall"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The `data.` part of a run's configuration."""

    folder: str = "data/stdlib"
    """A dataset as `mosar prepare` makes it."""
    isolate_documents: bool = False
    """Whether attention stays within a document; by default it crosses documents."""
    seed: int = 0
    """Seed of the order of the windows, which differs in every epoch, or of a task's windows."""
    task: Task = "text"
    """"text" reads `folder`; "passkey" and "recall" generate windows (see tasks.py)."""

    def __post_init__(self) -> None:
        if not isinstance(self.folder, (str, os.PathLike)) or not os.fspath(self.folder):
            raise ValueError(f"folder must be a path, got {self.folder!r}")
        object.__setattr__(self, "folder", os.fspath(self.folder))
        if not isinstance(self.isolate_documents, bool):
            raise ValueError(
                f"isolate_documents must be true or false, got {self.isolate_documents!r}"
            )
        check_counts(self, {"seed": 0})
        if self.task not in get_args(Task):
            raise ValueError(f"task must be one of {get_args(Task)}, got {self.task!r}")
        if self.task != "text" and self.isolate_documents:
            raise ValueError(f"isolate_documents must be false if task is {self.task!r}")
