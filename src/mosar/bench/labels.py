"""Labels to measure with: drawn with the paper's shares at 8k, alone or in runs, or saved ones.

independent   every token on its own: the hardest case, no two neighbours agree
clustered     runs of equal regime, geometric lengths with mean 32, the same shares
FILE.npz      integer arrays `labels_q` and `labels_k` [tokens], e.g. of a trained model
"""

from __future__ import annotations

import zipfile

import numpy as np
import torch
from torch import Tensor

from mosar.core.config import MoSARConfig

DRAWN = ("independent", "clustered")
# The shares of S, M and G among queries and keys at 8192 tokens, from the paper's routing table.
QUERY_SHARES = (0.734, 0.151, 0.115)
KEY_SHARES = (0.640, 0.179, 0.181)
MEAN_RUN = 32


def check_source(source: str) -> None:
    if source not in DRAWN and not source.endswith(".npz"):
        raise ValueError(f"labels must be one of {', '.join(DRAWN)} or FILE.npz, got {source!r}")


def make_labels(source: str, length: int, seed: int, config: MoSARConfig) -> tuple[Tensor, Tensor]:
    """labels_q and labels_k, [length] int64 each; a ValueError where the source has none."""
    check_source(source)
    if source not in DRAWN:
        return _load(source, length, config)
    if config.num_regimes != len(QUERY_SHARES):
        raise ValueError(
            f"{source} labels are drawn for {len(QUERY_SHARES)} regimes, the configuration has "
            f"{config.num_regimes}; give labels in a file"
        )
    generator = torch.Generator().manual_seed(seed)
    draw = _draw_independent if source == "independent" else _draw_clustered
    labels_q = draw(QUERY_SHARES, length, generator)
    return labels_q, draw(KEY_SHARES, length, generator)


def _draw_independent(shares: tuple[float, ...], length: int, generator: torch.Generator) -> Tensor:
    return torch.multinomial(torch.tensor(shares), length, replacement=True, generator=generator)


def _draw_clustered(shares: tuple[float, ...], length: int, generator: torch.Generator) -> Tensor:
    # A run ends after each token with probability 1 / MEAN_RUN: run lengths are geometric.
    ends = torch.rand(length, generator=generator) < 1 / MEAN_RUN
    run = ends.cumsum(dim=0)
    return _draw_independent(shares, int(run[-1]) + 1, generator)[run]


def _load(path: str, length: int, config: MoSARConfig) -> tuple[Tensor, Tensor]:
    """The first `length` labels of a file; OSError where it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            labels = [np.asarray(arrays[name]) for name in ("labels_q", "labels_k")]
    except KeyError as error:
        raise ValueError(f"{path} must hold labels_q and labels_k: {error.args[0]}") from None
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise ValueError(f"{path} is not a file of arrays as numpy.savez writes it") from None
    for name, values in zip(("labels_q", "labels_k"), labels, strict=True):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise ValueError(
                f"{path}: {name} must be integers [tokens], got {values.dtype} {values.shape}"
            )
        if len(values) < length:
            raise ValueError(f"{path}: {name} has {len(values)} tokens, {length} are needed")
        if values.size and not 0 <= values.min() <= values.max() < config.num_regimes:
            raise ValueError(f"{path}: {name} must lie in 0..{config.num_regimes - 1}")
    labels_q, labels_k = (torch.as_tensor(v[:length].astype(np.int64)) for v in labels)
    return labels_q, labels_k
