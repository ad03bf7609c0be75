"""Detects ranks that have ended, hang or cannot be reached, and ends the other ranks with one line that names the lost ones.

A collective with a lost rank waits until its time-out, or fails with an error that names no rank. So a thread of each rank
counts beats in a store: torchrun's, or one on rank 0. Rank 0 watches the beats of all ranks, and the other ranks watch those
of rank 0. The first rank that misses beats writes the lost ranks into the store and prints the line; the others read it
there, and all end. All of this runs in its own thread, so training steps take no longer.

After the first rank has ended, launchers send SIGTERM to the other ranks, and kill a hanging one only much later (torchrun
and DeepSpeed's: 30 s). So the ranks on its machine kill a lost rank before they end.
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

from commfabric.foundation.command_line import first_line

LEAVING = 1 << 40  # added to the beats of a rank that leaves because its work is done
ROUNDS_PER_BEAT = 3  # a running rank beats at least once in this number of rounds
LOST = "lost"  # the key of the lost ranks in the store
RANK_0 = "rank 0"  # the name of a store on rank 0 begins with it


@dataclass
class Watch:
    """Settings of the watch. on_loss: a function that another thread calls if ranks are lost, before the process ends."""

    on_loss: Callable[[], None] = lambda: None


@contextlib.contextmanager
def watched(limit: float, local: bool = False) -> Iterator[Watch]:
    """Watch the ranks of the default group in this block. All ranks enter it together.

    If a rank is lost, or communication in the block fails because a rank has ended, all running ranks end with exit code 1,
    and the first rank that reports the loss prints one line that names the lost ranks.

    Args:
        limit: The seconds without a beat after which a rank counts as lost; 0 disables the watch. Rank 0's value counts.
        local: True if all ranks are on this machine. Rank 0 then opens a store that other machines cannot reach. False: use
            the launcher's store at MASTER_ADDR; without a launcher, the ranks are not watched.
    """
    ranks, watch = dist.get_world_size() if dist.is_initialized() else 1, Watch()
    if ranks == 1 or not (local or "MASTER_ADDR" in os.environ):
        yield watch
        return
    rank = dist.get_rank()
    opened = _local_store() if local and rank == 0 and limit else None
    records: list[Any] = [None] * ranks
    dist.all_gather_object(records, (limit, uuid.uuid4().hex, opened and opened.port, _Process.own()))
    limit, prefix, port, _ = records[0]
    if not limit:
        yield watch
        return
    host, port = ("127.0.0.1", port) if port else (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    is_torchruns = not local and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store_name = f"{'torchrun' if is_torchruns else RANK_0}'s store at {host}:{port}"
    # A separate connection, because the training thread may block on its own.
    connection = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit), wait_for_workers=False)
    # After a restart the store may still have keys of the previous start, so keys have a prefix.
    store = dist.PrefixStore(f"heartbeat {prefix}", connection)
    heartbeat = _Heartbeat(rank, [process for *_, process in records], limit, store, store_name, watch)
    try:
        yield watch
    except RuntimeError as error:  # raised by torch and the shared memory if a rank has ended
        heartbeat.end_if_ranks_are_lost(error)
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
    """The process of a rank. machine: the boot id and namespaces of a Linux machine; "" on other systems."""

    pid: int
    host: str
    machine: str

    @classmethod
    def own(cls) -> "_Process":
        """The calling process."""
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
            with contextlib.suppress(OSError):  # the process may have ended
                os.kill(self.pid, signal.SIGKILL)


class _Heartbeat:
    """The beats of this rank, and its watch over the processes of other ranks.

    limit: the seconds without a beat after which a rank counts as lost. store_name: the name of the store in messages.
    """

    def __init__(
        self, rank: int, processes: list[_Process], limit: float, store: dist.Store, store_name: str, watch: Watch
    ):
        self.rank, self.ranks, self.limit = rank, len(processes), limit
        self.interval = min(1.0, limit / 10)
        self._processes, self._store, self._store_name, self._watch = processes, store, store_name, watch
        self._seen: dict[int, int] = {}  # {watched rank: its beats in the last round}
        self._missed = dict.fromkeys(
            range(1, self.ranks) if rank == 0 else range(1), 0
        )  # {watched rank: rounds missed}
        self._stopped, self._is_leaving = threading.Event(), False
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def end_if_ranks_are_lost(self, error: RuntimeError) -> None:
        """If ranks have stopped beating, print the line and end the process. Otherwise return: then no rank was lost, and
        the caller re-raises the error.
        """
        cause = _described(error)
        try:
            before = self._beats(range(self.ranks))
            time.sleep(ROUNDS_PER_BEAT * self.interval)
            now = self._beats(range(self.ranks))
            if silent := [rank for rank in now if before[rank] == now[rank] < LEAVING]:
                self._report_lost(silent, cause)
        except RuntimeError:
            self._end_alone(f"has ended: {cause}")
        self.stop()

    def stop(self, leaves: bool = False) -> None:
        """Stop watching. leaves: True tells the other ranks that the work of this rank is done."""
        self._is_leaving = leaves
        self._stopped.set()
        self._thread.join(ROUNDS_PER_BEAT * self.interval)

    def _beat(self) -> None:
        """Beat and watch until this rank stops or a rank is lost."""
        calls = ThreadPoolExecutor(1)  # a thread for calls of the store, which may block forever
        while not self._stopped.wait(self.interval):
            try:
                calls.submit(self._round).result(self.limit)
            except TimeoutError:
                self._end_alone(f"has not answered for {self.limit:g} s, so the other ranks cannot be reached")
            except RuntimeError:  # the store has ended, perhaps because all ranks are ending
                if not self._stopped.wait(self.limit):
                    self._end_alone("has ended, so the other ranks cannot be reached")
        if self._is_leaving:
            with contextlib.suppress(RuntimeError):  # the store may have ended
                self._store.add(f"beats {self.rank}", LEAVING)

    def _round(self) -> None:
        """Beat once. End if another rank has reported lost ranks, or if a watched rank has missed too many beats."""
        self._store.add(f"beats {self.rank}", 1)
        if self._store.check([LOST]):
            self._end(json.loads(self._store.get(LOST))["lost"])
        beats = self._beats(self._missed)
        for rank in beats:
            is_silent = self._seen.get(rank) == beats[rank] < LEAVING
            self._missed[rank] = self._missed[rank] + 1 if is_silent else 0
        self._seen = beats
        if max(self._missed.values()) * self.interval >= self.limit:
            silent = [rank for rank in beats if self._missed[rank] >= ROUNDS_PER_BEAT]
            self._report_lost(silent, f"there was no sign of life for {self.limit:g} s")

    def _beats(self, ranks: Iterable[int]) -> dict[int, int]:
        return {rank: self._store.add(f"beats {rank}", 0) for rank in ranks}

    def _report_lost(self, lost: list[int], cause: str) -> NoReturn:
        """End because ranks are lost. The first rank that reports them prints the line; the others read its report."""
        report = json.dumps({"by": self.rank, "lost": lost})
        first = self._store.compare_set(LOST, "", report).decode()
        if first == report:
            names = ", ".join(f"{rank} of {self.ranks} ({self._processes[rank]})" for rank in lost)
            _print(f"rank {names} has ended, hangs or cannot be reached: {cause}")
        self._end(json.loads(first)["lost"])

    def _end(self, lost: list[int]) -> NoReturn:
        """End this process and the lost processes on this machine.

        It waits first, so that the other ranks can read the report: a launcher kills all ranks as soon as one exits, and the
        store may be in this process.
        """
        try:
            self._watch.on_loss()
        finally:
            time.sleep(ROUNDS_PER_BEAT * self.interval)
            for rank in lost:
                self._processes[rank].kill_if_here()
            os._exit(1)

    def _end_alone(self, what: str) -> NoReturn:
        """End this process without the store, and rank 0 if the store was on it."""
        _print(f"rank {self.rank} of {self.ranks}: {self._store_name} {what}")
        if self._store_name.startswith(RANK_0):
            self._processes[0].kill_if_here()
        os._exit(1)


def _described(error: RuntimeError) -> str:
    """The first line of an error without gloo's source file and advice."""
    return re.sub(r"^\[\S+:\d+\] |\. This is typically .*", "", first_line(error))


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # such as a full disk; the process must end anyway
        print(line, file=sys.stderr, flush=True)
