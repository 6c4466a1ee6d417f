"""Text to tokens: corpora, tokenizers, and the packed stream that training reads."""
