"""Finds and loads a package's C library with ctypes, or gives the reason why it cannot be used.

A package's kernels are the C files in its `native` folder. If there is a compiler, setup.py compiles them into one
shared library in the same folder, `libkernels.so`. Every kernel has an equivalent in torch, which runs when the library
is missing. With MEGATRON_SSM_SKIP_NATIVE=1 no library is built or loaded.
"""

import ctypes
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # the folder that contains the packages
COMMON = ("commfabric/native/about.c", "commfabric/native/native.h")  # compiled into every library
LIBRARY_NAME = "libkernels.so"
SIZE, POINTER, INT, FLOAT = ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_float


def skipped() -> bool:
    return os.environ.get("MEGATRON_SSM_SKIP_NATIVE", "") not in ("", "0")


def sources(package: str, root: str | Path = ROOT) -> list[Path]:
    """The C files from which a package's library is built, sorted. An installed wheel contains none."""
    own = Path(root, package, "native").glob("*.[ch]")
    return sorted({*own, *(path for name in COMMON if (path := Path(root, name)).is_file())})


def digest(package: str, root: str | Path = ROOT) -> str:
    """The SHA-256 digest of a package's C files, which setup.py compiles into the library; empty if there are no files."""
    texts = [path.read_bytes() for path in sources(package, root)]
    return hashlib.sha256(b"\0".join(texts)).hexdigest() if texts else ""


def file_of(package: str) -> Path | None:
    """The file of a package's library, or None if it was not built. One file serves every version of Python."""
    path = ROOT / package / "native" / LIBRARY_NAME
    return path if path.is_file() else None


class Library:
    """The C library of a package. It is truthy if it can be used.

    Args:
        signatures: {function name: its argument types}. All functions return an int.
        path: The library file, by default the package's own.

    Attributes:
        functions: The ctypes library, or None if it cannot be used.
        why: The reason why it cannot be used, or "".
        variant: The instruction set of its kernels.
    """

    def __init__(self, package: str, signatures: Mapping[str, Any], path: str | Path | None = None):
        self.package, self.why, self.variant = package, "", ""
        self.functions: Any = None  # not `CDLL | None`: functions of a CDLL have no types, and `bool(self)` is checked
        try:
            self.functions = self._load(Path(path) if path else self._path(), signatures)
            self.variant = self.functions.native_variant().decode()
        except (OSError, AttributeError) as error:  # AttributeError: the library lacks a function
            self.why = str(error)

    def _path(self) -> Path:
        if skipped():
            raise OSError("MEGATRON_SSM_SKIP_NATIVE is set")
        path = file_of(self.package)
        if path is None:
            raise OSError("not built: it needs a C compiler when the package is installed")
        return path

    def _load(self, path: Path, signatures: Mapping[str, Any]) -> ctypes.CDLL:
        library = ctypes.CDLL(str(path))
        for name in ("native_sources", "native_variant"):
            getattr(library, name).restype = ctypes.c_char_p
        built_from, here = library.native_sources().decode(), digest(self.package)
        if built_from and here and built_from != here:
            raise OSError(f"{path.name} was not built from the C files next to it: install the package again")
        for name, types in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, INT
        return library

    def __bool__(self) -> bool:
        return self.functions is not None

    def __str__(self) -> str:
        return f"C, {self.variant}" if self else f"torch ({self.why})"
