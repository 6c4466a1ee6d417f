"""`mosar consolidate`: a run of several processes as one that a single process wrote."""

from __future__ import annotations

from mosar.cli.app import command
from mosar.cli.options import NewFolder, Run, Step, check_run


@command("consolidate", stopped="stopped; nothing was left behind")
def consolidate(run: Run, out: NewFolder, step: Step = None) -> None:
    """Make a plain run folder of one that several processes wrote.

    Evaluating and going on read either kind; this one is for tools that expect a checkpoint as
    model.safetensors. It takes one machine with room for the parameters.

    Example: mosar consolidate runs/cluster --out runs/plain
    """
    check_run(run)
    from mosar.training.distributed import consolidate as consolidation

    print(f"{out}: step {consolidation.consolidate(run, out, step)} of {run}")
