"""What can be wrong with a corpus, a tokenizer or a dataset."""


class DataError(ValueError):
    """Something about the data that its owner can act on; its text is one line."""
