"""How `--tp N` starts and terminates its ranks. Oracles: the process table, and Python's `sys.path`."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_ssm.parallel import local_launch

PROGRAM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"

PATH = "import json, os, sys; print(json.dumps([sys.path, sys.argv[1:], os.environ['RANK']]), flush=True)"
LAUNCHER = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from megatron_ssm.parallel.local_launch import start_rank
start_rank("program", [], 0, 2)
threading.Event().wait()
"""


def test_ranks_import_from_where_this_process_does(tmp_path, monkeypatch):
    """Not from the current folder, whose files have the names of what a rank imports first."""
    for name in ("runpy", "ctypes", "socket", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('from the current folder')")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "program.py").write_text(PATH)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "folder")
    process = local_launch.start_rank("program", ["--flag", "a b"], 1, 2, stdout=subprocess.PIPE)
    printed, _ = process.communicate()
    assert json.loads(printed) == [sys.path, ["--flag", "a b"], "1"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of the end of its parent")
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    """It cannot end them itself after SIGKILL."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, tmp_path], stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # the rank runs
        process.kill()
        process.communicate(timeout=30)  # the pipe closes when the rank has ended, too


def test_a_rank_whose_parent_has_already_ended_ends():
    pid = os.fork()
    if pid == 0:
        local_launch.end_with(1 << 22)  # no process has this number: it is the limit
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


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
