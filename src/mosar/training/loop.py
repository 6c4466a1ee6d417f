"""The training loop, one for every variant.

    for each step: a batch → loss and gradient → clipped AdamW update → metrics
                   → now and then an evaluation → now and then a checkpoint

Every step is a function of the configuration, the data and the parameters before it, so that a run
that goes on from a checkpoint is bit for bit the run that was never interrupted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mosar.errors import (
    LostProcessError,
    NonFiniteError,
    TrainingError,
    TrainingInterrupted,
)
from mosar.model.parameters import parameter_parts, total
from mosar.records import environment
from mosar.training import checkpoints
from mosar.training.batches import Batches, TaskBatches, open_batches
from mosar.training.checkpoints import Checkpoint, DamagedCheckpoint
from mosar.training.config import RunConfig
from mosar.training.distributed.launch import open_team
from mosar.training.distributed.team import Team, held_by_first
from mosar.training.learner import Learner, evaluate, update
from mosar.training.precision import check_precision
from mosar.training.progress import Reporter
from mosar.training.run_folder import (
    CHECKPOINTS,
    METRICS,
    MetricsFile,
    check_same_run,
    foreign_file,
    has_made_a_step,
    has_run,
    locked,
    read_config,
    read_data_fingerprint,
    read_metrics,
    truncate_metrics,
    write_config,
)
from mosar.training.stopping import StopRequest, stop_requests
from mosar.training.tensorboard import Board, check_tensorboard, tensorboard_writer


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    out: Path
    step: int
    resumed_from: int
    """The step of the checkpoint it went on from; 0: from the beginning."""
    loss: float
    """Of the last step that was logged."""
    valid_loss: float
    """Cross-entropy on the validation windows after the last step."""


def train(
    config: RunConfig,
    out: Path | str,
    *,
    progress: bool = True,
    resume: bool = True,
    reporter: Reporter | None = None,
) -> TrainResult:
    """Trains into the run folder `out`, going on from its newest checkpoint if there is one.

    With `resume` off, a folder that holds a run is refused. A TrainingError says what stopped the
    run; SIGINT and SIGTERM save first and raise TrainingInterrupted. `reporter` shows the run
    instead of the usual bar.
    """
    out = Path(out)
    team = open_team(config)
    with _explained_errors(out), team.running(out):
        with team.together():
            _check_memory(config, team)
            check_precision(config.train)
            check_tensorboard(config)
        if not team.is_first:
            reporter = Reporter.silent()
        reporter = reporter or Reporter(config.train.steps, progress=progress)
        with (
            held_by_first(team, locked(out)),
            stop_requests(patient=team.num_processes > 1) as stop,
            torch.random.fork_rng(devices=[]),
        ):
            return _train(config, out, team, stop, reporter, resume=resume)


def _train(
    config: RunConfig, out: Path, team: Team, stop: StopRequest, reporter: Reporter, *, resume: bool
) -> TrainResult:
    torch.manual_seed(config.train.seed)
    with team.together():
        batches = open_batches(config, team.share)
    _check_agreement(team, config, batches)
    found = team.from_first(lambda: _find_step(config, out, batches, reporter, resume=resume))
    learner = Learner.build(config, batches, initialise=found is None, team=team)
    if found is not None:
        # That of an imported model may be of step 0.
        _restore(learner, checkpoints.open_checkpoint(out / CHECKPOINTS, found), reporter)
    start = found or 0
    team.from_first(lambda: _check_space(learner, out))
    # Only now is the folder this run's: what could not even be built must not keep it.
    link = team.from_first(lambda: _claim(config, out, batches, start, reporter))
    with _writers(config, out, start, team, link) as writers, reporter.running(start):
        for line in _steps(learner, out, start, stop, writers.metrics):
            writers.write(line)
            reporter.show(line)
    losses = team.from_first(lambda: _last_losses(out))
    return TrainResult(out, config.train.steps, start, *losses)


@dataclass
class _Writers:
    """Where the lines of the metrics go; nowhere but in the first process."""

    metrics: MetricsFile | None = None
    board: Board | None = None

    def write(self, line: dict[str, Any]) -> None:
        if self.metrics is not None and self.board is not None:
            self.metrics.append(line)
            self.board.write(line)


@contextmanager
def _writers(config: RunConfig, out: Path, start: int, team: Team, link: str) -> Iterator[_Writers]:
    if not team.is_first:
        yield _Writers()
        return
    metrics = MetricsFile(out / METRICS, link)
    try:
        with tensorboard_writer(config, out, start) as board:
            yield _Writers(metrics, board)
    finally:
        metrics.close()


def _steps(
    learner: Learner, out: Path, start: int, stop: StopRequest, metrics: MetricsFile | None
) -> Iterator[dict[str, Any]]:
    """Runs the steps after `start`; yields the lines of the metrics, saves checkpoints."""
    train, team = learner.config.train, learner.team
    saved = start
    if start == 0:
        yield evaluate(learner, 0)
    # Several processes can only stop at the same place: the end of a step.
    within_step = stop if team.num_processes == 1 else None
    clock = Clock()
    for step in range(start + 1, train.steps + 1):
        with clock:
            line = update(learner, step, within_step)
        if line is None:
            raise _interrupted(learner, out, step - 1, saved, stop, metrics)
        clock.tokens += learner.config.tokens_per_step
        last = step == train.steps
        if step % train.log_every == 0 or last:
            yield line | {"tokens_per_second": clock.lap()}
        if step % train.eval_every == 0 or last:
            yield evaluate(learner, step)
        milestone = train.keep_every and step % train.keep_every == 0
        if step % train.checkpoint_every == 0 or milestone or last:
            save(learner, out, step, metrics)
            saved = step
        if team.stopped(stop) and not last:
            raise _interrupted(learner, out, step, saved, stop, metrics)


class Clock:
    """Tokens a second of the steps alone: no evaluation, no checkpoint."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.perf_counter() - self._start

    def lap(self) -> float:
        rate = self.tokens / max(self.seconds, 1e-9)
        self.tokens, self.seconds = 0, 0.0
        return rate


