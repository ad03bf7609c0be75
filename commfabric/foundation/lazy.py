"""Lazy exports: a package imports a name on first use, so that importing the package loads no torch."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def version() -> str:
    """The version of all packages, which are installed together; "0+unknown" in a checkout that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("megatron-ssm")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def lazy_exports(
    package: str, modules: Mapping[str, str], *own: str
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """(__all__, __getattr__, __dir__) for the `__init__.py` of `package`, which thereby has a `__version__`, too.

    modules: {exported name: the module that defines it, or that is exported itself}; a leading dot stands for the package.
    own: exported names that `__init__.py` itself defines.
    """
    names = sorted([*own, *modules])

    def attribute(name: str) -> Any:
        if name == "__version__":
            return version()
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name], package)
        is_module = module.__name__.endswith(f".{name}") and not hasattr(module, name)
        value = module if is_module else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return names, attribute, lambda: names
