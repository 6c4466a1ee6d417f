"""Tables and figures; only the command line imports it, and only here matplotlib is needed."""
