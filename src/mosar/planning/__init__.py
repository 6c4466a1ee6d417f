"""Pencil and paper for training and serving: what `mosar plan` computes."""
