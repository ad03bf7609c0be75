"""Ranks on one host: tests whether they can share memory, maps it, and detects ranks that have died."""

import errno
import mmap
import os
import select
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from commfabric.native.library import Library

from .agreement import gather_objects

PREFIX = "sparsefusion-"  # the temporary name of the file is this prefix and the process id


def describe_rank(library: Library) -> dict[str, Any]:
    """The machine of this rank, to compare with other ranks, or the reason ("why") why it cannot share memory."""
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
    except OSError as error:  # not Linux
        return {"why": str(error)}


def reason_not_to_share(ranks: Sequence[dict[str, Any]]) -> str:
    """The reason why these ranks cannot share memory, or "". ranks: the `describe_rank` of every rank."""
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
    """(memory of `nbytes` zeros, a `ProcessWatch` of the other ranks, ""), or (None, None, reason) on every rank.

    Rank 0 creates a file without a name, and the other ranks open it through rank 0's descriptor in /proc, which the kernel
    allows to processes of the same user only. The kernel frees the file when the last process closes it or dies. pids: the
    process ids of all ranks.
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
    """(result, ""), or (None, message of the OSError), because this rank must not raise alone while other ranks wait."""
    try:
        return function(*arguments), ""
    except OSError as error:
        return None, str(error)


def _create(nbytes: int) -> int:
    """The descriptor of a new unnamed file of `nbytes` allocated zeros, which only this user may open."""
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
    """(path, device, inode) by which other processes open and identify this open file."""
    if descriptor is None:
        return None
    status = os.fstat(descriptor)
    return f"/proc/{os.getpid()}/fd/{descriptor}", status.st_dev, status.st_ino


def _map(location: tuple[str, int, int], nbytes: int) -> mmap.mmap:
    """Map the file at a `_location` into memory. OSError if it is not the file that rank 0 created."""
    path, device, inode = location
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino, status.st_size) != (device, inode, nbytes):
            raise OSError(f"{path} is not the same file as on rank 0")
        return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    finally:
        os.close(descriptor)


class ProcessWatch:
    """Detects which processes of the other ranks have died, even before a killed process has been reaped.

    pids: of all ranks. this: the number of this rank.
    """

    def __init__(self, pids: Sequence[int], this: int):
        self.pids = pids
        self._ranks: dict[int, int] = {}  # {process descriptor: rank}
        self._poll = select.poll()
        self._without_descriptor: list[int] = []  # ranks whose death is noticed only when they have been reaped
        for rank, pid in enumerate(pids):
            try:
                if rank != this:
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
        ended = {self._ranks[descriptor] for descriptor, _ in self._poll.poll(0)} if self._ranks else set()
        return ended | {rank for rank in self._without_descriptor if not _exists(self.pids[rank])}

    def close(self) -> None:
        while self._ranks:
            os.close(self._ranks.popitem()[0])


def _exists(pid: int) -> bool:
    """Return True if this user has a process with this id."""
    try:
        os.kill(pid, 0)
    except OSError:  # no such process, or the id was reused for another user's
        return False
    return True
