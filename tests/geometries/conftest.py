"""The corpus and the configurations of training, for the runs that every variant makes."""

from training.conftest import dataset, smoke

__all__ = ["dataset", "smoke"]
