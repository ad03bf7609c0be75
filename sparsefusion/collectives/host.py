"""Ranks on one host: whether they can share memory, the memory itself, and which ranks have died."""

import errno
import mmap
import os
import select
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sparsefusion.native.library import Library

from .agreement import gather_objects

PREFIX = "sparsefusion-"  # of the name that the file has until it is opened; the process's number follows


def describe_rank(library: Library) -> dict[str, Any]:
    """This rank's machine, or the reason why it cannot share memory; compared with those of other ranks."""
    if library.functions is None:
        return {"why": f"no C library: {library.why}"}
    try:
        return {
            "why": "",
            "pid": os.getpid(),
            "run on different machines": (Path("/proc/sys/kernel/random/boot_id").read_text(), os.uname().nodename),
            "are in different network namespaces": os.stat("/proc/self/ns/net").st_ino,
            "are in different process namespaces": os.stat("/proc/self/ns/pid").st_ino,
            "have C libraries of different sources": library.functions.native_sources(),
        }
    except OSError as error:  # as on other systems than Linux
        return {"why": str(error)}


def reason_not_to_share(ranks: Sequence[dict[str, Any]]) -> str:
    """Why these ranks cannot share memory, from the `describe_rank` of each; empty if no reason is known."""
    for rank, description in enumerate(ranks):
        if description["why"]:
            return f"rank {rank}: {description['why']}"
    for rank, description in enumerate(ranks):
        for property in [*description][2:]:  # after why and pid
            if description[property] != ranks[0][property]:
                return f"ranks 0 and {rank} {property}"
    return ""


def map_shared_file(
    nbytes: int, pids: Sequence[int], group: dist.ProcessGroup
) -> "tuple[mmap.mmap, ProcessWatch, str] | tuple[None, None, str]":
    """(memory of `nbytes` zeros, watch over the other ranks, ""), or (None, None, reason) on every rank.

    pids: the process of each rank. Rank 0 creates a file without a name, and the other ranks open it through rank 0's
    descriptor in /proc, which the kernel allows to processes of the same user only. The kernel frees the file when no
    process uses it any more, however the ranks end.
    """
    descriptor, why = _try(_create, nbytes) if group.rank() == 0 else (None, "")
    memory = watch = None
    is_shared = False
    try:
        location, why = gather_objects((_location(descriptor), why), group)[0]
        if why:
            return None, None, f"rank 0: {why}"
        memory, why = _try(_map, location, nbytes)
        watch, why_no_watch = _try(ProcessWatch, pids, group.rank())
        reasons = gather_objects(why or why_no_watch, group)
        failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
        is_shared = not failed
        return (memory, watch, "") if is_shared else (None, None, failed[0])
    finally:
        if descriptor is not None:
            os.close(descriptor)
        if not is_shared:
            for resource in (memory, watch):
                if resource is not None:
                    resource.close()


def _try(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """(result, ""), or (None, the operating system's error): other ranks wait, so this one must not raise alone."""
    try:
        return function(*arguments), ""
    except OSError as error:
        return None, str(error)


def _create(nbytes: int) -> int:
    """The descriptor of a new file of `nbytes` zeros, allocated, which only this user may open and which has no name."""
    problems = []
    for find_folder in (lambda: "/dev/shm", tempfile.gettempdir):
        try:
            folder = find_folder()
            descriptor, path = tempfile.mkstemp(prefix=f"{PREFIX}{os.getpid()}-", dir=folder)
        except OSError as error:
            problems.append(str(error))
            continue
        try:
            os.unlink(path)  # at once, so that nothing is left behind when this process is killed
            os.posix_fallocate(descriptor, 0, nbytes)
            return descriptor
        except OSError as error:
            problems.append(f"no {nbytes} bytes in {folder}: {error}")
            os.close(descriptor)
    raise OSError("; ".join(problems))


def _location(descriptor: int | None) -> tuple[str, int, int] | None:
    """The path at which other processes find an open file, and the device and inode that identify it."""
    if descriptor is None:
        return None
    status = os.fstat(descriptor)
    return f"/proc/{os.getpid()}/fd/{descriptor}", status.st_dev, status.st_ino


def _map(location: tuple[str, int, int], nbytes: int) -> mmap.mmap:
    """Map the file at a `_location` into memory. OSError also if it is another file than the one that rank 0 created."""
    path, device, inode = location
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino, status.st_size) != (device, inode, nbytes):
            raise OSError(f"{path} is another file on this rank than on rank 0")
        return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    finally:
        os.close(descriptor)


class ProcessWatch:
    """Detects which processes of the other ranks have died, even before a killed process has been reaped.

    pids: the process of each rank. own: this rank.
    """

    def __init__(self, pids: Sequence[int], own: int):
        self.pids = pids
        self._ranks: dict[int, int] = {}  # of each descriptor
        self._poll = select.poll()
        self._without_descriptor: list[int] = []  # ranks whose death is noticed only when they have been reaped
        for rank, pid in enumerate(pids):
            try:
                if rank != own:
                    self._add(rank, pid)
            except OSError:
                self.close()
                raise

    def _add(self, rank: int, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", errno.ENOSYS) not in (errno.ENOSYS, errno.EPERM):
                raise
            os.kill(pid, 0)  # raises an error if there is no such process
            self._without_descriptor.append(rank)
            return
        self._ranks[descriptor] = rank
        self._poll.register(descriptor, select.POLLIN)

    def dead_ranks(self) -> set[int]:
        """The ranks whose processes have ended."""
        ended = {self._ranks[descriptor] for descriptor, _ in self._poll.poll(0)} if self._ranks else set()
        return ended | {rank for rank in self._without_descriptor if not _exists(self.pids[rank])}

    def close(self) -> None:
        """Stop watching, and close the descriptors."""
        while self._ranks:
            os.close(self._ranks.popitem()[0])


def _exists(pid: int) -> bool:
    """Return True if there is such a process, of this user."""
    try:
        os.kill(pid, 0)
    except OSError:  # no such process, or by now another user's
        return False
    return True
