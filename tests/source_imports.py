"""What source files import, read from their syntax trees: lazy imports count too."""

from __future__ import annotations

import ast
from pathlib import Path

import mosar

SOURCE = Path(mosar.__file__).parent


def imports_of(package: str) -> dict[str, set[str]]:
    """File (relative to src/mosar) -> absolute names of the modules it imports."""
    return {
        str(path.relative_to(SOURCE)): _imports_of_file(path)
        for path in sorted((SOURCE / package).rglob("*.py"))
    }


def _imports_of_file(path: Path) -> set[str]:
    here = ("mosar", *path.relative_to(SOURCE).parts[:-1])
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # "from mosar.core import config" imports a module, "from torch import Tensor" may not.
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names
