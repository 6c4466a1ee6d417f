"""What is evaluated: a run folder's configuration and one of its checkpoints as a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mosar.attention import Routing
from mosar.data.manifest import MANIFEST, Manifest
from mosar.data.tokenizer import Tokenizer, load_tokenizer
from mosar.errors import DamagedFile, ModelError
from mosar.files import check_folder
from mosar.geometries import Geometry, operator_routing
from mosar.model.decoder import Decoder
from mosar.records import Cell
from mosar.training.batches import data_fingerprint
from mosar.training.checkpoints import (
    Checkpoint,
    list_steps,
    load_parameters,
    read_checkpoint,
)
from mosar.training.config import RunConfig
from mosar.training.run_folder import (
    CHECKPOINTS,
    CONFIG,
    has_run,
    read_config,
    read_data_fingerprint,
)


@dataclass(frozen=True)
class LoadedRun:
    """One checkpoint, ready for evaluation."""

    run: Path
    config: RunConfig
    data_fingerprint: str
    """The fingerprint of its training data."""
    step: int
    checksum: str
    """sha256 of the parameters."""
    decoder: Decoder
    """In float32, whatever the precision of the training."""

    @classmethod
    def open(cls, run: Path, step: int | None = None) -> LoadedRun:
        """The checkpoint of `step`, by default the newest; an error says what is wrong.

        The folder is only read: another process may be training into it.
        """
        check_folder(run, "run folder", "mosar train")
        if not has_run(run):
            raise ModelError(
                f"{run} is not a run folder: it has no {CONFIG}; give a folder made by mosar train"
            )
        config, fingerprint = read_config(run), read_data_fingerprint(run)
        checkpoint = _read(run, step)
        if checkpoint.state.get("config_hash") != config.fingerprint():
            raise ModelError(
                f"{checkpoint.path} does not belong to the configuration in {run / CONFIG}"
            )
        decoder = Decoder(config.model, config.attention)
        decoder.begin_step(checkpoint.step, _schedule(config))
        load_parameters({p: name for name, p in decoder.named_parameters()}, checkpoint)
        decoder.to(_device(config.train.device)).eval().requires_grad_(False)
        checksum = checkpoint.model_checksum
        return cls(run, config, fingerprint, checkpoint.step, checksum, decoder)

    def find_data(self, data: Path | None = None) -> Path:
        """The folder of its data, or a copy in `data`; a ModelError for other contents."""
        folder = Path(self.config.data.folder) if data is None else data
        if data is None and not (folder / MANIFEST).exists():
            raise ModelError(
                f"the data of {self.run} is no longer in {folder}; give its path with --data"
            )
        if data_fingerprint(Manifest.read(folder)) != self.data_fingerprint:
            raise ModelError(
                f"{folder} is not the data that {self.run} was trained on: its contents differ; "
                "give the folder it was trained on, or a copy, with --data"
            )
        return folder

    def open_tokenizer(self, data: Path | None = None) -> tuple[Manifest, Tokenizer]:
        """The manifest and the tokenizer of its data; an error where it is not there."""
        folder = self.find_data(data)
        return Manifest.read(folder), load_tokenizer(folder)

    @property
    def schedule(self) -> int:
        """The steps that the schedules of training span."""
        return _schedule(self.config)

    @property
    def train_length(self) -> int:
        """N."""
        return self.config.model.max_length

    @property
    def geometry(self) -> Geometry:
        """That of the first layer; the facts of all layers are the same."""
        return self.decoder.geometries[0]

    @contextmanager
    def executing(self, routing: str, length: int) -> Iterator[Routing]:
        """Executes texts of this length in a routing or mode; yields the operators' routing."""
        mode = routing if routing in self.geometry.modes else None
        for geometry in self.decoder.geometries:
            geometry.enter_mode(mode, length)
        try:
            yield operator_routing(routing)
        finally:
            for geometry in self.decoder.geometries:
                geometry.enter_mode(None)

    def operator(self, routing: str) -> str:
        """What computes a routing or mode: the routing that it is executed as, or the mode."""
        if routing in self.geometry.modes:
            return routing
        return self.geometry.executed(operator_routing(routing))

    @property
    def device(self) -> torch.device:
        return self.decoder.embedding.weight.device

    @property
    def cell(self) -> Cell:
        """The cell of a run that is in no experiment."""
        config = self.config
        return Cell(
            variant=config.variant or config.attention.geometry,
            preset=config.preset,
            seed=config.train.seed,
        )


def _read(run: Path, step: int | None) -> Checkpoint:
    folder = run / CHECKPOINTS
    steps = list_steps(folder)
    if not steps:
        raise ModelError(f"{run} has no checkpoint yet; resume with: mosar train --out {run}")
    if step is not None and step not in steps:
        raise ModelError(f"{run} has no checkpoint of step {step}; there are {_listed(steps)}")
    chosen = steps[-1] if step is None else step
    try:
        return read_checkpoint(folder, chosen)
    except DamagedFile as error:
        others = [other for other in steps if other != chosen and _is_whole(folder, other)]
        alone = "it is the only one" if len(steps) == 1 else "no other one is complete"
        advice = f"others are there for --step: {_listed(others)}" if others else alone
        raise ModelError(
            f"the checkpoint of step {chosen} in {run} is damaged ({error}); {advice}"
        ) from None


def _is_whole(folder: Path, step: int) -> bool:
    try:
        read_checkpoint(folder, step)
    except DamagedFile:
        return False
    return True


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _schedule(config: RunConfig) -> int:
    return config.train.decay_steps or config.train.steps


def _device(name: str) -> torch.device:
    """Where the run was trained, or the CPU where this machine has no such device."""
    device = torch.device(name)
    found = torch.accelerator.current_accelerator(check_available=True)
    there = found is not None and found.type == device.type
    if there and (device.index or 0) < torch.accelerator.device_count():
        return device
    return torch.device("cpu")
