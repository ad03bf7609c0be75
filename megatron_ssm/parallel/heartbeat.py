"""Notices ranks that have ended, hang, or cannot be reached, and ends the others with one line that names them.

A collective with such a rank waits until its time-out, or fails with an error that names no rank. So a thread of each rank
counts beats in a store (torchrun's, rank 0's, or a folder of this machine) and watches the beats of the next rank. The first
to miss one compares the beats of all ranks, and leaves in the store which have stopped; every rank reads it there. A second
thread notices if the store itself does not answer. The training thread does nothing, so a step costs no more.

A process that hangs cannot end itself. The ranks of its machine kill it just before they end, because launchers wait for
long (torchrun and DeepSpeed's: 30 s) until they kill what does not handle their SIGTERM. If it is alone on its machine, its
watchdog does it, a process that hears each beat.

A long call that holds Python's global lock stops the thread's beats as well. So a rank writes into the store, before such a
call, for how long it may be silent, and tells its watchdog.
"""

import contextlib
import json
import os
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .folder_store import FolderStore
from .processes import Process, Watchdog

LEFT = 1 << 40  # added to the beats of a rank that has left on purpose
ROUNDS = 3  # rounds in which a rank that runs has beaten at least once
RANK_0 = "rank 0"  # how the name of its store begins
LOST = "lost"  # the key under which the ranks that have stopped are written

# Announces that this rank may be silent for a number of seconds, in the block of the context that it returns.
Busy = Callable[[float], contextlib.AbstractContextManager]


@dataclass
class Watch:
    """What a program tells the watch.

    busy: see `Busy`. on_loss: is called in another thread when ranks are lost, soon before the process ends.
    """

    busy: Busy = contextlib.nullcontext
    on_loss: Callable[[], None] = lambda: None


@contextlib.contextmanager
def watched(limit: float, folder: str | Path | None = None) -> Iterator[Watch]:
    """Watch the ranks of the default group in this block; all of them enter it together.

    limit: the seconds without a beat after which a rank counts as lost (0: do not watch). Then, or if communication in the
    block has failed because a rank has ended, the process ends with code 1, on all ranks that run, and the first of these
    prints the line. folder: one of this machine, that only this user can write to, for the beats (None: the launcher's
    store, at MASTER_ADDR; without a launcher, the ranks are not watched).
    """
    ranks, watch = dist.get_world_size() if dist.is_initialized() else 1, Watch()
    if ranks == 1 or (folder is None and "MASTER_ADDR" not in os.environ):
        yield watch
        return
    # All ranks take part in this, also those whose limit is 0, because the limit is not compared between ranks yet.
    starts: list[Any] = [None] * ranks
    dist.all_gather_object(starts, (uuid.uuid4().hex, Process.own()))
    if not limit:
        yield watch
        return
    # The launcher's store may have keys of ranks before a restart, so those of this start have a prefix.
    store, place = _store_of_launcher(limit, starts[0][0]) if folder is None else (FolderStore(folder), str(folder))
    heartbeat = _Heartbeat(dist.get_rank(), [process for _, process in starts], limit, store, place, watch)
    try:
        yield watch
    except RuntimeError as error:  # what torch and the shared memory raise if a rank has ended
        heartbeat.explain(error)
        raise
    except BaseException:
        heartbeat.stop()
        raise
    else:
        heartbeat.stop(leaves=True)


