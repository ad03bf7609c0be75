"""Which process a rank is, so that another rank of the same machine can kill exactly this process."""

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

NAMESPACES = ("pid", "net")


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
        pid = os.getpid()
        try:
            machine, started = _machine(), _started(pid)
        except OSError:  # no Linux
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


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES)])


def _started(pid: int) -> int:
    """Field 22 of /proc/PID/stat; the name in field 2 may contain spaces and brackets."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[22 - 3])
