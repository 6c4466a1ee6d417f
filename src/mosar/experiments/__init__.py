"""Runs a comparison as resumable cells: train, evaluate, record."""
