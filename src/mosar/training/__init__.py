"""Training: one loop for every variant, and run folders that survive whatever happens to it."""
