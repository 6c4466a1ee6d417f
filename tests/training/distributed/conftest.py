"""The corpus of the training tests, for several processes."""

from training.conftest import dataset, smoke  # noqa: F401
