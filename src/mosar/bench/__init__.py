"""Measuring: competitors side by side, in one run, and never a ratio for a wrong result."""
