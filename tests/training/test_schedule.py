"""Learning rate and cost weight, against a table worked out by hand."""

import math
from pathlib import Path

import pytest

from mosar.geometries import PAPER_VARIANTS
from mosar.training.config import TrainConfig, resolve_config
from mosar.training.objective import Objective
from mosar.training.presets import PRESETS
from mosar.training.schedule import learning_rate

PAGE = Path(__file__).parents[2] / "docs" / "training.md"

# The paper's: 100 steps up to 3e-4, a cosine of 609,900 steps down to 3e-5. A third of the way the
# cosine is ½, so that ¾ of the span is left; half way 0, so that ½ is; two thirds: ¼.
PAPER = {
    1: 3e-6,
    50: 1.5e-4,
    99: 2.97e-4,
    100: 3e-4,
    100 + 203_300: 3e-5 + 0.75 * 2.7e-4,
    100 + 304_950: 3e-5 + 0.50 * 2.7e-4,
    100 + 406_600: 3e-5 + 0.25 * 2.7e-4,
    610_000: 3e-5,
}
# 0.01 after 500 steps.
COST = {0: 0.0, 1: 2e-5, 50: 0.001, 250: 0.005, 499: 0.00998, 500: 0.01, 501: 0.01, 610_000: 0.01}


def config(variant, *changes):
    return resolve_config(
        variant=variant, preset="paper", data="nowhere", changes=changes, vocab_size=None
    )


def test_learning_rate():
    train = config("rope").train
    assert {step: learning_rate(step, train) for step in PAPER} == pytest.approx(PAPER, rel=1e-12)


def test_cost_weight():
    """Of the paper's variants only mosar-cost has one."""
    for variant in PAPER_VARIANTS:
        weight = Objective(config(variant)).cost_weight
        wanted = COST if variant == "mosar-cost" else dict.fromkeys(COST, 0.0)
        assert {step: weight(step) for step in COST} == pytest.approx(wanted, rel=1e-12)
    whole = Objective(config("mosar-cost", "attention.cost_warmup=0")).cost_weight
    assert (whole(0), whole(1)) == (0.01, 0.01)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_cost_warms_up_in_proportion_and_the_page_says_its_mean(preset):
    made = resolve_config(variant="mosar-cost", preset=preset, data="nowhere", vocab_size=257)
    warmup, steps = made.attention.cost_warmup, made.train.steps
    assert warmup == 5 * made.train.warmup_steps < steps
    weight = Objective(made).cost_weight
    mean = sum(map(weight, range(1, steps + 1))) / steps / weight(steps)
    row = f"| `{preset}` | {warmup} | {steps:,} | {mean:.4f} |"
    assert row in PAGE.read_text(encoding="utf-8").splitlines()


def test_a_preset_warms_up_a_cost_wherever_there_is_one():
    def warmup(variant, *changes):
        made = resolve_config(
            variant=variant, preset="quick", data="nowhere", changes=changes, vocab_size=257
        )
        return made.attention.cost_warmup

    assert warmup("mosar", "attention.cost_weight=0.1") == warmup("mosar-cost") == 200
    assert warmup("mosar-cost", "attention.cost_warmup=7") == 7
    # Without a cost it means nothing, and runs of before it was scaled stay the same runs.
    assert warmup("mosar") == warmup("mosar-cost", "attention.cost_weight=0") == 500


def test_learning_rate_at_its_ends():
    train = TrainConfig(steps=4, warmup_steps=0, learning_rate=1.0, min_learning_rate=0.0)
    rates = [learning_rate(step, train) for step in range(1, 5)]
    half = math.sqrt(0.5) / 2
    assert rates == pytest.approx([0.5 + half, 0.5, 0.5 - half, 0.0], abs=1e-15)
    # After the decay the minimum stays.
    train = TrainConfig(steps=30, decay_steps=10, warmup_steps=2)
    short = TrainConfig(steps=10, warmup_steps=2)
    for step in range(1, 31):
        expected = learning_rate(step, short) if step <= 10 else short.min_learning_rate
        assert learning_rate(step, train) == expected
    # A warm-up longer than the run.
    train = TrainConfig(steps=5, warmup_steps=10, learning_rate=1.0)
    assert [learning_rate(step, train) for step in (1, 5)] == [0.1, 0.5]
