"""Going on with a run: bit for bit the run in one go, or a clear refusal."""

import errno
import fcntl
import json
import os
import shutil
import signal
import threading

import pytest
from safetensors import SafetensorError

from mosar.errors import TrainingError, TrainingInterrupted
from mosar.files import sealed
from mosar.training import checkpoints, loop
from mosar.training.distributed.consolidate import consolidate
from mosar.training.learner import Learner
from mosar.training.loop import train
from mosar.training.run_folder import MetricsFile, read_metrics
from training.runs import assert_same_run, leftovers, lines, saved_config, steps, tensors

STEPS = 8
SHORT = (f"train.steps={STEPS}", "train.checkpoint_every=3", "train.eval_every=4")


class Crash(BaseException):
    """The process dies here."""


@pytest.fixture
def config(smoke):
    return smoke("mosar-cost", *SHORT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, dataset):
    """The run in one go."""
    from mosar.training.config import resolve_config

    out = tmp_path_factory.mktemp("whole") / "run"
    config = resolve_config(variant="mosar-cost", preset="smoke", data=dataset, changes=SHORT)
    train(config, out, progress=False)
    return out


def at_step(monkeypatch, wanted, act):
    """Calls `act` in the middle of update number `wanted`, once."""
    real = Learner.update
    done = []

    def update(learner, step, stop=None):
        if step == wanted and not done:
            done.append(step)
            act()
        return real(learner, step, stop)

    monkeypatch.setattr(Learner, "update", update)


def crash():
    raise Crash


@pytest.mark.parametrize("step", [1, 5, STEPS])
def test_after_a_crash(config, whole, tmp_path, monkeypatch, step):
    out = tmp_path / "run"
    at_step(monkeypatch, step, crash)
    with pytest.raises(Crash):
        train(config, out, progress=False)
    # A line may have been cut off.
    with open(out / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 6, "spl')
    assert train(config, out, progress=False).resumed_from == (step - 1) // 3 * 3
    assert_same_run(out, whole)
    # A finished run has nothing to do.
    assert train(config, out, progress=False).resumed_from == STEPS
    assert_same_run(out, whole)
    with pytest.raises(TrainingError, match="already holds a run"):
        train(config, out, progress=False, resume=False)


@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 1), (signal.SIGTERM, STEPS)])
def test_a_signal_saves_first(config, whole, tmp_path, monkeypatch, step, number):
    before = signal.getsignal(number)
    at_step(monkeypatch, step, lambda: signal.raise_signal(number))
    with pytest.raises(TrainingInterrupted) as error:
        train(config, tmp_path / "run", progress=False)
    assert signal.getsignal(number) == before
    assert error.value.exit_code == 128 + number
    # The update was under way and is given up: nothing it would have changed has changed.
    assert f"{step - 1} of {STEPS}" in str(error.value) or step == 1
    assert f"mosar train --out {tmp_path / 'run'}" in str(error.value)
    assert step == 1 or steps(tmp_path / "run")[-1] == step - 1
    monkeypatch.undo()
    assert train(config, tmp_path / "run", progress=False).resumed_from == step - 1
    assert_same_run(tmp_path / "run", whole)


def test_a_second_signal_does_not_wait(config, tmp_path, monkeypatch):
    def again_and_again():
        # Python ignores what a handler raises inside of a destructor, so one more may be needed.
        for _ in range(4):
            signal.raise_signal(signal.SIGINT)

    at_step(monkeypatch, 5, again_and_again)
    # A shell lets its background jobs ignore Ctrl-C, and these tests may be one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps(tmp_path / "run") == [3]


def test_every_step_interrupted(config, whole, tmp_path, monkeypatch):
    real, last = Learner.update, [0]

    def update(learner, step, stop=None):
        line = real(learner, step, stop)
        if step > last[0]:
            last[0] = step
            signal.raise_signal(signal.SIGINT)
        return line

    monkeypatch.setattr(Learner, "update", update)
    for _ in range(STEPS - 1):
        with pytest.raises(TrainingInterrupted):
            train(config, tmp_path / "run", progress=False)
    train(config, tmp_path / "run", progress=False)
    assert_same_run(tmp_path / "run", whole)
    assert steps(tmp_path / "run") == [7, 8]


