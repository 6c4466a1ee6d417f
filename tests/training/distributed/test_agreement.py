"""However many processes there are and however they divide the work: the same result."""

import pytest

from mosar.training.config import resolve_config
from mosar.training.loop import train
from mosar.training.run_folder import read_metrics
from training.distributed.launches import run_jobs

STEPS = 10
# Eight windows a step in two passes; a cost that is whole from step 5, on top of a routing that
# is not nearly uniform any more by the end.
SETTINGS = (
    *(f"train.steps={STEPS}", "train.eval_every=5", "train.checkpoint_every=1000"),
    "attention.cost_warmup=5",
)
MESHES = {
    "ddp": ("distributed.data=2",),
    "fsdp": ("distributed.shard=2",),
    "tp": ("distributed.tensor=2",),
}
FOUR = {
    "fsdp x tp": ("distributed.shard=2", "distributed.tensor=2"),
    "ddp x tp": ("distributed.data=2", "distributed.tensor=2"),
    "ddp x fsdp": ("distributed.data=2", "distributed.shard=2"),
    "tp of 4": ("distributed.tensor=4",),
    "ddp of 4": ("distributed.data=4",),
}
MQA = "model.num_kv_heads=1"
SHORT = "train.steps=4"
# Routers that start apart: choices that nearly tie may fall otherwise by the order of sums.
HARD = (
    *("attention.hard_from=0.3", "attention.router_queries=32", "attention.cost_of=pairs"),
    *('attention.start_regimes=["M","S"]', SHORT),
)
# Key heads, groups and other variants on a tensor mesh are in GRADIENTS, in float64.
MORE = {
    # name: variant, mesh, changes
    "recomputed, tp": ("mosar", "tp", ("train.checkpoint_activations=true", MQA, SHORT)),
    "recomputed, fsdp": ("mosar", "fsdp", ("train.checkpoint_activations=true", SHORT)),
    "recomputed, ddp": ("mosar", "ddp", ("train.checkpoint_activations=true", SHORT)),
    "a task": ("mosar", "ddp", ("data.task=recall", SHORT)),
    "hard, tp": ("mosar-cost", "tp", HARD),
    "hard, one key head": ("mosar-cost", "tp", (MQA, *HARD)),
    "hard, groups": ("mosar-cost", "tp", ("attention.routing_groups=2", *HARD)),
    "hard, forgetting": ("mosar-plus", "tp", (SHORT,)),
    "hard, over ALiBi": ("mosar-plus", "tp", (SHORT, "attention.own.gates=alibi")),
    "hard, ddp": ("mosar-cost", "ddp", HARD),
    "bfloat16, tp": ("mosar-cost", "tp", ("train.precision=bf16", MQA, SHORT)),
    "bfloat16, fsdp": ("mosar-cost", "fsdp", ("train.precision=bf16", MQA, SHORT)),
    # Batches of validation that two do not divide: the last round is not for everyone.
    "odd batches": ("mosar", "fsdp", ("train.micro_batch=6", "train.accumulation=1", SHORT)),
}


def job(dataset, out, variant, changes):
    changes = [*SETTINGS, *changes]
    return {"variant": variant, "data": str(dataset), "out": str(out), "changes": changes}


def figures(out):
    """(step, split, name) -> every number of the metrics that does not depend on the clock."""
    found = {}
    for line in read_metrics(out):
        for name in ("loss", "lm_loss", "grad_norm", "expected_reach"):
            if line[name] is not None:
                found[line["step"], line["split"], name] = line[name]
    return found


def difference(out, other):
    """The largest relative difference of two runs' figures."""
    ours, theirs = figures(out), figures(other)
    assert ours.keys() == theirs.keys()
    return max(abs(ours[key] - theirs[key]) / abs(theirs[key]) for key in ours)


def alone(dataset, out, variant, changes=()):
    """The same run in one process."""
    config = resolve_config(
        variant=variant, preset="smoke", data=dataset, changes=[*SETTINGS, *changes]
    )
    train(config, out, progress=False)
    return out


# A figure of one process is itself only as good as the order of its sums: a mean in float32 is
# known to about eps = 2^-23 of itself, and what a step does with it is in the figures of the next.
# Two eps a step is what the tolerance allows; another grouping in one process takes some of it too.
PER_STEP = 2 * 2**-23
TOLERANCE = STEPS * PER_STEP
# With products in bfloat16 partial sums are rounded to eight bits before they are added.
COARSE = 2**-8


