"""Loads names of a package on first use, and says how to install missing packages."""

from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from typing import Any


def install_line(extra: str) -> str:
    """The pip command that installs an extra's packages, however mosar itself was installed."""
    try:
        declared = metadata.requires("mosar") or []
    except metadata.PackageNotFoundError:
        declared = []
    parts = [line.replace('"', "'").partition(";") for line in declared]
    needed = [name.strip() for name, _, marker in parts if f"extra == '{extra}'" in marker]
    return pip_line(*needed or [f"mosar[{extra}]"])


def pip_line(*packages: str, alone: bool = False) -> str:
    """The pip command that installs these packages; alone: without what they depend on."""
    quoted = (f'"{package}"' for package in packages)
    return " ".join(["pip install", *(["--no-deps"] if alone else []), *quoted])


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
                f"{name} needs {needs}, which is not installed: {install_line(extra)}",
                name=error.name,
            ) from None
        value = names[name] = getattr(module, name)
        return value

    return load
