"""How `--tp N` ends its ranks. Oracle: the process table."""

import os
import signal
import subprocess
import sys
import time

from megatron_ssm.parallel import local_launch

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def test_ctrl_c_while_ranks_are_ended_leaves_none_behind(monkeypatch):
    """The ranks ignore SIGTERM; all of them together have GRACE_S."""
    monkeypatch.setattr(local_launch, "GRACE_S", 1.0)
    processes = [subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) for _ in range(3)]
    for process in processes:
        process.stdout.readline()
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -INT {os.getpid()}"]):
        start = time.monotonic()
        local_launch._end(processes)
        seconds = time.monotonic() - start
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 3
    assert 1.0 <= seconds < 2.5
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    for process in processes:
        process.stdout.close()
