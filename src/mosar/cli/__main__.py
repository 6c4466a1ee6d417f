"""`python -m mosar.cli`."""

from mosar.cli import main

main()
