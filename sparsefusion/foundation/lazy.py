"""Lazy exports: a package imports a name on first use, so that importing the package loads no torch."""

import importlib
import sys


def lazy_exports(package: str, homes: dict, *own: str):
    """(__all__, __getattr__, __dir__) of a package. homes: {name: its module}. own: names of the package itself."""
    names = sorted([*own, *homes])

    def attribute(name):
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{homes[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return names, attribute, lambda: names
