"""Names of a package that are loaded on first use, so that importing it stays light."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def load_on_use(
    names: dict[str, Any], module_of: Mapping[str, str], *, extra: str = "", needs: str = ""
) -> Callable[[str], object]:
    """The `__getattr__` of the package with globals `names`; module_of: name -> relative module.

    Where the package `needs` (as pip calls it) is missing, the error names the extra that has it.
    """
    package = names["__name__"]

    def load(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(f"{package}.{module_of[name]}")
        except ModuleNotFoundError as error:
            if not needs or (error.name or "").partition(".")[0] != needs.partition("-")[0]:
                raise
            raise ModuleNotFoundError(
                f'{name} needs {needs}, which is not installed: pip install "mosar[{extra}]"',
                name=error.name,
            ) from None
        value = names[name] = getattr(module, name)
        return value

    return load
