"""The command line: `mosar COMMAND --help` teaches each command.

Exit codes: 0 done; 1 it failed, and one line on stderr says why; 2 wrong usage; 130 Ctrl-C.
Heavy modules are imported inside the commands, so that help is immediate.
"""
# ruff: noqa: F401, I001

# A module adds its command when it is imported; help lists them in this order.
from mosar.cli import prepare, train, consolidate, retrofit, evaluate, reproduce, report
from mosar.cli import plan, variants, look, generate, export, import_model, figure, bench
from mosar.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    app()
