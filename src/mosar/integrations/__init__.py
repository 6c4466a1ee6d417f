"""Our models inside the libraries of others."""
