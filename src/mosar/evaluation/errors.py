"""What can keep a run from being evaluated."""


class EvaluationError(RuntimeError):
    """Something about the run or its data that its owner can act on; its text is one line."""