def save(learner: Learner, out: Path, step: int, metrics: MetricsFile | None = None) -> Path:
    """Writes the checkpoint of `step`, then removes those that are not kept."""
    if metrics is not None:
        # A checkpoint promises that the lines up to it are there.
        metrics.sync()
    train, folder, team = learner.config.train, out / CHECKPOINTS, learner.team
    state = {
        "config_hash": learner.config.fingerprint(),
        # Every process has the same: seeded alike, and a step draws nothing.
        "rng": {"torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()},
        "environment": environment(),
        "mesh": team.describe(),
        "metrics": None if metrics is None else metrics.link,
    }
    path = team.write_checkpoint(learner, folder, step, state)
    team.from_first(
        lambda: checkpoints.prune_checkpoints(folder, train.keep_last, train.keep_every)
    )
    return path


def _check_agreement(team: Team, config: RunConfig, batches: Batches | TaskBatches) -> None:
    """A TrainingError where processes were started with different configurations or data."""
    values = {**config.flat(), "data.folder": None, "data": batches.fingerprint()}
    own = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    first = team.from_first(lambda: own)
    with team.together():
        if own != first:
            raise TrainingError(
                "this process has another configuration or other data than the first one; start "
                "all with the same options and the same data"
            )


def _find_step(
    config: RunConfig,
    out: Path,
    batches: Batches | TaskBatches,
    reporter: Reporter,
    *,
    resume: bool,
) -> int | None:
    """The step of the checkpoint to go on from, if any; refuses a folder of something else."""
    folder = out / CHECKPOINTS
    if has_run(out) and has_made_a_step(out) and not resume:
        raise TrainingError(f"{out} already holds a run; give another --out")
    if not has_run(out):
        if checkpoints.list_steps(folder):
            raise TrainingError(f"{out} has checkpoints but no config.json; give another --out")
        if (other := foreign_file(out, (CHECKPOINTS, METRICS))) is not None:
            raise TrainingError(
                f"{out} is no run, and not empty (it holds {other}); give another --out"
            )
        return None
    if has_made_a_step(out):
        check_same_run(out, config, batches.fingerprint(), reporter.say)
    else:
        # Whatever it was configured as, nothing came of it; but it must be a run.
        read_config(out)
    checkpoints.remove_unfinished(folder)
    try:
        checkpoint = checkpoints.newest_checkpoint(folder, reporter.say)
    except DamagedCheckpoint as error:
        raise TrainingError(f"{error}; give another --out to start again") from None
    if checkpoint is not None:
        if checkpoint.step > config.train.steps:
            raise TrainingError(
                f"{out} is at step {checkpoint.step}, beyond train.steps={config.train.steps}"
            )
        if checkpoint.state["config_hash"] != config.fingerprint():
            raise TrainingError(f"{checkpoint.path} belongs to a run of another configuration")
    return None if checkpoint is None else checkpoint.step


def _claim(
    config: RunConfig, out: Path, batches: Batches | TaskBatches, start: int, reporter: Reporter
) -> str:
    """Makes `out` the folder of this run; the link of the metrics that stay."""
    if start == config.train.steps and not (out / METRICS).exists():
        raise TrainingError(
            f"the run is finished, and {out / METRICS} is missing; put it back, or train on with "
            "--set train.steps=…"
        )
    # Without a checkpoint even the evaluation before the first step is done again.
    link = truncate_metrics(out / METRICS, start if start else -1, reporter.say)
    fingerprint = batches.fingerprint()
    if not has_run(out) or (read_config(out), read_data_fingerprint(out)) != (config, fingerprint):
        write_config(out, config, fingerprint)
    return link


def _restore(learner: Learner, checkpoint: Checkpoint, reporter: Reporter) -> None:
    learner.team.read_checkpoint(learner, checkpoint)
    state = base64.b64decode(checkpoint.state["rng"]["torch"])
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    finished = checkpoint.step == learner.config.train.steps
    reporter.say(
        f"finished already, at step {checkpoint.step}; --set train.steps=… goes further"
        if finished
        else f"going on from step {checkpoint.step}"
    )
    was, now = checkpoint.state["environment"], environment()
    changed = [
        f"{key} {was.get(key)} → {now[key]}"
        for key in ("torch", "cpu", "cpu_capability", "threads")
        if was.get(key) != now[key]
    ]
    mesh = checkpoint.state.get("mesh")
    if mesh != learner.team.describe():
        changed.append(f"processes {_mesh(mesh)} → {_mesh(learner.team.describe())}")
    if changed:
        reporter.say(f"{', '.join(changed)}: the last bits may differ from a run in one go")


def _mesh(mesh: dict[str, int] | None) -> str:
    return " x ".join(f"{name} {n}" for name, n in mesh.items()) if mesh else "1"


def _interrupted(
    learner: Learner,
    out: Path,
    step: int,
    saved: int,
    stop: StopRequest,
    metrics: MetricsFile | None,
) -> TrainingInterrupted:
    """The exception to raise, once `step` is saved."""
    if saved != step:
        save(learner, out, step, metrics)
    assert stop.signal_number is not None
    kept = f"saved at step {step}" if step else "before the first step was done"
    total = learner.config.train.steps
    go_on = f"go on with: mosar train --out {out}"
    if learner.team.num_processes > 1:
        go_on = "the same job goes on"
    message = f"stopped, {kept} of {total}; {go_on}"
    error = TrainingInterrupted(message, stop.signal_number)
    error.reported_by_peer = not learner.team.is_first
    return error


def _check_memory(config: RunConfig, team: Team) -> None:
    """A model that cannot fit is refused before anything is made."""
    parameters = total(parameter_parts(config.model, config.attention))
    # The gradient and two moments besides; other devices hold those, but get the parameters here.
    copies = 4 if torch.device(config.train.device).type == "cpu" else 1
    needed = 4 * copies * parameters / team.num_processes
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        names = ("vocab_size", "hidden_size", "num_layers", "num_heads", "head_dim", "ffn_size")
        sizes = ", ".join(f"model.{name}={getattr(config.model, name)}" for name in names)
        names = ("router_hidden", "routing_groups")
        sizes += "".join(f", attention.{name}={getattr(config.attention, name)}" for name in names)
        raise TrainingError(
            f"a model with {sizes} has {parameters:.4g} parameters; to train it takes "
            f"{needed / 1e9:.4g} GB of memory, and this machine has {there / 1e9:.4g} GB"
        )


def _check_space(learner: Learner, out: Path) -> None:
    """A run must not find out at its first checkpoint that there is no room for one."""
    # Parameters and two moments of each.
    needed = 3 * sum(parameter.nbytes for parameter in learner.names)
    free = shutil.disk_usage(out).free
    if free < needed:
        raise TrainingError(
            f"{out} has {free / 1e6:,.1f} MB free, and one checkpoint takes {needed / 1e6:,.1f} MB"
        )


@contextmanager
def _explained_errors(out: Path) -> Iterator[None]:
    """Says with what stopped the run what is left of it."""
    try:
        yield
    except NonFiniteError as error:
        raise _like(error, f"{error}; the run stopped, {_last_good(out)}") from None
    except LostProcessError as error:
        raise _like(error, f"{error}; {_last_good(out)}, start the job again") from None
    except OSError as error:
        where = error.filename or out
        reason = error.strerror or str(error)
        left = f"; {_last_good(out)}" if out.is_dir() else ""
        raise TrainingError(f"{where}: {reason}{left}") from error
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for memory of the CPU that it cannot have.
        if isinstance(error, TrainingError) or not _is_out_of_memory(error):
            raise
        line = str(error).partition("\n")[0] or "out of memory"
        raise TrainingError(
            f"{line}; {_last_good(out)}; a smaller train.micro_batch (with a larger "
            "train.accumulation) or a smaller model takes less memory"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)


def _like(error: TrainingError, message: str) -> TrainingError:
    said = type(error)(message)
    said.reported_by_peer = error.reported_by_peer
    return said


def _last_good(out: Path) -> str:
    steps = checkpoints.list_steps(out / CHECKPOINTS)
    return f"the last checkpoint is that of step {steps[-1]}" if steps else "no checkpoint is lost"


def _last_losses(out: Path) -> list[float]:
    """Of the last step that was logged, and of the last evaluation."""
    losses = {line["split"]: line["lm_loss"] for line in read_metrics(out)}
    return [losses["train"], losses["valid"]]
