"""How `--tp N` terminates its ranks. Oracle: the process table."""

import os
import signal
import subprocess
import sys
import time

from megatron_ssm.parallel import local_launch

PROGRAM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def test_ctrl_c_while_ranks_are_ended_leaves_none_behind():
    """The ranks ignore SIGTERM, so they are killed after the grace period, which is one limit for all of them."""
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) for _ in range(3)]
    for process in processes:
        process.stdout.readline()
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -INT {os.getpid()}"]):
        start = time.monotonic()
        local_launch._end(processes, 1.0)
        seconds = time.monotonic() - start
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 3
    assert 1.0 <= seconds < 2.5
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    for process in processes:
        process.stdout.close()


def test_a_rank_that_hangs_when_rank_0_has_ended(monkeypatch):
    monkeypatch.setattr(local_launch, "GRACE_S", 0.2)
    processes = [subprocess.Popen([sys.executable, "-c", program]) for program in ("", "import time; time.sleep(60)")]
    try:
        assert local_launch._wait(processes, follow_first=True) == 0
        assert [process.poll() for process in processes] == [0, None]
    finally:
        local_launch._end(processes, 0.0)
