"""The replicas of the model: server processes that this process starts, watches and starts again, and the choice of one."""

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ssm.parallel.local_launch import start_module

from .errors import ApiError

log = logging.getLogger(__name__)

DRAINING = "the server is shutting down"
POLL_S = 0.05  # between looks at the processes
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0  # between the end of a replica that has not started and its next start
KNOWN_PREFIXES = 10_000  # whose replicas are remembered


@dataclass(eq=False)
class Replica:
    """A server process of its own.

    Attributes:
        number: The index of the replica, which metrics and log lines show.
        process: The running process, or the last one that ran.
        path: The path of its Unix socket.
        is_ready: True while it takes requests.
        open: The number of requests that it is answering.
        taken: The number of requests that it has been given so far.
    """

    number: int
    process: subprocess.Popen | None = None
    path: str = ""
    is_ready: bool = False
    open: int = 0
    taken: int = 0


class Replicas:
    """The replicas. For asyncio's thread only, which must be the main thread: the replicas are killed when it ends.

    Args:
        command: The arguments of `python -m megatron_ssm`, without the socket.
        environments: The environment of each replica.
        folder: The directory of their sockets.
        slack: The most requests that a replica may have more than another one to get one whose prefix it knows.
    """

    def __init__(self, command: Sequence[str], environments: Sequence[dict[str, str]], folder: Path, slack: int):
        self._command, self._environments, self._folder, self._slack = command, environments, folder, slack
        self.all = [Replica(number) for number in range(len(environments))]
        self._starts, self._refusal = itertools.count(), ""
        self._known: OrderedDict[bytes, Replica] = OrderedDict()
        self._watches: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> list[Replica]:
        """The replicas that take requests; [] when the server is about to end."""
        return [] if self._refusal else [replica for replica in self.all if replica.is_ready]

    async def start(self) -> int:
        """Start all, the first one alone so that wrong arguments are reported once. Returns its exit code if one fails."""
        for group in (self.all[:1], self.all[1:]):
            await asyncio.gather(*map(self._start, group))
            for replica in group:
                if not replica.is_ready:
                    assert replica.process is not None
                    return replica.process.returncode or 1
        self._watches = [asyncio.create_task(self._watch(replica)) for replica in self.all]
        return 0

    def choose(self, prefix: bytes, lost: Collection[Replica] = ()) -> Replica:
        """Return the replica that had this prefix last, unless another has fewer open requests by more than the slack.

        Then, and for an unknown prefix or b"", it is the one with the fewest requests. lost: replicas that are left out.
        ApiError 503 if there is none.
        """
        ready = [replica for replica in self.ready if replica not in lost]
        if not ready:
            reason = self._refusal or "no replica of the model is running; try again later"
            raise ApiError(503, reason, code="unavailable", headers={} if self._refusal else {"Retry-After": "5"})
        least = min(ready, key=lambda replica: (replica.open, replica.taken))
        known = self._known.pop(prefix, least)
        chosen = known if known in ready and known.open - least.open <= self._slack else least
        if prefix:
            self._known[prefix] = chosen
            if len(self._known) > KNOWN_PREFIXES:
                self._known.popitem(last=False)
        return chosen

    def drain(self) -> None:
        """Take no more requests; the replicas finish those that they have, and end."""
        self._refusal = self._refusal or DRAINING
        self._signal(signal.SIGTERM)

    def close(self, reason: str) -> None:
        """Take no more requests; the replicas end those that they have with an error, and end.

        After `drain`, they do so by themselves: they have the same time-out.
        """
        if reason != self._refusal:
            self._refusal = reason
            self._signal(signal.SIGINT)

    def end(self, seconds: float) -> None:
        """Wait until all processes have ended, and kill those that take longer than this."""
        self.drain()
        deadline = time.monotonic() + seconds
        for replica in self.all:
            while _runs(replica) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if replica.process is not None and _runs(replica):
                replica.process.kill()
                replica.process.wait()

    def _signal(self, number: int) -> None:
        for replica in self.all:
            if replica.process is not None and _runs(replica):
                replica.process.send_signal(number)

    async def _start(self, replica: Replica) -> None:
        """Start a replica, and wait until it takes requests or has ended."""
        replica.path = str(self._folder / str(next(self._starts)))
        # A session of its own: Ctrl-C in a terminal is for this process, which passes it on.
        replica.process = start_module(
            "megatron_ssm", [*self._command, "--socket", replica.path, "--replica", str(replica.number)],
            self._environments[replica.number],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        while _runs(replica) and not replica.is_ready:
            replica.is_ready = _listens(replica.path)
            await asyncio.sleep(POLL_S)

    async def _watch(self, replica: Replica) -> None:
        """Start a replica again whenever it has ended."""
        retry_s = FIRST_RETRY_S
        while True:
            while _runs(replica):
                retry_s = FIRST_RETRY_S if replica.is_ready else retry_s
                await asyncio.sleep(POLL_S)
            was_ready, replica.is_ready = replica.is_ready, False
            if self._refusal:
                return
            assert replica.process is not None
            log.error(
                f"megatron-ssm: replica {replica.number} has ended ({_cause(replica.process)}); it is started again"
            )
            if not was_ready:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
            Path(replica.path).unlink(missing_ok=True)
            if not self._refusal:
                await self._start(replica)


def _runs(replica: Replica) -> bool:
    return replica.process is not None and replica.process.poll() is None


def _listens(path: str) -> bool:
    """Return True if a server listens at the path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _cause(process: subprocess.Popen) -> str:
    """How a process has ended."""
    code = process.returncode
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def replica_environments(replicas: int, ranks: int) -> list[dict[str, str]]:
    """Return the environment of each replica. ranks: of a replica.

    Each rank gets its share of the cores, unless OMP_NUM_THREADS is set, and a GPU of its own, if there are enough.
    """
    threads = str(max(1, (os.cpu_count() or 1) // (replicas * ranks)))
    shared = {"OMP_NUM_THREADS": threads, **os.environ}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal()])
    gpus = list(map(str, range(found))) if visible is None else visible.split(",")
    if len(gpus) < replicas * ranks:
        return [shared] * replicas
    shares = [gpus[number * ranks : (number + 1) * ranks] for number in range(replicas)]
    return [{**shared, "CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
