"""Imports from packages that may be missing or compiled for another torch, with the reason if an import fails."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class OptionalImport:
    """An import from a distribution: the imported object, or None and the reason of the failure."""

    package: str
    item: Any = None
    why: str = ""


def import_optional(package: str, load: Callable[[], Any]) -> OptionalImport:
    """Call `load`, which imports an object from `package`. If it raises, the result has the reason, in one line."""
    try:
        return OptionalImport(package, load())
    except Exception as error:  # a package that was compiled for another torch may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == package.replace("-", "_"):
            return OptionalImport(package, why=f"{package} is not installed")
        reason = " ".join(str(error).split())[:200]
        return OptionalImport(package, why=f"{package} cannot be used ({type(error).__name__}: {reason})")


def version_of(package: str) -> str:
    """The version of a distribution, or "not installed"."""
    try:
        return metadata.version(package) or "unknown (its metadata has no version)"
    except metadata.PackageNotFoundError:
        return "not installed"


def nvidia_apex() -> bool | None:
    """Return True if the files of the installed `apex` are NVIDIA's, None if no `apex` is installed. Imports nothing."""
    spec = importlib.util.find_spec("apex")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return any(list(Path(folder, "optimizers").glob("fused_adam*")) for folder in folders) if spec else None
