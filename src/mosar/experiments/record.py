"""Summarises a finished run folder in one small record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mosar.data.manifest import Manifest
from mosar.model.decoder import Decoder
from mosar.records import Cell, TrainingRecord
from mosar.training.config import RunConfig
from mosar.training.run_folder import read_config, read_data_fingerprint, read_metrics

# Points of the stored training curve, each the mean over a span of steps.
_POINTS = 200


def training_record(run: Path, cell: Cell, *, data: Path | None = None) -> TrainingRecord:
    """The configuration and the losses of `run`."""
    import torch

    config = read_config(run)
    train, valid = read_metrics(run, "train"), read_metrics(run, "valid")
    with torch.device("meta"):
        decoder = Decoder(config.model, config.attention)
    last = train[-1]["step"]
    return TrainingRecord(
        cell=cell,
        config=_portable(config),
        data=_data(config, data) | {"fingerprint": read_data_fingerprint(run)},
        parameters=sum(parameter.numel() for parameter in decoder.parameters()),
        step=last,
        tokens=last * config.tokens_per_step,
        seconds=_seconds(train, config),
        train_curve=_thinned([(line["step"], line["lm_loss"]) for line in train]),
        valid_curve=[[line["step"], line["lm_loss"]] for line in valid],
        reach_curve=[
            [line["step"], line["expected_reach"]]
            for line in valid
            if line["expected_reach"] is not None
        ],
    )


def _portable(config: RunConfig) -> dict[str, Any]:
    """The configuration with only the name of the data folder, not its path."""
    values = config.to_dict()
    values["data"]["folder"] = Path(config.data.folder).name
    return values


def _data(config: RunConfig, folder: Path | None) -> dict[str, Any]:
    if config.data.task != "text":
        return {"task": config.data.task}
    manifest = Manifest.read(folder or config.data.folder)
    return {
        "name": Path(config.data.folder).name,
        "tokenizer": manifest.tokenizer.origin,
        "vocab_size": manifest.tokenizer.vocab_size,
        "tokens": {name: split.tokens for name, split in manifest.splits.items()},
        "documents": {name: split.documents for name, split in manifest.splits.items()},
    }


def _seconds(train: list[dict[str, Any]], config: RunConfig) -> float | None:
    """From the tokens per second of each line, which cover the steps since the line before."""
    seconds, before = 0.0, 0
    for line in train:
        if not line["tokens_per_second"]:
            return None
        seconds += (line["step"] - before) * config.tokens_per_step / line["tokens_per_second"]
        before = line["step"]
    return seconds


def _thinned(curve: list[tuple[int, float]]) -> list[list[float]]:
    span = -(-len(curve) // _POINTS)
    pieces = [curve[start : start + span] for start in range(0, len(curve), span)]
    return [[piece[-1][0], sum(loss for _, loss in piece) / len(piece)] for piece in pieces]
