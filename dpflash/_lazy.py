"""Lazy imports: a package's `__getattr__`, which imports a name or module on first access."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, modules: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports the package's names and modules.

    Args:
        package: the package's `__name__`.
        modules: name -> the module of the package that defines the name.
    """
    modules = modules or {}

    def find(name: str) -> Any:
        if name in modules:
            found = getattr(import_module(f"{package}.{modules[name]}"), name)
            setattr(sys.modules[package], name, found)
            return found
        module = f"{package}.{name}"
        try:
            if not name.startswith("_"):
                return import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