def _store_of_launcher(limit: float, start: str) -> tuple[dist.Store, str]:
    """The store in which the ranks have met, for keys that begin with `start`, and its name in errors."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = f"{'torchrun' if is_shared else RANK_0}'s store at {host}:{port}"
    # A connection of its own: the training thread may wait for an answer to its own question.
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit), wait_for_workers=False)
    return dist.PrefixStore(f"heartbeat {start}", store), place


class _Heartbeat:
    """The beats of this rank, and its watch over the others. store: a torch store or a `FolderStore`; place: its name."""

    def __init__(self, rank: int, processes: list[Process], limit: float, store: Any, place: str, watch: Watch):
        self.rank, self.ranks, self.limit = rank, len(processes), limit
        self._processes = processes  # of all ranks
        self.interval = min(1.0, limit / 10)
        self._store, self._place, self._watch = store, place, watch
        watch.busy = self._busy
        self._unanswered = 0  # beats since the store has answered
        self._failure: str | None = None  # of the training thread
        self._communication_failed = True  # False: the failure is another error of the training thread
        self._stopped, self._asked, self._answered = threading.Event(), threading.Event(), threading.Event()
        self._leaves = False
        self._store.add(f"beats {rank}", 1)  # a rank that has never beaten is not watched
        self._watchdog = self._own_watchdog()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._beat, self._watch_store)]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._end_watchdog()
            raise

    def _own_watchdog(self) -> Watchdog | None:
        """A watchdog for a rank that is alone on its machine. It acts later than the other ranks would."""
        machines = [process.machine for process in self._processes]
        own = machines[self.rank]
        if not own or machines.count(own) > 1:
            return None
        try:
            return Watchdog(self.limit + 3 * ROUNDS * self.interval, ROUNDS * self.interval)
        except OSError as error:
            _print(f"rank {self.rank} of {self.ranks} has no watchdog: {error}")
            return None

    def _tell_watchdog(self, longer: float = 0.0) -> None:
        """Tell the watchdog, if there is one, that this rank runs. longer: see `Watchdog.tell`."""
        if self._watchdog is not None:
            self._watchdog.tell(longer)

    def _end_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.end()

    @contextlib.contextmanager
    def _busy(self, seconds: float) -> Iterator[None]:
        """See `Busy`. The pause is added to the limit."""
        if seconds < self.interval:  # then it beats within two rounds, and a comparison takes ROUNDS
            yield
            return
        self._store.set(f"pause {self.rank}", str(seconds))
        self._tell_watchdog(longer=seconds)
        try:
            yield
        finally:
            self._tell_watchdog(longer=-seconds)
            with contextlib.suppress(RuntimeError):  # the store has ended, which the second thread notices
                self._store.set(f"pause {self.rank}", "0")

    def explain(self, error: RuntimeError) -> None:
        """End the process with the line of the ranks that have stopped; return if none has, so that the error is a bug."""
        self._failure, self._communication_failed = _described(error), _is_communication_error(error)
        self._asked.set()
        self._answered.wait()
        self.stop()

    def stop(self, leaves: bool = False) -> None:
        """Stop watching. leaves: tell the others that this rank leaves because its work is done."""
        self._leaves = leaves
        self._stopped.set()
        self._threads[0].join(ROUNDS * self.interval)
        self._end_watchdog()

    # The first thread

    def _beat(self) -> None:
        """Beat, and watch the next rank, until it is stopped or a rank is lost."""
        seen, missed = -1, 0
        try:
            while not self._stopped.wait(0 if self._asked.is_set() else self.interval):
                self._store.add(f"beats {self.rank}", 1)
                self._tell_watchdog()
                if self._store.check([LOST]):
                    self._end(json.loads(self._store.get(LOST)))
                beats = self._beats((self.rank + 1) % self.ranks)
                missed = missed + 1 if 0 < beats == seen < LEFT else 0
                seen, self._unanswered = beats, 0
                if self._asked.is_set() or self._is_late((self.rank + 1) % self.ranks, missed * self.interval):
                    self._compare()
                    if self._asked.is_set():
                        self._answered.set()
                        return
            if self._leaves:
                self._store.add(f"beats {self.rank}", LEFT)
        except RuntimeError:  # the store has ended; the second thread ends this process, unless it is stopped before
            while not self._stopped.wait(self.interval):
                if self._asked.is_set():
                    self._end_alone(f"{self._place} has ended")

    def _beats(self, rank: int) -> int:
        return self._store.add(f"beats {rank}", 0)

    def _is_late(self, rank: int, silent: float) -> bool:
        """Whether a rank has been silent, for so many seconds, longer than it may."""
        return silent >= self.limit and silent >= self.limit + self._pause(rank)

    def _pause(self, rank: int) -> float:
        """The seconds for which a rank has announced to be silent."""
        key = f"pause {rank}"
        return float(self._store.get(key)) if self._store.check([key]) else 0.0

    def _compare(self) -> None:
        """Find the ranks that do not beat, and leave them in the store for all others, unless another rank was faster.

        Ranks that have announced a pause count as lost if no other is silent, unless this rank asks because of an error that
        is not one of communication.
        """
        before = [self._beats(rank) for rank in range(self.ranks)]
        for _ in range(ROUNDS):
            self._stopped.wait(self.interval)
            self._store.add(f"beats {self.rank}", 1)
        after = [self._beats(rank) for rank in range(self.ranks)]
        silent = [rank for rank in range(self.ranks) if after[rank] == before[rank] < LEFT]
        lost = [rank for rank in silent if not self._pause(rank)] or (silent if self._communication_failed else [])
        if lost:
            names = ", ".join(f"{rank} of {self.ranks} ({self._processes[rank]})" for rank in lost)
            cause = self._failure or f"there was no sign of life for {self.limit:g} s"
            line = f"rank {names} has ended, hangs or cannot be reached: {cause}"
            running = [rank for rank in range(self.ranks) if rank not in lost and after[rank] < LEFT]
            found = {"prints": min(running, default=self.rank), "line": line, "lost": lost}
            self._store.compare_set(LOST, "", json.dumps(found))
            self._end(json.loads(self._store.get(LOST)))

    def _end(self, found: dict) -> None:
        """End this process, and those of lost ranks on this machine; the first rank of those that run prints the line.

        It waits before, as launchers end all ranks after the first, and the store may end with this process.
        """
        if self.rank == found["prints"]:
            _print(found["line"])
        try:
            self._watch.on_loss()
        finally:
            threading.Event().wait(ROUNDS * self.interval)
            self._kill(found["lost"])
            os._exit(1)

    def _end_alone(self, what: str) -> None:
        """End this process, which cannot agree with the others on who prints the line, and rank 0 if it has the store."""
        _print(f"rank {self.rank} of {self.ranks}: {what}: {self._failure or 'so the other ranks cannot be reached'}")
        self._kill([0] if self._place.startswith(RANK_0) else [])
        os._exit(1)

    def _kill(self, lost: list[int]) -> None:
        """Kill those of the lost ranks that are processes of this machine."""
        for rank in lost:
            if rank != self.rank:  # this one has woken up too late
                self._processes[rank].kill_if_here()

    # The second thread

    def _watch_store(self) -> None:
        """End this process if the store does not answer within the limit."""
        while not self._stopped.wait(self.interval):
            self._unanswered += 1
            if self._unanswered * self.interval > self.limit + ROUNDS * self.interval:
                self._end_alone(f"{self._place} has not answered for {self.limit:g} s")


def _is_communication_error(error: RuntimeError) -> bool:
    """Whether communication has failed: torch's own errors, and those of gloo, which begin with its source file."""
    return isinstance(error, dist.DistError) or str(error).startswith("[")


def _described(error: RuntimeError) -> str:
    """The first line of an error, without gloo's source file and advice."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[\S+:\d+\] |\. This is typically .*", "", line)


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk: the process must end nevertheless
        print(line, file=sys.stderr, flush=True)
