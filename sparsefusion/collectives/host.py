"""Ranks on one host: whether they are on one, memory that they share, and which of them have died."""

import errno
import mmap
import os
import select
import tempfile
from pathlib import Path

import torch.distributed as dist

PREFIX = "sparsefusion-"  # of the file's name, while it has one; the process's number follows


def gather_objects(value, group) -> list:
    """Every rank's value, in rank order."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def describe_rank(library) -> dict:
    """Where this rank runs, or why it cannot share memory; to be compared with the other ranks."""
    if not library:
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


def reason_not_to_share(ranks) -> str:
    """Why these ranks cannot share memory, from their `describe_rank`; empty: no reason is known."""
    for rank, description in enumerate(ranks):
        if description["why"]:
            return f"rank {rank}: {description['why']}"
    for rank, description in enumerate(ranks):
        for what in [*description][2:]:  # after why and pid
            if description[what] != ranks[0][what]:
                return f"ranks 0 and {rank} {what}"
    return ""


def map_shared_file(nbytes, pids, group):
    """(memory, watch over the other ranks, ""), or (None, None, reason) on every rank.

    Rank 0 creates a file, and removes its name when all ranks have opened it, or when something has failed.
    """
    path, why = _outcome(_create, nbytes) if group.rank() == 0 else (None, "")
    try:
        named, why = gather_objects((path, why), group)[0]
        if why:
            return None, None, f"rank 0: {why}"
        memory, why = _outcome(_open, named, nbytes)
        watch, blind = _outcome(ProcessWatch, pids, group.rank())
        whys = gather_objects(why or blind, group)
    finally:
        if path:
            os.unlink(path)
    failed = [f"rank {rank}: {why}" for rank, why in enumerate(whys) if why]
    if failed:
        for opened in filter(None, (memory, watch)):
            opened.close()
        return None, None, failed[0]
    return memory, watch, ""


def _outcome(function, *arguments):
    """(result, ""), or (None, the operating system's error)."""
    try:
        return function(*arguments), ""
    except OSError as error:
        return None, str(error)


def _create(nbytes) -> str:
    """The path of a new file of `nbytes` zeros, allocated, which only this user may open."""
    problems = []
    for folder in dict.fromkeys(("/dev/shm", tempfile.gettempdir())):
        try:
            descriptor, path = tempfile.mkstemp(prefix=f"{PREFIX}{os.getpid()}-", dir=folder)
        except OSError as error:
            problems.append(str(error))
            continue
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return path
        except OSError as error:
            problems.append(f"no {nbytes} bytes in {folder}: {error}")
            os.unlink(path)
        finally:
            os.close(descriptor)
    raise OSError("; ".join(problems))


def _open(path, nbytes):
    """Map a file into memory."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    finally:
        os.close(descriptor)


class ProcessWatch:
    """Detects which processes of the other ranks have died, even before a killed process has been reaped."""

    def __init__(self, pids, own):
        self.pids, self._ranks, self._poll = pids, {}, select.poll()
        self._unseen = []  # ranks without a descriptor, whose death is seen when they have been reaped
        for rank, pid in enumerate(pids):
            try:
                if rank != own:
                    self._add(rank, pid)
            except OSError:
                self.close()
                raise

    def _add(self, rank, pid) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", errno.ENOSYS) not in (errno.ENOSYS, errno.EPERM):
                raise
            os.kill(pid, 0)
            self._unseen.append(rank)
            return
        self._ranks[descriptor] = rank
        self._poll.register(descriptor, select.POLLIN)

    def dead_ranks(self) -> set[int]:
        """The ranks whose processes have ended."""
        ended = {self._ranks[descriptor] for descriptor, _ in self._poll.poll(0)} if self._ranks else set()
        return ended | {rank for rank in self._unseen if not _exists(self.pids[rank])}

    def close(self) -> None:
        """ProcessWatch no more."""
        while self._ranks:
            os.close(self._ranks.popitem()[0])


def _exists(pid) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:  # no such process, or by now another user's
        return False
    return True
