"""The whole comparison as cells that can be interrupted: train, evaluate, record."""
