"""Which process a rank is, so that another rank of the same machine can kill exactly this process; which one started it, and
how it ends with that one; and its watchdog, which kills it if it hangs.
"""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NAMESPACES = ("pid", "net")
PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True)
class Process:
    """A process, also as another one sees it.

    machine: of Linux, the boot and the namespaces of processes and of the network; empty elsewhere. started: the clock ticks
    from the boot to its start.
    """

    pid: int
    host: str
    machine: str
    started: int

    @classmethod
    def own(cls) -> "Process":
        """The process that calls this."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "Process":
        """A process that runs on this machine."""
        try:
            machine, started = _machine(), _started(pid)
        except OSError:  # no Linux, or a process outside this container
            machine, started = "", 0
        return cls(pid, socket.gethostname(), machine, started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def kill_if_here(self) -> bool:
        """Send SIGKILL if the process runs on this machine, as this user; returns whether it was sent.

        A process with another network is left alone: it may be one that works and cannot be reached. Another process that
        has got the same number has another start.
        """
        try:
            if not self.machine or self.machine != _machine():
                return False
            descriptor = os.pidfd_open(self.pid)  # from here on, the number cannot pass to another process
        except OSError:  # it has ended
            return False
        try:
            is_same = _started(self.pid) == self.started and Path(f"/proc/{self.pid}").stat().st_uid == os.geteuid()
            if is_same:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return is_same
        except OSError:  # it has ended meanwhile
            return False
        finally:
            os.close(descriptor)


def launching_process() -> str:
    """A name of torchrun's process that started this rank: the same after a restart, and different for any other run.

    It is the folder of torchrun's logs, whose name is random, and which a script between torchrun and the rank passes on;
    where torchrun writes no logs, the parent process. "" if neither is known.
    """
    folder = re.fullmatch(r"(.+)/attempt_\d+/\d+/error\.json", os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if folder and Path(folder[1]).name.startswith(f"{os.environ.get('TORCHELASTIC_RUN_ID')}_"):
        return folder[1]
    parent = Process.of(os.getppid())
    return f"{parent}, {parent.machine} {parent.started}" if parent.machine else ""


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, and end it now if that has happened. Only on Linux.

    parent: the process that started this one, in its main thread: the kernel acts when the thread ends that did it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


# What a watchdog runs. Its arguments: the process that started it, the seconds that it allows at first, and how many more it
# waits before it kills. It reads lines with how many seconds it allows next. Launchers may send their signals to it, too; it
# ends with the process that started it.
WATCHDOG = """
import os, select, signal, sys
for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2:
    signal.signal(number, signal.SIG_IGN)
process, allowed, more = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
rest = ""
while os.getppid() == process:
    if select.select([0], [], [], allowed)[0] or select.select([0], [], [], more)[0]:
        said = os.read(0, 4096).decode()
        if not said:
            break
        *lines, rest = (rest + said).split("\\n")
        allowed = float(lines[-1]) if lines else allowed
    elif os.getppid() == process:
        os.kill(process, signal.SIGKILL)
        print(f"process {process} has hung for {allowed + more:g} s: its watchdog has killed it", file=sys.stderr)
        break
"""


class Watchdog:
    """A small process that kills this one with SIGKILL, and says so, if this one hangs: if it does not call `tell` in time.

    For a process that no other one on its machine would kill. Where both were stopped and go on (Ctrl-Z in a terminal), the
    watchdog waits a little longer before it kills. allowed: the most seconds between two calls of `tell`; more: those that
    it waits longer. OSError if it cannot be started.
    """

    def __init__(self, allowed: float, more: float):
        self._allowed, self._lock = allowed, threading.Lock()
        arguments = map(str, (os.getpid(), allowed, more))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WATCHDOG, *arguments], bufsize=0, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def tell(self, longer: float = 0.0) -> None:
        """This process runs. longer: seconds by which more are allowed from now on, less if it is negative."""
        with self._lock, suppress(OSError, ValueError):  # the watchdog is stopped and the pipe full, or it has ended
            self._allowed += longer
            self._pipe.write(f"{self._allowed}\n".encode())

    def end(self) -> None:
        """End the watchdog."""
        self._process.kill()
        with suppress(OSError):
            self._process.communicate()


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES)])


def _started(pid: int) -> int:
    """Field 22 of /proc/PID/stat; the name in field 2 may contain spaces and brackets."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[22 - 3])