def test_two_processes(dataset, tmp_path):
    # Only a cost has anything left to do after its warm-up.
    cases = {
        f"{variant}, {name}": (variant, changes, () if variant == "mosar-cost" else (SHORT,))
        for variant in ("rope", "mosar-cost")
        for name, changes in MESHES.items()
    }
    cases |= {
        name: (variant, MESHES[mesh], changes) for name, (variant, mesh, changes) in MORE.items()
    }
    more = gradient_jobs(dataset, MESHES["tp"], GRADIENTS) + spoilt_jobs(dataset)
    check(2, cases, dataset, tmp_path, more)


@pytest.mark.slow
def test_four_processes(dataset, tmp_path):
    cases = {
        f"{variant}, {name}": (variant, changes, ())
        for variant in ("rope", "mosar", "mosar-cost")
        for name, changes in FOUR.items()
    }
    for name, changes in FOUR.items():
        cases[f"one key head, {name}"] = ("mosar-cost", changes, (MQA,))
    cases["recomputed"] = (
        "mosar-cost",
        FOUR["fsdp x tp"],
        ("train.checkpoint_activations=true", MQA),
    )
    cases["four groups"] = (
        "mosar-cost",
        FOUR["fsdp x tp"],
        ("attention.routing_groups=4", "model.num_kv_heads=4"),
    )
    divided = [
        ("mosar-cost", ()),
        ("mosar-cost", (MQA,)),
        ("mosar-cost", ("model.num_heads=8", "model.num_kv_heads=4")),
        ("mosar-cost", ("model.num_kv_heads=4", "attention.routing_groups=4")),
        ("alibi", ("model.num_heads=8",)),
    ]
    check(4, cases, dataset, tmp_path, gradient_jobs(dataset, FOUR["tp of 4"], divided))


def check(processes, cases, dataset, tmp_path, more=()):
    jobs = [
        job(dataset, tmp_path / f"case-{number}", variant, [*changes, *mesh])
        for number, (variant, mesh, changes) in enumerate(cases.values())
    ]
    run_jobs(processes, [*more, *jobs])
    references, differences = {}, {}
    for number, (name, (variant, _, changes)) in enumerate(cases.items()):
        if (variant, changes) not in references:
            references[variant, changes] = alone(
                dataset, tmp_path / f"alone-{len(references)}", variant, changes
            )
        differences[name] = difference(tmp_path / f"case-{number}", references[variant, changes])
    print({name: f"{value / 2**-23:.1f} eps" for name, value in differences.items()})
    allowed = {name: COARSE if "bfloat16" in name else TOLERANCE for name in cases}
    too_large = {name: d for name, d in differences.items() if not d <= allowed[name]}
    assert not too_large
    # What is compared has moved: the tolerance is not one that anything would pass.
    moved = figures(references["mosar-cost", ()])
    first, last = moved[1, "train", "loss"], moved[STEPS, "train", "loss"]
    assert abs(first - last) / last > 1000 * TOLERANCE


GRADIENTS = [
    ("mosar-cost", ()),
    ("mosar-cost", (MQA,)),
    ("mosar-cost", ("attention.routing_groups=2",)),
    ("mosar-cost", ("model.num_kv_heads=4", "attention.routing_groups=2")),
    ("mosar-cost", ("model.num_kv_heads=4", "attention.routing_groups=4")),
    ("mosar", ("attention.num_sinks=2", "data.isolate_documents=true")),
    *((variant, (MQA,)) for variant in ("rope", "p-rope", "alibi", "fixed-s", "rope-m-mask")),
    *((variant, ()) for variant in ("rope", "alibi", "t5", "kerple", "adaptive-span")),
    *((variant, ()) for variant in ("dynamic-span", "fox", "mosar-plus")),
    *((variant, (MQA,)) for variant in ("fox", "mosar-plus")),
]


def gradient_jobs(dataset, mesh, cases):
    # The loss is taken after the warm-up of the cost, here as large as the language model's.
    settings = ("attention.cost_weight=1", "attention.cost_warmup=5")
    return [
        {
            "kind": "gradients",
            "variant": variant,
            "data": str(dataset),
            "changes": [*(settings if variant == "mosar-cost" else ()), *changes, *mesh],
        }
        for variant, changes in cases
    ]


def spoilt_jobs(dataset):
    base = {"kind": "spoilt", "variant": "mosar", "data": str(dataset)}
    name = "layers.1.attention.q_proj.weight"
    return [{**base, "changes": list(MESHES[mesh]), "parameter": name} for mesh in ("fsdp", "tp")]