@pytest.mark.parametrize("call", range(0, 12, 2))
def test_after_a_crash_while_a_checkpoint_is_written(config, whole, tmp_path, monkeypatch, call):
    """The process dies at one system call after another of the second checkpoint."""
    calls = []

    def dying(name):
        real = getattr(os, name)

        def die(*arguments, **options):
            if steps(tmp_path / "run"):
                calls.append(name)
                if len(calls) == call + 1:
                    raise Crash
            return real(*arguments, **options)

        return die

    for name in ("fsync", "rename", "mkdir"):
        monkeypatch.setattr(os, name, dying(name))
    # A dead process cleans nothing up.
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda *arguments, **options: None)
    with pytest.raises(Crash):
        train(config, tmp_path / "run", progress=False)
    monkeypatch.undo()
    train(config, tmp_path / "run", progress=False)
    assert_same_run(tmp_path / "run", whole)
    assert not leftovers(tmp_path / "run")


def altered(lines):
    return [*lines[:4], lines[4].replace(b'"loss": ', b'"loss": 1'), *lines[5:]]


def unsealed_line(lines):
    values = json.loads(lines[4])
    del values["checksum"]
    return [*lines[:4], json.dumps(values).encode() + b"\n", *lines[5:]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (altered, r"metrics\.jsonl, line 5 or one before it was changed: .*its checksum is wrong"),
        (
            lambda lines: lines[:4] + lines[5:],
            r"metrics\.jsonl, line 5 or one before it was changed",
        ),
        (lambda lines: lines[1:], r"metrics\.jsonl, line 1 or one before it was changed"),
        (unsealed_line, r"metrics\.jsonl, line 5 .*its checksum is missing"),
        (lambda lines: [*lines[:4], b"{\n", *lines[5:]], r"metrics\.jsonl, line 5 or one before"),
        (lambda lines: [*lines[:4], b"[" * 100_000 + b"\n", *lines[5:]], "line 5 .* 100 deep"),
        (lambda lines: [], r"metrics\.jsonl lacks lines up to"),
        (lambda lines: lines[:-1], r"metrics\.jsonl lacks lines up to"),
    ],
)
def test_metrics_that_are_not_what_was_written(config, whole, tmp_path, damage, message):
    out = shutil.copytree(whole, tmp_path / "run")
    metrics = out / "metrics.jsonl"
    spoilt = b"".join(damage(metrics.read_bytes().splitlines(keepends=True)))
    metrics.write_bytes(spoilt)
    for read in (lambda: train(config, out, progress=False), lambda: read_metrics(out)):
        with pytest.raises(TrainingError, match=message) as caught:
            read()
        assert "or remove it to continue without its lines" in str(caught.value)
    assert metrics.read_bytes() == spoilt
    with pytest.raises(TrainingError, match=message):
        consolidate(out, tmp_path / "plain")


def test_metrics_that_were_removed_are_done_without(config, whole, tmp_path, monkeypatch, capfd):
    out = shutil.copytree(whole, tmp_path / "run")
    metrics = out / "metrics.jsonl"
    metrics.unlink()
    with pytest.raises(TrainingError, match=r"finished, and .*metrics\.jsonl is missing"):
        train(config, out, progress=False)
    shutil.rmtree(out / "checkpoints" / "step-00000008")
    # Twice: it must also survive being killed before the next checkpoint.
    at_step(monkeypatch, 8, crash)
    with pytest.raises(Crash):
        train(config, out, progress=False)
    monkeypatch.undo()
    assert "is missing; continuing without the lines up to step 6" in capfd.readouterr().err
    assert [line["step"] for line in read_metrics(out)] == [7]
    train(config, out, progress=False)
    kept = [line for line in lines(whole) if line["step"] > 6]
    assert lines(out) == kept and tensors(out) == tensors(whole)
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[1:]))
    with pytest.raises(TrainingError, match="line 1 or one before it was changed"):
        read_metrics(out)


def test_garbage_after_the_checkpoint_is_written_again(config, whole, tmp_path):
    """As a power failure leaves it: lines that were not flushed yet."""
    out = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "step-00000008")
    metrics = out / "metrics.jsonl"
    kept = [line for line in metrics.read_bytes().splitlines() if json.loads(line)["step"] <= 6]
    metrics.write_bytes(b"\n".join([*kept, b"\0" * 300, b"\0" * 20]))
    train(config, out, progress=False)
    assert_same_run(out, whole)


