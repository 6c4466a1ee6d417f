"""Reads tensors that several processes wrote in parts.

    shard-00001-model-00001-of-00002.safetensors   process 1's parts of the parameters
    shard-00001-model-00002-of-00002.safetensors   process 1's parts of the optimizer's state

The names and the headers are those of torch.distributed.checkpoint's safetensors storage: a header
holds, under DCP_SHARDING_INFO, where each part begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from mosar.files import parse_json

PARAMETERS, OPTIMIZER_STATE = 1, 2
_PREFIX = "shard-{process:05d}-"
_SUFFIX = "-model-{kind:05d}-of-00002.safetensors"


def shard_prefix(rank: int) -> str:
    """The prefix of a process's files."""
    return _PREFIX.format(process=rank + 1)


def shards_of(names: Iterable[str], kind: int) -> list[str]:
    """The files of one kind among `names`, in order."""
    ending = _SUFFIX.format(kind=kind)
    return sorted(name for name in names if name.startswith("shard-") and name.endswith(ending))


def assemble(files: Iterable[Path]) -> dict[str, Tensor]:
    """The whole tensors; a ValueError if a part is missing."""
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            offsets = parse_json((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                begin = offsets.get(name, {}).get("saved_offsets", [0] * tensor.dim())
                parts.setdefault(name, []).append((begin, tensor))
    return {name: _join(name, pieces) for name, pieces in parts.items()}


def _join(name: str, pieces: list[tuple[list[int], Tensor]]) -> Tensor:
    shape = [
        max(begin[dim] + piece.shape[dim] for begin, piece in pieces)
        for dim in range(pieces[0][1].dim())
    ]
    whole = torch.empty(shape, dtype=pieces[0][1].dtype)
    if sum(piece.numel() for _, piece in pieces) != whole.numel():
        raise ValueError(f"a part of {name} is missing")
    for begin, piece in pieces:
        place = tuple(slice(b, b + n) for b, n in zip(begin, piece.shape, strict=True))
        whole[place] = piece
    return whole
