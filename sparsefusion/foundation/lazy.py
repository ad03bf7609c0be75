"""Packages whose names are imported on first use, so that importing one, or its command-line help, loads no torch."""

import importlib
import sys


def exporting(package: str, homes: dict, *own: str):
    """(__all__, __getattr__, __dir__) of a package: `homes` maps a name to the module it lives in; `own` are its own."""
    names = sorted([*own, *homes])

    def attribute(name):
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{homes[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return names, attribute, lambda: names
