"""The Gemma 2-style decoder that all variants share; geometries.py has what a variant changes."""
