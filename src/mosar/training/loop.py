"""The training loop, one for every variant and for retrofits.

    for each step: a batch → loss and gradient → clipped AdamW update → metrics
                   → now and then an evaluation → now and then a checkpoint

Every step is a function of the configuration, the data and the parameters before it. A run that is
resumed from a checkpoint is therefore bit for bit the run that was never interrupted.
"""

from __future__ import annotations

import base64
import ctypes
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mosar.errors import (
    DamagedFile,
    LostProcessError,
    MosarError,
    NonFiniteError,
    TrainingError,
    TrainingInterrupted,
)
from mosar.records import environment
from mosar.training import checkpoints
from mosar.training.checkpoints import Checkpoint
from mosar.training.config import RunConfig
from mosar.training.distributed.launch import open_team
from mosar.training.distributed.team import held_by_first
from mosar.training.learner import Learner
from mosar.training.progress import Reporter
from mosar.training.run import Run
from mosar.training.run_folder import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    MetricsFile,
    foreign_file,
    has_made_a_step,
    has_run,
    locked,
    read_saved,
    truncate_metrics,
    write_config,
)
from mosar.training.stopping import StopRequest, stop_requests


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    out: Path
    step: int
    resumed_from: int
    """The step of the checkpoint it was resumed from; 0 if it started anew."""
    loss: float
    """Training loss of the last step that was logged."""
    valid_loss: float
    """Cross-entropy on the validation windows after the last step."""
    signal_number: int | None = None
    """A signal during the last step: the run is complete, and nothing more should begin."""


def train(
    config: RunConfig,
    out: Path | str,
    *,
    progress: bool = True,
    resume: bool = True,
    reporter: Reporter | None = None,
) -> TrainResult:
    """Trains into the run folder `out`, resuming from its newest checkpoint if there is one.

    With `resume` off, a folder that holds a run is refused. A TrainingError says what stopped the
    run; SIGINT and SIGTERM save first and raise TrainingInterrupted. `reporter` shows the run
    instead of the usual bar.
    """
    learner, out = Learner(config, team=open_team(config)), Path(out)
    reporter = reporter or Reporter(config.train.steps, progress=progress)
    start, stopped_by = train_run(learner, out, reporter, resume=resume)
    return TrainResult(out, config.train.steps, start, *learner.last_losses, stopped_by)


def train_run(
    run: Run, out: Path, reporter: Reporter, *, resume: bool = True
) -> tuple[int, int | None]:
    """Trains `run` into `out`.

    Returns the step it was resumed from, 0 if it started anew, and a signal of its last step.
    """
    team = run.team
    if not team.is_first:
        reporter = Reporter.silent()
    _keep_freed_memory()
    with (
        _explained_errors(run, out),
        team.running(out),
        stop_requests(patient=team.num_processes > 1) as stop,
    ):
        run.prepare()
        with held_by_first(team, locked(out)), torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.cadence.seed)
            found = team.from_first(lambda: _find_step(run, out, reporter, resume=resume))
            run.build(initialise=found is None)
            if found is not None:
                # The checkpoint of an imported model may be of step 0.
                _restore(run, checkpoints.open_checkpoint(out / CHECKPOINTS, found), reporter)
            start = found or 0
            team.from_first(lambda: _check_space(run, out))
            # Take the folder only now: a run that cannot be built must not keep it.
            link = team.from_first(lambda: _claim(run, out, start, reporter))
            _run_steps(run, out, start, stop, link, reporter)
            run.finish(out)
    return start, stop.signal_number


def _run_steps(
    run: Run, out: Path, start: int, stop: StopRequest, link: str, reporter: Reporter
) -> None:
    """Runs the steps after `start`, showing the lines of the metrics; the first process writes."""
    if not run.team.is_first:
        for _ in _steps(run, out, start, stop, None):
            pass
        return
    metrics = MetricsFile(out / METRICS, link)
    try:
        with run.board(out, start) as draw, reporter.running(start):
            for line in _steps(run, out, start, stop, metrics):
                metrics.append(line)
                draw(line)
                reporter.show(line)
    finally:
        metrics.close()


