from training.conftest import dataset  # noqa: F401