def test_a_run_of_before_checksums_and_tasks_goes_on(config, whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "step-00000008")
    metrics = out / "metrics.jsonl"
    old = [json.loads(line) for line in metrics.read_bytes().splitlines()]
    for line in old:
        del line["checksum"]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in old))
    state = out / "checkpoints" / "step-00000006" / "state.json"
    values = json.loads(state.read_text())
    del values["checksum"], values["metrics"]
    state.write_text(json.dumps(sealed(values), indent=1))
    # Nor were there tasks.
    saved = saved_config(out)
    del saved["data"]["task"]
    (out / "config.json").write_text(json.dumps(saved))
    assert read_metrics(out) == read_metrics(whole)
    train(config, out, progress=False)
    assert_same_run(out, whole)
    # The lines that follow vouch for the old ones.
    lines = metrics.read_bytes().splitlines(keepends=True)
    assert b"checksum" not in lines[2] and b"checksum" in lines[-1]
    metrics.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(TrainingError, match="or one before it was changed"):
        read_metrics(out)


def test_a_damaged_checkpoint_costs_only_the_time_since_the_one_before(
    config, whole, tmp_path, capfd
):
    """What else damage may be is in test_checkpoints.py."""
    out = shutil.copytree(whole, tmp_path / "run")
    os.truncate(out / "checkpoints" / "step-00000008" / "model.safetensors", 1000)
    assert train(config, out, progress=False).resumed_from == 6
    assert "checkpoint 8 is damaged (model.safetensors" in capfd.readouterr().err
    assert_same_run(out, whole)
    assert leftovers(out) == ["damaged-step-00000008-1"]
    for path in (out / "checkpoints").glob("*/model.safetensors"):
        os.truncate(path, 10)
    before = sorted(out.rglob("*"))
    with pytest.raises(TrainingError, match="is complete"):
        train(config, out, progress=False)
    assert sorted(out.rglob("*")) == before


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("mosar", (), r"attention.cost_weight is 0.01, not 0.0"),
        ("mosar-cost", ("train.seed=1",), r"train.seed is 0, not 1; drop the change, or give"),
        (
            "mosar-cost",
            ("data.seed=2", "model.hidden_size=32"),
            r"data.seed is 0, not 2, model.hidden_size is 64, not 32",
        ),
        ("mosar-cost", ("train.micro_batch=8",), r"train.micro_batch is 4, not 8"),
        ("mosar-cost", ("train.steps=9",), r"add --set train.decay_steps=8"),
    ],
)
def test_a_run_of_another_configuration_is_refused(smoke, whole, variant, changes, message):
    before = saved_config(whole), tensors(whole), read_metrics(whole)
    with pytest.raises(TrainingError, match=message) as error:
        train(smoke(variant, *SHORT, *changes), whole, progress=False)
    assert "holds a run of another configuration" in str(error.value)
    assert "another --out" in str(error.value)
    assert (saved_config(whole), tensors(whole), read_metrics(whole)) == before


def test_a_step_without_a_checkpoint_keeps_the_folder(config, smoke, tmp_path, monkeypatch):
    at_step(monkeypatch, 2, crash)
    with pytest.raises(Crash):
        train(config, tmp_path / "run", progress=False)
    with pytest.raises(TrainingError, match="holds a run of another configuration"):
        train(smoke("rope", *SHORT), tmp_path / "run", progress=False)


def test_what_does_not_change_the_result_may_change(smoke, whole, tmp_path, monkeypatch):
    config = smoke("mosar-cost", *SHORT)
    at_step(monkeypatch, 5, crash)
    with pytest.raises(Crash):
        train(config, tmp_path / "run", progress=False)
    other = smoke(
        *("mosar-cost", *SHORT, "train.keep_last=5", "train.checkpoint_every=1"),
        *("train.keep_every=2", "train.log_every=2"),
    )
    train(other, tmp_path / "run", progress=False)
    assert tensors(tmp_path / "run") == tensors(whole)
    assert steps(tmp_path / "run") == [4, 5, 6, 7, 8]
    assert saved_config(tmp_path / "run")["train"]["keep_last"] == 5


