"""Fast ways to compute what the reference defines; they import the core, never its reference."""
