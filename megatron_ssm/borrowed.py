"""Functions and classes of packages that may be missing, or built for another torch: found out once, with the reason."""

from dataclasses import dataclass


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
