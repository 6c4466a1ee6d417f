"""Benchmarks: competitors are timed in turn in one run; a wrong result gets no ratio."""
