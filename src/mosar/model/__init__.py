"""The Gemma 2-style decoder that all variants share; geometries/ has what a variant changes."""
