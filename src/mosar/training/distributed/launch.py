"""Makes the team of processes for a configuration and a launcher's environment."""

from __future__ import annotations

from mosar.errors import TrainingError
from mosar.training.config import DistributedConfig, RunConfig
from mosar.training.distributed.environment import launched
from mosar.training.distributed.mesh import check_mesh
from mosar.training.distributed.team import Team


def open_team(config: RunConfig) -> Team:
    """The team of this process; a TrainingError if `config.distributed` does not fit."""
    rank, processes = launched()
    if processes == 1 and config.distributed == DistributedConfig(
        timeout=config.distributed.timeout
    ):
        return Team()
    try:
        mesh = check_mesh(config, processes)
    except TrainingError as error:
        error.reported_by_peer = rank > 0
        raise
    if processes == 1:
        return Team()
    from mosar.training.distributed.process_team import ProcessTeam

    return ProcessTeam(config, mesh)
