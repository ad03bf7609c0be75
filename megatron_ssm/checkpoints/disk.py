"""Access to the disk of checkpoints: locks, hidden folders, synchronization, reads with retries, and one-line errors."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError

from commfabric.foundation.command_line import INPUT_ERRORS, Failure, first_line, is_lack_of_memory

MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
WAITS = (0.1, 0.5, 1.5)  # seconds before a read is tried again
Result = TypeVar("Result")


def sync_directory(directory: Path) -> None:
    """Write the names of a directory's files to the disk, so that they survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # this file system cannot do it
            raise
    finally:
        os.close(descriptor)


def read_with_retries(read: Callable[[], Result], path: object) -> Result:
    """Call `read`, which reads something at `path`, and return its result.

    It is called again after an error of the disk or the network (EIO, ESTALE, a time-out), for about two seconds; then
    Failure. If memory is short or the GPU has failed, Failure at once. So such an error is not taken for a damaged file.
    The errors of missing and of damaged files are not changed.
    """
    waits = [*WAITS]
    while True:
        try:
            return read()
        except Exception as error:
            is_of_disk = isinstance(error, OSError) and not isinstance(error, MISSING)
            if not is_of_disk and not is_machine_error(error):
                raise
            if not is_of_disk or not waits:
                tried = f" (tried {len(WAITS) + 1} times)" * is_of_disk
                raise Failure(f"cannot read {path}: {first_line(error)}{tried}") from None
            time.sleep(waits.pop(0))


def is_machine_error(error: BaseException) -> bool:
    """Return True if memory is short or the GPU has failed, which says nothing about the file that is read.

    Some of these errors of torch are a RuntimeError like those about damaged files, and differ in their text only.
    """
    is_of_gpu = isinstance(error, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
    return is_of_gpu or is_lack_of_memory(error) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))


class DirectoryLock:
    """A lock on a directory until `release` or the end of this process. OSError if another process holds it.

    is_held: False if this file system has no locks, like some network file systems.
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
        os.close(self._descriptor)


class HiddenFolder:
    """A new folder DIRECTORY/.saving-XXXX for files that are moved into place when all are written.

    Only its owner can enter it. This process holds a lock on it until `remove`. Such folders without a lock belong to killed
    writers and are removed first, unless the file system has no locks. DIRECTORY is created if it is missing.
    """

    def __init__(self, directory: Path):
        self._made = None if directory.exists() else directory
        directory.mkdir(parents=True, exist_ok=True)
        for other in directory.glob(".saving-*"):
            with contextlib.suppress(OSError):  # its writer holds the lock, or has just removed it
                lock = DirectoryLock(other)
                if lock.is_held:
                    shutil.rmtree(other, ignore_errors=True)
                lock.release()
        try:
            new = Path(tempfile.mkdtemp(prefix=".new.saving-", dir=directory))  # which other writers do not look for
        except OSError:
            self._remove_directory()
            raise
        self._lock = DirectoryLock(new)
        self.path = new.rename(directory / new.name.removeprefix(".new"))

    def remove(self) -> None:
        """Remove the folder with its files, and DIRECTORY too if this object made it and it is empty."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()
        self._remove_directory()

    def _remove_directory(self) -> None:
        """Remove the directory if this made it and it is empty."""
        if self._made is not None:
            with contextlib.suppress(OSError):
                self._made.rmdir()


@contextlib.contextmanager
def in_one_line(operation: str, error_type: type[Exception] = Failure) -> Iterator[None]:
    """Context or decorator: replace an OSError, or an `error_type`, by an `error_type` with the text "operation: cause".

    operation: The text that names the failed operation. A Failure passes through, because its message is already complete.
    """
    replaced = (OSError,) if error_type is Failure else (OSError, error_type)
    try:
        yield
    except replaced as error:
        raise error_type(f"{operation}: {first_line(error)}") from error


@contextlib.contextmanager
def os_errors_as(operation: str, error_type: type[Exception]) -> Iterator[None]:
    """Context: replace an error of the disk or of safetensors by an `error_type` with the text "operation: cause".

    INPUT_ERRORS, such as FileNotFoundError, pass through.
    """
    try:
        yield
    except INPUT_ERRORS:
        raise
    except (OSError, SafetensorError) as error:
        raise error_type(f"{operation}: {first_line(error)}") from None
