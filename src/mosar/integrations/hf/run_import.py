"""An exported model as a run folder again, for `mosar evaluate`, `mosar train` and the rest.

The optimizer's state was not exported: training goes on with a new one.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mosar.data.config import DataConfig
from mosar.data.manifest import Manifest
from mosar.errors import ModelError
from mosar.integrations.hf.config import MosarDecoderConfig
from mosar.integrations.hf.folders import load_model, new_folder
from mosar.records import environment
from mosar.training.batches import data_fingerprint
from mosar.training.checkpoints import write_checkpoint
from mosar.training.config import RunConfig, TrainConfig
from mosar.training.run_folder import CHECKPOINTS, METRICS, MetricsFile, write_config


def import_model(folder: Path | str, out: Path | str, *, data: Path | None = None) -> Path:
    """Makes the run folder `out` from an exported model, and returns it.

    data: the dataset of the run; one that was not exported from a run (say, trained by `Trainer`)
    needs it, and stands at step 0.
    """
    folder, out = Path(folder), Path(out)
    model = load_model(folder, dtype=torch.float32)
    origin = model.config.provenance
    fingerprint = None if data is None else data_fingerprint(Manifest.read(data))
    if origin is None:
        if fingerprint is None:
            raise ModelError(
                f"{folder} was not exported from a run: say with --data which dataset it belongs to"
            )
        config, step, metrics = _new_run(model.config), 0, []
    else:
        config, step, metrics = _old_run(model.config, folder)
        if fingerprint is not None and fingerprint != origin["data_fingerprint"]:
            raise ModelError(
                f"--data {data} is not the data that the run of {folder} was trained on"
            )
        fingerprint = origin["data_fingerprint"]
    if data is not None:
        config = replace(config, data=replace(config.data, folder=str(data.absolute())))
    with new_folder(out) as staging:
        write_config(staging, config, fingerprint)
        write_checkpoint(
            staging / CHECKPOINTS,
            step,
            dict(model.to_decoder().named_parameters()),
            {},
            _state(config) | {"metrics": _write_metrics(staging / METRICS, metrics)},
        )
    return out


def _write_metrics(path: Path, lines: list[dict[str, Any]]) -> str:
    """Writes the lines and returns their link."""
    file = MetricsFile(path)
    try:
        for line in lines:
            file.append(line)
        file.sync()
    finally:
        file.close()
    return file.link


def _state(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint knows besides tensors, as at the beginning of a run."""
    seed = torch.Generator().manual_seed(config.train.seed).get_state()
    return {
        "config_hash": config.fingerprint(),
        "rng": {"torch": base64.b64encode(seed.numpy().tobytes()).decode()},
        "environment": environment(),
    }


def _new_run(config: MosarDecoderConfig) -> RunConfig:
    """A run that starts from a model whose training is unknown."""
    return RunConfig(
        model=config.model_config,
        attention=config.attention_config,
        data=DataConfig(),
        train=TrainConfig(steps=1),
        variant=config.attention_config.geometry,
    )


def _old_run(
    config: MosarDecoderConfig, folder: Path
) -> tuple[RunConfig, int, list[dict[str, Any]]]:
    """The configuration, step and last metrics of the run that a model was exported from."""
    try:
        origin = config.provenance or {}
        run, step = RunConfig.from_dict(origin["run"]), origin["step"]
        metrics = [dict(line) for line in origin["metrics"]]
        if isinstance(step, bool) or not isinstance(step, int) or not origin["data_fingerprint"]:
            raise ValueError(f"its step is {step!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"the provenance in the configuration of {folder} is damaged: {error}"
        ) from None
    # A vocabulary may have grown since.
    if run.model != config.model_config:
        run = replace(run, model=config.model_config)
    if run.attention != config.attention_config:
        run = replace(run, attention=config.attention_config)
    return run, step, metrics
