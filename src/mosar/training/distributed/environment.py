"""The rank of this process, from torchrun or a launcher that sets the same variables."""

from __future__ import annotations

import os

from mosar.errors import TrainingError


def launched() -> tuple[int, int]:
    """The rank of this process, and the number of processes.

    From the environment variables of torch.distributed; a TrainingError if they contradict each
    other.
    """
    processes = _from_environment("WORLD_SIZE", "1")
    if processes == 1:
        return 0, 1
    rank = _from_environment("RANK", "")
    if rank >= processes:
        raise environment_error(f"RANK={rank} and WORLD_SIZE={processes}")
    return rank, processes


def _from_environment(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if not text.isdecimal() or (name == "WORLD_SIZE" and int(text) < 1):
        raise environment_error(f"{name}={text}" if text else f"{name} not set")
    return int(text)


def environment_error(what: str) -> TrainingError:
    return TrainingError(
        f"the environment is not that of a launcher ({what}): start several processes with "
        "torchrun --nproc-per-node N -m mosar train …, or unset WORLD_SIZE to train in one"
    )
