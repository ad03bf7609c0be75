"""Notices ranks that have ended, hang or cannot be reached, and ends the others with one line that names them.

A collective with such a rank waits until its time-out, or fails with an error that names no rank. So a thread of each rank
counts beats in a store: torchrun's, or one of rank 0. Rank 0 watches the beats of all ranks, and the others those of rank 0.
The first to miss some writes into the store which ranks are lost and prints the line; the others read it there, and all end.
The training thread does nothing, so a step costs no more.

Launchers send SIGTERM to the ranks that are left, and wait for long (torchrun and DeepSpeed's: 30 s) until they kill those
that do not handle it, as one that hangs. So the others on its machine kill it before they end.
"""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

LEFT = 1 << 40  # added to the beats of a rank that has left on purpose
ROUNDS = 3  # rounds in which a rank that runs has beaten at least once
LOST = "lost"  # the key under which the ranks that are lost are written
RANK_0 = "rank 0"  # how the name of its store begins


@dataclass
class Watch:
    """What a program tells the watch. on_loss: is called in another thread when ranks are lost, before the process ends."""

    on_loss: Callable[[], None] = lambda: None


@contextlib.contextmanager
def watched(limit: float, local: bool = False) -> Iterator[Watch]:
    """Watch the ranks of the default group in this block; all of them enter it together.

    limit: the seconds without a beat after which a rank counts as lost (0: do not watch); that of rank 0 counts. Then, or if
    communication in the block has failed because a rank has ended, the process ends with code 1, on all ranks that run, and
    the first of these prints the line. local: all ranks are on this machine, and rank 0 opens a store for the beats, which
    no other machine can reach (False: the launcher's store, at MASTER_ADDR; without a launcher, the ranks are not watched).
    """
    ranks, watch = dist.get_world_size() if dist.is_initialized() else 1, Watch()
    if ranks == 1 or not (local or "MASTER_ADDR" in os.environ):
        yield watch
        return
    rank = dist.get_rank()
    opened = _local_store() if local and rank == 0 and limit else None
    starts: list[Any] = [None] * ranks
    dist.all_gather_object(starts, (limit, uuid.uuid4().hex, opened and opened.port, _Process.own()))
    limit, start, port, _ = starts[0]
    if not limit:
        yield watch
        return
    host, port = ("127.0.0.1", port) if port else (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    is_torchruns = not local and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = f"{'torchrun' if is_torchruns else RANK_0}'s store at {host}:{port}"
    # A connection of its own: the training thread may wait for an answer to its own question.
    connection = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit), wait_for_workers=False)
    # The store may have keys of ranks before a restart, so those of this start have a prefix.
    store = dist.PrefixStore(f"heartbeat {start}", connection)
    heartbeat = _Heartbeat(rank, [process for *_, process in starts], limit, store, place, watch)
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


