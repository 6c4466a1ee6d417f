"""What can be wrong with a model's folder."""


class ModelFolderError(RuntimeError):
    """Something about a folder that its owner can act on; its text is one line."""
