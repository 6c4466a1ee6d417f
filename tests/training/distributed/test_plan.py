"""What `mosar plan` says of a rank, against what real processes send and hold."""

import json
import sys

import pytest

from mosar.planning.plan import PEAK, make_plan
from mosar.training.config import resolve_config
from processes import run
from training.distributed.launches import environment, run_jobs

# Four windows a step in two passes on each of two shares, so that gradients wait for the second.
SETTINGS = ("model.num_layers=6", "train.micro_batch=2", "train.accumulation=4")
MQA = "model.num_kv_heads=1"
CASES = {
    # name: variant, sizes of the mesh, changes
    "fsdp": ("mosar", {"shard": 2}, ()),
    "fsdp, rope, bf16": ("rope", {"shard": 2}, ("train.precision=bf16",)),
    "tp": ("mosar", {"tensor": 2}, ()),
    "tp, rope": ("rope", {"tensor": 2}, ()),
    "tp, one key head": ("mosar", {"tensor": 2}, (MQA,)),
    "tp, own groups": ("mosar", {"tensor": 2}, ("attention.routing_groups=2",)),
    "tp, recomputed": ("mosar", {"tensor": 2}, ("train.checkpoint_activations=true",)),
    "tp, bf16": ("mosar", {"tensor": 2}, ("train.precision=bf16", MQA)),
}


def jobs_of(kind, dataset, folder):
    return [
        {
            "kind": kind,
            "variant": variant,
            "data": str(dataset),
            "out": str(folder / f"{number}.json"),
            "changes": [*SETTINGS, *changes, *(f"distributed.{k}={n}" for k, n in sizes.items())],
        }
        for number, (variant, sizes, changes) in enumerate(CASES.values())
    ]


def found_in(folder):
    found = [json.loads((folder / f"{n}.json").read_text()) for n in range(len(CASES))]
    return dict(zip(CASES, found, strict=True))


@pytest.fixture(scope="module")
def sent(dataset, tmp_path_factory):
    """Bytes that the first of two real processes sent, by case and operation."""
    folder = tmp_path_factory.mktemp("sent")
    run_jobs(2, jobs_of("sent", dataset, folder))
    return found_in(folder)


@pytest.fixture(scope="module")
def held(dataset, tmp_path_factory):
    """The most memory of one of two ranks, by case; its messages go nowhere.

    With gloo the allocator's events would miss the end of what the network's thread lets go of.
    """
    folder = tmp_path_factory.mktemp("held")
    run(
        [sys.executable, "-m", "training.distributed.worker"],
        given=json.dumps(jobs_of("held", dataset, folder)),
        env=environment(WORLD_SIZE="2", RANK="0", NETWORK="fake"),
    )
    return found_in(folder)


def plan_of(case, dataset):
    variant, sizes, changes = CASES[case]
    config = resolve_config(
        variant=variant, preset="smoke", data=dataset, changes=[*SETTINGS, *changes]
    )
    return make_plan(config, context=config.model.max_length, gpus=2, **sizes)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_sends_what_is_planned(case, dataset, sent):
    plan, sent = plan_of(case, dataset), sent[case]
    section = "sent by a rank in an update"
    # Of two ranks each sends a whole of what is summed, half of what is gathered or scattered.
    halves = (sent["all_gather_single"] + sent["reduce_scatter_single"]) / 2
    assert halves == pytest.approx(plan.value(section, "shard"), rel=0.001)
    assert sent["all_reduce"] == pytest.approx(plan.value(section, "tensor"), rel=0.001)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_what_is_planned(case, dataset, held):
    """By the events of the allocator; recomputed, the plan adds up what does not meet."""
    planned = plan_of(case, dataset).value(*PEAK)
    assert held[case] == pytest.approx(planned, rel=0.07)
