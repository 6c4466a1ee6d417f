"""`mosar generate`: a model from a folder, a prompt, text as it is written."""