def test_the_same_batch_in_other_pieces_is_said_to_round_differently(smoke, whole, tmp_path, capfd):
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    other = smoke("mosar-cost", *SHORT, "train.micro_batch=2", "train.accumulation=4")
    train(other, tmp_path / "run", progress=False)
    assert "train.accumulation, train.micro_batch changed" in capfd.readouterr().err
    last, expected = read_metrics(tmp_path / "run")[-1], read_metrics(whole)[-1]
    assert last["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_a_longer_run_of_the_same_schedule(smoke, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "extended")
    longer = ("train.steps=12", "train.decay_steps=8", *SHORT[1:])
    train(smoke("mosar-cost", *longer), tmp_path / "extended", progress=False)
    train(smoke("mosar-cost", *longer), tmp_path / "once", progress=False)
    assert tensors(tmp_path / "extended") == tensors(tmp_path / "once")
    rates = [line["learning_rate"] for line in read_metrics(tmp_path / "extended", "train")]
    assert rates[7:] == [3e-4] * 5
    with pytest.raises(TrainingError, match=r"is at step 12, beyond train.steps=8"):
        train(smoke("mosar-cost", *SHORT), tmp_path / "extended", progress=False)


def test_data_that_moved_is_known_and_other_data_refused(smoke, whole, dataset, tmp_path):
    from mosar.data.prepare import prepare
    from training.conftest import CORPUS

    shutil.copytree(whole, tmp_path / "run")
    shutil.copytree(dataset, tmp_path / "moved")
    train(
        smoke("mosar-cost", *SHORT, f"data.folder={tmp_path / 'moved'}"),
        tmp_path / "run",
        progress=False,
    )
    source = str(CORPUS / "train.jsonl")
    prepare([str(CORPUS / "valid.jsonl")], tmp_path / "other", valid=[source])
    with pytest.raises(TrainingError, match=r"was trained on other data than .*other holds"):
        train(
            smoke("mosar-cost", *SHORT, f"data.folder={tmp_path / 'other'}"),
            tmp_path / "run",
            progress=False,
        )


def test_another_machine_is_mentioned(config, whole, tmp_path, capfd, monkeypatch):
    shutil.copytree(whole, tmp_path / "run")
    was = loop.environment()
    monkeypatch.setattr(loop, "environment", lambda: was | {"threads": 99})
    train(config, tmp_path / "run", progress=False)
    assert "threads 1 → 99: the last bits may differ" in capfd.readouterr().err


def test_two_processes_do_not_train_into_one_folder(config, tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as file:
        file.write("4711\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TrainingError, match=r"another process trains into .* \(process 4711\)"):
            train(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "config.json").exists()


def test_training_in_a_thread_leaves_signals_alone(config, whole, tmp_path):
    thread = threading.Thread(
        target=train, args=(config, tmp_path / "run"), kwargs={"progress": False}
    )
    thread.start()
    thread.join()
    assert_same_run(tmp_path / "run", whole)


def test_checkpoints_of_another_run_are_not_mistaken(config, smoke, whole, tmp_path):
    train(smoke("mosar-cost", *SHORT, "train.seed=1"), tmp_path / "other", progress=False)
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "run" / "checkpoints")
    with pytest.raises(TrainingError, match="belongs to a run of another configuration"):
        train(config, tmp_path / "run", progress=False)
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(TrainingError, match=r"has checkpoints but no config\.json"):
        train(config, tmp_path / "run", progress=False)


def test_a_damaged_config_is_an_error(config, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for text in ("", "{", "[]", "{}", '{"schema": 1, "model": 3}'):
        (tmp_path / "run" / "config.json").write_text(text)
        with pytest.raises(TrainingError, match=r"config.json is not a run's configuration"):
            train(config, tmp_path / "run", progress=False)


def test_a_full_disk(config, whole, tmp_path, monkeypatch):
    """While a checkpoint is written, then while metrics are."""
    out, real_save, real_append = tmp_path / "run", checkpoints.save_file, MetricsFile.append

    def save_file(values, path):
        if "step-00000006" in str(path) and path.name.startswith("optimizer"):
            path.write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        real_save(values, path)

    def append(self, values):
        if values["step"] == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_append(self, values)

    for place, name, full, message in (
        (checkpoints, "save_file", save_file, r"optimizer\.safetensors: No space left on device"),
        (MetricsFile, "append", append, "No space left on device"),
    ):
        monkeypatch.setattr(place, name, full)
        with pytest.raises(TrainingError, match=f"{message}; the last checkpoint .* of step 3"):
            train(config, out, progress=False)
        assert steps(out) == [3] and not leftovers(out)
        monkeypatch.undo()
    train(config, out, progress=False)
    assert_same_run(out, whole)


def test_too_little_room_is_said_at_the_beginning(config, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(loop.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(TrainingError, match=r"has 0.1 MB free, and one checkpoint takes 1.\d MB"):
        train(config, tmp_path / "run", progress=False)


def test_a_folder_that_cannot_be_written(config, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"run: a file is in the place of a folder; give anot"):
        train(config, tmp_path / "file" / "run", progress=False)

    def read_only(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "run" / ".lock"))

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(TrainingError, match="Read-only file system"):
        train(config, tmp_path / "run", progress=False)
