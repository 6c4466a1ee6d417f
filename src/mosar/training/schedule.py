"""The learning rate of a step: linear warm-up, then a cosine down to the minimum.

    step <= W:   peak · step / W
    step >  W:   min + (peak - min) · ½ (1 + cos(pi · (step - W) / (D - W))),   min from step D on

Steps are counted from 1: the first update has the rate of step 1, which is not 0.
"""

from __future__ import annotations

import math

from mosar.training.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate of update number `step` >= 1."""
    peak, least, warmup = train.learning_rate, train.min_learning_rate, train.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    end = train.decay_steps or train.steps
    if step >= end:
        return least
    progress = (step - warmup) / (end - warmup)
    return least + (peak - least) * 0.5 * (1 + math.cos(math.pi * progress))
