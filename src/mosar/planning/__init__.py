"""Estimates for training and serving: what `mosar plan` computes."""
