"""What a process of a test does: the jobs it is given, all in one process group."""

import json
import os
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mosar.errors import TrainingError
from mosar.model.decoder import Decoder
from mosar.training.batches import open_batches
from mosar.training.config import resolve_config
from mosar.training.distributed.build import TENSOR, split_dim
from mosar.training.distributed.environment import launched
from mosar.training.distributed.launch import open_team
from mosar.training.distributed.tensor import local
from mosar.training.learner import Learner
from mosar.training.loop import train
from mosar.training.objective import Objective
from mosar.training.stopping import StopRequest
from planning.peak import peak_of_update
from processes import HANG


def configure(job):
    return resolve_config(
        variant=job["variant"], preset="smoke", data=Path(job["data"]), changes=job["changes"]
    )


def train_job(job):
    """Trains; where an error is expected, every process must meet it."""
    try:
        train(configure(job), Path(job["out"]), progress=False)
    except TrainingError as error:
        if job.get("error") is None or job["error"] not in str(error):
            raise
        assert error.reported_by_peer == (launched()[0] != 0)
        return
    assert job.get("error") is None, f"no error in {job}"


def gradient_job(job):
    """Loss and gradients in float64 against those of the undivided decoder."""
    config = configure(job)
    whole = Decoder(config.model, config.attention)
    whole.init_weights(0)
    # Routers that hardly look would hide a routing that differs between processes.
    for name, parameter in whole.named_parameters():
        if "router.weight" in name:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data.normal_(std=0.3, generator=generator)
    whole.double()
    team = open_team(config)
    with team.running(Path(job["data"])):
        decoder = team.build_decoder(config, initialise=True).double()
        own = dict(decoder.named_parameters())
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                local(own[name]).copy_(own_part(parameter, own[name]))
        batch = next(open_batches(config, team.share).of_step(1))
        objective = Objective(config)
        terms = team.forward_fn(objective, decoder)(*batch, step=1000)
        terms.loss.backward()
        expected = Objective(config)(whole, *batch, step=1000)
        expected.loss.backward()
        torch.testing.assert_close(terms.loss, expected.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(terms.shares, expected.shares, rtol=1e-11, atol=1e-13)
        for name, parameter in whole.named_parameters():
            wanted, got = own_part(parameter.grad, own[name]), local(own[name].grad)
            scale = parameter.grad.abs().max().item()
            assert scale > 0, f"{name} has no gradient to compare"
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11 * scale, msg=name)
        norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
        torch.testing.assert_close(
            team.gradient_norm(own.values()).double(), norm, rtol=1e-6, atol=0
        )


def own_part(whole, parameter):
    """What a process that holds `parameter` holds of a whole tensor of the same name."""
    dim = split_dim(parameter, TENSOR)
    if dim is None:
        return whole.detach()
    ranks = parameter.device_mesh["tensor"] if parameter.device_mesh.ndim > 1 else None
    ranks = ranks or parameter.device_mesh
    return whole.detach().chunk(ranks.size(), dim)[ranks.get_local_rank()]


def spoilt_job(job):
    """A gradient that is not a number in one process stops all, by name, before the update."""
    config = configure(job)
    team = open_team(config)
    with team.running(Path(job["data"])):
        learner = Learner.of(config, open_batches(config, team.share), team=team)
        for parameter, name in learner.names.items():
            parameter.grad = torch.zeros_like(parameter)
            if launched()[0] == 1 and name == job["parameter"]:
                local(parameter.grad).view(-1)[0] = float("nan")
        bad = team.bad_gradients(learner.names)
        names = [n for n, b in zip(learner.names.values(), bad, strict=True) if b]
        assert names == [job["parameter"]], names


def sent_job(job):
    """Bytes that one update sends, by operation."""
    config = configure(job)
    team = open_team(config)
    with team.running(Path(job["data"])):
        learner = Learner.of(config, open_batches(config, team.share), team=team)
        with counted(("all_reduce", "all_gather_single", "reduce_scatter_single")) as sent:
            learner.update(1, StopRequest())
    if team.is_first:
        Path(job["out"]).write_text(json.dumps(sent))


def held_job(job):
    """The most memory that an update holds."""
    config = configure(job)
    team = open_team(config)
    with team.running(Path(job["data"])):
        learner = Learner.of(config, open_batches(config, team.share), team=team)
        Path(job["out"]).write_text(json.dumps(peak_of_update(learner)))


@contextmanager
def counted(names):
    """Adds up the bytes of messages; small ones (figures, norms) are not the plan's."""
    kept = {name: getattr(dist, name) for name in names}
    sent = dict.fromkeys(names, 0)

    def wrap(name):
        def call(*tensors, **options):
            # The whole: of an all-gather the output, of a reduce-scatter the input.
            largest = max(x.nbytes for x in (*tensors, *options.values()) if torch.is_tensor(x))
            sent[name] += largest if largest > 1024 else 0
            return kept[name](*tensors, **options)

        return call

    for name in sent:
        setattr(dist, name, wrap(name))
    try:
        yield sent
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def main():
    torch.set_num_threads(1)
    if os.environ.get("NETWORK") == "fake":
        # One rank alone, to which messages cost nothing: its memory is its own to the byte.
        world = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=HANG))
    kinds = {
        "train": train_job,
        "gradients": gradient_job,
        "spoilt": spoilt_job,
        "sent": sent_job,
        "held": held_job,
    }
    for line in sys.stdin:
        for job in json.loads(line):
            kinds[job.get("kind", "train")](job)
        dist.barrier()
        print("done", flush=True)


if __name__ == "__main__":
    main()
