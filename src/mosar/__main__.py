"""`python -m mosar`, and so `torchrun … -m mosar train …`."""

from mosar.cli import main

if __name__ == "__main__":
    main()
