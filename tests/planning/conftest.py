"""The corpus of the training tests, to train a step on."""

from training.conftest import dataset, smoke  # noqa: F401
