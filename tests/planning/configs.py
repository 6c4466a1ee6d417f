"""Small configurations to plan for."""

from mosar.training.config import resolve_config


def small_config(variant="mosar", preset="smoke", *changes):
    return resolve_config(
        variant=variant, preset=preset, data=".", vocab_size=500, changes=list(changes)
    )
