"""Functions and classes of packages that may be missing, or built for another torch: found out once, with the reason."""

import importlib.util
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Borrowed:
    """What a package gives, or None and why not; package: the distribution's name."""

    package: str
    item: object = None
    why: str = ""


def borrow(package: str, load) -> Borrowed:
    """What `load` imports; whatever it raises is the reason, in one line."""
    try:
        return Borrowed(package, load())
    except Exception as error:  # a package that was compiled beside another torch may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == package.replace("-", "_"):
            return Borrowed(package, why=f"{package} is not installed")
        reason = " ".join(str(error).split())[:200]
        return Borrowed(package, why=f"{package} cannot be used ({type(error).__name__}: {reason})")


def version_of(package) -> str:
    """Of an installed distribution, or that it is not."""
    try:
        return metadata.version(package) or "unknown (its metadata has no version)"
    except metadata.PackageNotFoundError:
        return "not installed"


def nvidia_apex() -> bool | None:
    """Whether the apex that would be imported is NVIDIA's (None: there is none). Does not import it."""
    spec = importlib.util.find_spec("apex")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return any(list(Path(folder, "optimizers").glob("fused_adam*")) for folder in folders) if spec else None