def _steps(
    run: Run, out: Path, start: int, stop: StopRequest, metrics: MetricsFile | None
) -> Iterator[dict[str, Any]]:
    """Runs the steps after `start`; yields the lines of the metrics, saves checkpoints."""
    cadence, team = run.cadence, run.team
    saved = start
    if start == 0:
        yield run.evaluate(0)
    # Several processes can only stop together, at the end of a step.
    within_step = stop if team.num_processes == 1 else None
    clock = Clock()
    for step in range(start + 1, cadence.steps + 1):
        with clock:
            line = run.update(step, within_step)
        if line is None:
            raise _interrupted(run, out, step - 1, saved, stop, metrics)
        clock.tokens += run.tokens_per_step
        last = step == cadence.steps
        if step % cadence.log_every == 0 or last:
            yield line | {"tokens_per_second": clock.lap()}
        if step % cadence.eval_every == 0 or last:
            yield run.evaluate(step)
        milestone = cadence.keep_every and step % cadence.keep_every == 0
        if step % cadence.checkpoint_every == 0 or milestone or last:
            save(run, out, step, metrics)
            saved = step
        if team.stopped(stop) and not last:
            raise _interrupted(run, out, step, saved, stop, metrics)


def _keep_freed_memory() -> None:
    """Tells glibc to reuse freed blocks.

    It would give large ones back to the system, which clears every page again for the next step: an
    eighth of the time of a step in bfloat16.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    largest_block, kept = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    # Older versions refuse more than 32 MiB. The second option stops glibc from choosing the first.
    if set_option(largest_block, 1 << 30) or set_option(largest_block, 32 << 20):
        set_option(kept, (1 << 31) - 1)


class Clock:
    """Tokens per second of the steps, without evaluations and checkpoints."""

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


def save(run: Run, out: Path, step: int, metrics: MetricsFile | None = None) -> Path:
    """Writes the checkpoint of `step`, then removes old ones."""
    if metrics is not None:
        # A checkpoint guarantees that the lines up to its step are on the disk.
        metrics.sync()
    cadence, folder, team = run.cadence, out / CHECKPOINTS, run.team
    state = {
        "config_hash": run.config.fingerprint(),
        # All processes have the same state: same seed, and a step draws nothing.
        "rng": {"torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()},
        "environment": environment(),
        "mesh": team.describe(),
        "metrics": None if metrics is None else metrics.link,
        **run.state(),
    }
    path = team.write_checkpoint(run.names, run.optimizers, folder, step, state)
    team.from_first(
        lambda: checkpoints.prune_checkpoints(folder, cadence.keep_last, cadence.keep_every)
    )
    return path


def _find_step(run: Run, out: Path, reporter: Reporter, *, resume: bool) -> int | None:
    """The step of the checkpoint to resume from, if any; refuses a folder with something else."""
    folder = out / CHECKPOINTS
    if not has_run(out):
        if checkpoints.list_steps(folder):
            raise TrainingError(f"{out} has checkpoints but no {CONFIG}; give another --out")
        if run.own_files is not None and (other := foreign_file(out, run.own_files)) is not None:
            raise TrainingError(
                f"{out} is not a run and not empty (it holds {other}); give another --out"
            )
        return None
    if has_made_a_step(out):
        if not resume:
            raise TrainingError(f"{out} already holds a run; give another --out")
        run.check_same(out, reporter.say)
    else:
        # It made no step, so its configuration may differ; only the kind of run must be the same.
        read_saved(out, type(run.config))
    checkpoints.remove_unfinished(folder)
    try:
        checkpoint = checkpoints.newest_checkpoint(folder, reporter.say)
    except DamagedFile as error:
        raise TrainingError(f"{error}; give another --out to start again") from None
    if checkpoint is None:
        return None
    if checkpoint.step > run.cadence.steps:
        raise TrainingError(
            f"{out} is at step {checkpoint.step}, beyond train.steps={run.cadence.steps}"
        )
    # Retrofits of earlier versions have no hash.
    if checkpoint.state.get("config_hash") not in (None, run.config.fingerprint()):
        raise TrainingError(f"{checkpoint.path} belongs to a run of another configuration")
    return checkpoint.step


def _claim(run: Run, out: Path, start: int, reporter: Reporter) -> str:
    """Makes `out` the folder of this run; returns the link of the metrics that are kept."""
    if start == run.cadence.steps and not (out / METRICS).exists():
        extend = f", or train on with {run.how_to_extend}" if run.how_to_extend else ""
        raise TrainingError(
            f"the run is finished, and {out / METRICS} is missing; put it back{extend}"
        )
    # Without a checkpoint, the evaluation before the first step is repeated too.
    link = truncate_metrics(out / METRICS, start if start else -1, reporter.say)
    saved = (run.config, run.data_fingerprint)
    if not has_run(out) or read_saved(out, type(run.config)) != saved:
        write_config(out, *saved)
    return link


def _restore(run: Run, checkpoint: Checkpoint, reporter: Reporter) -> None:
    run.team.read_checkpoint(run.names, run.optimizers, checkpoint)
    run.restore(checkpoint.state)
    if "rng" in checkpoint.state:
        state = base64.b64decode(checkpoint.state["rng"]["torch"])
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    if checkpoint.step == run.cadence.steps:
        extend = f"; {run.how_to_extend} goes further" if run.how_to_extend else ""
        reporter.say(f"finished already, at step {checkpoint.step}{extend}")
    else:
        reporter.say(f"resuming from step {checkpoint.step}")
    was, now = checkpoint.state["environment"], environment()
    changed = [
        f"{key} {was.get(key)} → {now[key]}"
        for key in ("torch", "cpu", "cpu_capability", "threads")
        if was.get(key) != now[key]
    ]
    mesh = checkpoint.state.get("mesh")
    if mesh != run.team.describe():
        changed.append(f"processes {_mesh(mesh)} → {_mesh(run.team.describe())}")
    if changed:
        reporter.say(f"{', '.join(changed)}: the last bits may differ from a run in one go")


def _mesh(mesh: dict[str, int] | None) -> str:
    return " x ".join(f"{name} {n}" for name, n in mesh.items()) if mesh else "1"


def _interrupted(
    run: Run, out: Path, step: int, saved: int, stop: StopRequest, metrics: MetricsFile | None
) -> TrainingInterrupted:
    """Saves `step` if needed; returns the exception to raise."""
    if saved != step:
        save(run, out, step, metrics)
    assert stop.signal_number is not None
    kept = f"saved at step {step}" if step else "before the first step was done"
    message = f"stopped, {kept} of {run.cadence.steps}; {run.how_to_continue(out)}"
    return TrainingInterrupted(message, stop.signal_number)


def _check_space(run: Run, out: Path) -> None:
    """A TrainingError before the first step if the disk has no room for a checkpoint."""
    # Parameters and two moments of each.
    needed = 3 * sum(parameter.nbytes for parameter in run.names)
    free = shutil.disk_usage(out).free
    if free < needed:
        raise TrainingError(
            f"{out} has {free / 1e6:,.1f} MB free, and one checkpoint takes {needed / 1e6:,.1f} MB"
        )


@contextmanager
def _explained_errors(run: Run, out: Path) -> Iterator[None]:
    """Adds to an error which checkpoint is the last good one."""
    try:
        yield
    except TrainingInterrupted as error:
        # All processes of a team stop, and only the first one says so.
        error.reported_by_peer = not run.team.is_first
        raise
    except NonFiniteError as error:
        said = NonFiniteError(f"{error}; the run stopped, {_last_good(out)}")
        said.reported_by_peer = not run.team.is_first
        raise said from None
    except LostProcessError as error:
        raise LostProcessError(f"{error}; {_last_good(out)}, start the job again") from None
    except OSError as error:
        where = error.filename or out
        reason = error.strerror or str(error)
        left = f"; {_last_good(out)}" if out.is_dir() else ""
        raise TrainingError(f"{where}: {reason}{left}") from error
    except (MemoryError, RuntimeError) as error:
        # torch has no class for running out of CPU memory.
        if isinstance(error, MosarError) or not _is_out_of_memory(error):
            raise
        line = str(error).partition("\n")[0] or "out of memory"
        raise TrainingError(f"{line}; {_last_good(out)}; {run.how_to_save_memory}") from error


def _is_out_of_memory(error: Exception) -> bool:
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)


def _last_good(out: Path) -> str:
    steps = checkpoints.list_steps(out / CHECKPOINTS)
    return f"the last checkpoint is that of step {steps[-1]}" if steps else "no checkpoint is lost"
