"""What can keep a model from being retrofitted."""


class RetrofitError(RuntimeError):
    """Something about a model, an adapter or a run that its owner can act on; one line."""
