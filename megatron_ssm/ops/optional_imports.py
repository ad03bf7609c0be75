"""Imports from packages that may be missing, or compiled for another torch; each keeps the reason why it failed."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class OptionalImport:
    """The `item` that was imported from a distribution (`package`), or None and the reason (`why`)."""

    package: str
    item: Any = None
    why: str = ""


def import_optional(package: str, load: Callable[[], Any]) -> OptionalImport:
    """Call `load`, which imports something from `package`. If it raises, the result holds the reason, in one line."""
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
    """Return True if the installed `apex` is NVIDIA's, by its files; None if there is none. It is not imported."""
    spec = importlib.util.find_spec("apex")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return any(list(Path(folder, "optimizers").glob("fused_adam*")) for folder in folders) if spec else None
