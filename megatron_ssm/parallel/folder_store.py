"""A store of small values for ranks of one machine: files in a folder, so that nothing has to listen on a port."""

import os
import threading
from pathlib import Path


class FolderStore:
    """The part of torch's `Store` that the heartbeat needs. folder: one that only this user can write to.

    Each key is a file, which is complete when it appears under its name. Only one rank may add to a key. RuntimeError, as
    from torch's stores, if the folder cannot be used.
    """

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        try:
            self._temporary(value).replace(self._folder / key)
        except OSError as error:
            raise RuntimeError(f"{self._folder}: {error.strerror}") from None

    def get(self, key: str) -> bytes:
        """The value of a key that exists."""
        try:
            return (self._folder / key).read_bytes()
        except OSError as error:
            raise RuntimeError(f"{self._folder / key}: {error.strerror}") from None

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys exist."""
        return all((self._folder / key).exists() for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; returns the sum. Other ranks may add 0, which only reads."""
        total = (int(self.get(key)) if self.check([key]) else 0) + amount
        if amount:
            self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: str, value: str) -> None:
        """Write a value unless the key exists. expected: is "", for a key that does not exist."""
        try:
            temporary = self._temporary(value)
            try:
                os.link(temporary, self._folder / key)
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        except OSError as error:
            raise RuntimeError(f"{self._folder}: {error.strerror}") from None

    def _temporary(self, value: str) -> Path:
        """A file with the value, whose name is this thread's own."""
        path = self._folder / f".{os.getpid()}-{threading.get_ident()}"
        path.write_text(value)
        return path
