"""`mosar consolidate`: turns a run of several processes into a run of one."""

from __future__ import annotations

from mosar.cli.app import command
from mosar.cli.options import NewFolder, Run, Step, check_run


@command("consolidate", stopped="stopped; nothing was left behind")
def consolidate(run: Run, out: NewFolder, step: Step = None) -> None:
    """Merge the parts of a checkpoint of several processes into one file, in a new run folder.

    mosar evaluate and mosar train can read the old and the new run folder. Other tools expect a
    checkpoint in one file, model.safetensors. The parameters must fit into the memory of one
    machine.

    Example: mosar consolidate runs/cluster --out runs/plain
    """
    check_run(run)
    from mosar.training.distributed import consolidate as consolidation

    print(f"{out}: step {consolidation.consolidate(run, out, step)} of {run}")
