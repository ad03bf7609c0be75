"""The disk that checkpoints are written to: how much room there is, and who may write."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class DiskSpace:
    """How many bytes a checkpoint needs, over all ranks, and how many the disk had free before it was written."""

    needed: int
    free: int

    @classmethod
    def of(cls, directory: Path, needed: int) -> "DiskSpace":
        """That of the disk with an existing directory, as this rank sees it."""
        return cls(needed, shutil.disk_usage(directory).free)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """If the block raises an OSError because the disk is full, it says how much was needed and how much was free."""
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            sizes = f"the checkpoint needs {self.needed / 1e6:,.1f} MB, and {self.free / 1e6:,.1f} MB were free"
            raise OSError(error.errno, f"the disk is full ({os.strerror(error.errno)}): {sizes}") from None


class DirectoryLock:
    """Keeps other processes that use it out of a directory, until `release` or the end of this process.

    OSError: another one holds the lock. is_held: False if this file system has no locks (some network file systems).
    """

    def __init__(self, directory: Path):
        self._descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_held = True
        except BlockingIOError:
            os.close(self._descriptor)
            raise OSError(errno.EWOULDBLOCK, f"another run is writing to {directory}") from None
        except OSError:
            self.is_held = False

    def release(self) -> None:
        """Let others in."""
        os.close(self._descriptor)
