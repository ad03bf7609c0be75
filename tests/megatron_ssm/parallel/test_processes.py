"""Processes that one rank may kill for another, or that started it. Oracles: real processes, and torchrun's folders."""

import contextlib
import json
import os
import select
import signal
import subprocess
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_ssm.parallel.processes import Process, Watchdog, launching_process


@pytest.fixture
def child():
    """(its pid, what it says of itself) of a process that has stopped itself."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, json.dumps(asdict(Process.own())).encode())
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    yield pid, Process(**json.loads(os.read(reader, 4096)))
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)


@contextlib.contextmanager
def forked(run):
    """(pid, what it writes) of a child process that leads a group; run(writer) ends it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        run(writer)
        os._exit(0)
    try:
        yield pid, reader
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("says", (0, 3))
def test_a_watchdog_kills_a_process_that_hangs(capfd, says):
    """One that has said some times that it runs, or never."""

    def run(writer):
        watchdog = Watchdog(0.2, 0.1)
        for _ in range(says):
            watchdog.tell()
        os.write(writer, str(watchdog._process.pid).encode())
        os.kill(os.getpid(), signal.SIGSTOP)

    with forked(run) as (pid, reader):
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        watchdog = int(os.read(reader, 20))
        with suppress(ProcessLookupError):  # it has ended already
            descriptor = os.pidfd_open(watchdog)
            assert select.select([descriptor], [], [], 30)[0]
            os.close(descriptor)
    assert capfd.readouterr().err == f"process {pid} has hung for 0.3 s: its watchdog has killed it\n"


@pytest.mark.parametrize("is_stopped", (True, False))
def test_a_watchdog_leaves_a_process_that_works(is_stopped):
    """For as long as it has announced; or while all of its group were stopped, for longer than is allowed."""

    def run(writer):
        watchdog = Watchdog(0.4, 30 if is_stopped else 0.4)
        watchdog.tell(longer=0 if is_stopped else 60)
        os.write(writer, b"x")
        while True:
            signal.pause()

    with forked(run) as (pid, reader):
        os.read(reader, 1)
        if is_stopped:
            os.killpg(pid, signal.SIGSTOP)
        descriptor = os.pidfd_open(pid)
        assert not select.select([descriptor], [], [], 1)[0]
        os.killpg(pid, signal.SIGCONT)
        assert not select.select([descriptor], [], [], 0.5)[0]
        os.close(descriptor)


def test_a_watchdog_ends():
    """When it is told to, also if it is stopped; and with the process that started it, which ends without a word."""
    watchdog = Watchdog(60, 1)
    os.kill(watchdog._process.pid, signal.SIGSTOP)
    for _ in range(2**14):  # more than a pipe holds
        watchdog.tell()
    watchdog.end()
    assert watchdog._process.returncode == -signal.SIGKILL
    watchdog.tell()

    def run(writer):
        watchdog = Watchdog(60, 1)
        os.write(writer, str(watchdog._process.pid).encode())
        os._exit(0)

    with forked(run) as (pid, reader):
        os.waitpid(pid, 0)
        with suppress(ProcessLookupError):  # it has ended already
            descriptor = os.pidfd_open(int(os.read(reader, 20)))
            assert select.select([descriptor], [], [], 30)[0]
            os.close(descriptor)


def is_running(pid):
    descriptor = os.pidfd_open(pid)
    has_ended, _, _ = select.select([descriptor], [], [], 0)
    os.close(descriptor)
    return not has_ended


def test_a_stopped_process_is_killed(child):
    pid, told = child
    assert told.pid == pid and told.machine == Process.own().machine
    assert told.kill_if_here()
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert not told.kill_if_here()


@pytest.mark.parametrize(
    "other",
    [
        lambda told: replace(told, started=told.started + 1),
        lambda told: replace(told, machine=told.machine + "another"),
        lambda told: replace(told, machine=""),
    ],
    ids=["another start", "another machine", "no Linux"],
)
def test_another_process_is_not_killed(child, other):
    """One that has got the same number later, or has it on another machine."""
    pid, told = child
    assert not other(told).kill_if_here() and is_running(pid)


@pytest.mark.parametrize("run", ("none", "job"))
def test_the_process_that_started_a_rank(monkeypatch, run):
    """It is named by the folder of torchrun's logs, in any attempt and for any rank; without one, by the parent process."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    for error_file in (f"/logs/{run}_x/attempt_0/0/error.json", f"/logs/{run}_x/attempt_12/3/error.json"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", error_file)
        assert launching_process() == f"/logs/{run}_x"
    parent = Process.of(os.getppid())
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    for error_file in (None, "", "/logs/attempt_0/0/error.json", f"/logs/{run}_x/0/error.json"):
        if error_file is not None:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", error_file)
        assert launching_process() == f"process {os.getppid()} on {parent.host}, {parent.machine} {parent.started}"
    monkeypatch.setattr(os, "getppid", lambda: 0)  # as for a process that was started from outside this container
    assert launching_process() == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="a process of another user needs root")
def test_a_process_of_another_user_is_not_killed():
    """As root could."""
    with subprocess.Popen(["sleep", "60"], user=65534) as process:
        own = Process.own()
        started = int(Path(f"/proc/{process.pid}/stat").read_text().split()[21])
        assert not replace(own, pid=process.pid, started=started).kill_if_here() and is_running(process.pid)
        process.kill()
