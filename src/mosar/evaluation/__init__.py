"""What a run has learnt: perplexity by length, routing, density, discarded mass, retrieval."""