def _local_store() -> dist.TCPStore:
    """A store that listens for processes of this machine only."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class _Process(NamedTuple):
    """The process of a rank. machine: the boot of Linux and the namespaces in which the process is; elsewhere empty."""

    pid: int
    host: str
    machine: str

    @classmethod
    def own(cls) -> "_Process":
        """The process that calls this."""
        try:
            machine = Path("/proc/sys/kernel/random/boot_id").read_text()
            machine += "".join(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net"))
        except OSError:
            machine = ""
        return cls(os.getpid(), socket.gethostname(), machine)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def kill_if_here(self) -> None:
        """Kill the process if it runs on this machine."""
        if self.machine and self.machine == _Process.own().machine:
            with contextlib.suppress(OSError):  # it has ended
                os.kill(self.pid, signal.SIGKILL)


class _Heartbeat:
    """The beats of this rank, and its watch over others. processes: of all ranks; place: the name of the store."""

    def __init__(self, rank: int, processes: list[_Process], limit: float, store: dist.Store, place: str, watch: Watch):
        self.rank, self.ranks, self.limit = rank, len(processes), limit
        self.interval = min(1.0, limit / 10)
        self._processes, self._store, self._place, self._watch = processes, store, place, watch
        self._seen: dict[int, int] = {}  # the last beats of the ranks that this one watches
        self._missed = dict.fromkeys(range(1, self.ranks) if rank == 0 else range(1), 0)  # rounds without one
        self._stopped, self._leaves = threading.Event(), False
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def explain(self, error: RuntimeError) -> None:
        """End the process with the line of the ranks that do not beat; return if all do, because the error is a bug then."""
        cause = _described(error)
        try:
            before = self._beats(range(self.ranks))
            time.sleep(ROUNDS * self.interval)
            after = self._beats(range(self.ranks))
            if silent := [rank for rank in after if before[rank] == after[rank] < LEFT]:
                self._lose(silent, cause)
        except RuntimeError:
            self._end_alone(f"has ended: {cause}")
        self.stop()

    def stop(self, leaves: bool = False) -> None:
        """Stop watching. leaves: tell the others that this rank leaves because its work is done."""
        self._leaves = leaves
        self._stopped.set()
        self._thread.join(ROUNDS * self.interval)

    def _beat(self) -> None:
        """Beat, and watch other ranks, until this rank is stopped or a rank is lost."""
        calls = ThreadPoolExecutor(1)  # of the store: another thread, because they may wait forever
        while not self._stopped.wait(self.interval):
            try:
                calls.submit(self._round).result(self.limit)
            except TimeoutError:
                self._end_alone(f"has not answered for {self.limit:g} s: so the other ranks cannot be reached")
            except RuntimeError:  # the store has ended, perhaps because all ranks are about to
                if not self._stopped.wait(self.limit):
                    self._end_alone("has ended: so the other ranks cannot be reached")
        if self._leaves:
            with contextlib.suppress(RuntimeError):  # the store has ended before
                self._store.add(f"beats {self.rank}", LEFT)

    def _round(self) -> None:
        """Beat once, and end if another rank has found lost ones, or if one that this rank watches has missed beats."""
        self._store.add(f"beats {self.rank}", 1)
        if self._store.check([LOST]):
            self._end(json.loads(self._store.get(LOST))["lost"])
        beats = self._beats(self._missed)
        for rank in beats:
            is_silent = self._seen.get(rank) == beats[rank] < LEFT
            self._missed[rank] = self._missed[rank] + 1 if is_silent else 0
        self._seen = beats
        if max(self._missed.values()) * self.interval >= self.limit:
            silent = [rank for rank in beats if self._missed[rank] >= ROUNDS]
            self._lose(silent, f"there was no sign of life for {self.limit:g} s")

    def _beats(self, ranks: Iterable[int]) -> dict[int, int]:
        return {rank: self._store.add(f"beats {rank}", 0) for rank in ranks}

    def _lose(self, lost: list[int], cause: str) -> NoReturn:
        """End because ranks are lost. The first rank to find some prints the line, and tells the others."""
        found = json.dumps({"by": self.rank, "lost": lost})
        first = self._store.compare_set(LOST, "", found).decode()
        if first == found:
            names = ", ".join(f"{rank} of {self.ranks} ({self._processes[rank]})" for rank in lost)
            _print(f"rank {names} has ended, hangs or cannot be reached: {cause}")
        self._end(json.loads(first)["lost"])

    def _end(self, lost: list[int]) -> NoReturn:
        """End this process, and lost ones of this machine.

        It waits before, as launchers end all ranks after the first, and the store may end with this process.
        """
        try:
            self._watch.on_loss()
        finally:
            time.sleep(ROUNDS * self.interval)
            for rank in lost:
                self._processes[rank].kill_if_here()
            os._exit(1)

    def _end_alone(self, what: str) -> NoReturn:
        """End this process, which cannot agree with the others on who prints the line, and rank 0 if it has the store."""
        _print(f"rank {self.rank} of {self.ranks}: {self._place} {what}")
        if self._place.startswith(RANK_0):
            self._processes[0].kill_if_here()
        os._exit(1)


def _described(error: RuntimeError) -> str:
    """The first line of an error, without gloo's source file and advice."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[\S+:\d+\] |\. This is typically .*", "", line)


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk: the process must end nevertheless
        print(line, file=sys.stderr, flush=True)
