"""The command line in forks of the tests' process: like processes of their own, but without seconds of imports."""

import faulthandler
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from megatron_ssm.parallel import local_launch

PYTHON = [sys.executable, "-m", "megatron_ssm"]


class Fork:
    """`python -m megatron_ssm ARGUMENTS` in a fork, with methods of subprocess.Popen. Local ranks are forks of the fork,
    which run the program of their command line, `python -c PROGRAM ARGUMENTS`.

    stdin, stdout, stderr: files; stdout may be subprocess.PIPE; None: those of this process.
    """

    def __init__(self, command, env=None, stdin=None, stdout=None, stderr=None, start_new_session=False, text=False):
        program, arguments = _split(command)
        self.returncode, self.stdout, reader = None, None, None
        if stdout == subprocess.PIPE:
            reader, stdout = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if start_new_session:
                    os.setsid()
                _begin_anew(env, (stdin, stdout, stderr))
                sys.argv = ["megatron_ssm", *map(str, arguments)]
                exec(program, {})
            finally:
                os._exit(1)
        if reader is not None:
            os.close(stdout)
            self.stdout = open(reader, "r" if text else "rb")

    def poll(self):
        """The exit code, negative after a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=None):
        """The exit code, once it has ended. subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = time.monotonic() + (timeout or float("inf"))
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"the fork {self.pid}", timeout)
            time.sleep(0.01)
        return self.returncode

    def ranks(self):
        """The processes of the ranks that it has started, rank 0 first."""
        return [int(child) for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def send_signal(self, number):
        """Send it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self):
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _split(command):
    """The program that Python runs, and its arguments."""
    if command[: len(PYTHON)] == PYTHON:
        return "from megatron_ssm.cli.main import run_and_exit; run_and_exit()", command[len(PYTHON) :]
    place = command.index("-c")
    return command[place + 1], command[place + 2 :]


def completed(arguments, timeout=120, stdin=b""):
    """The subprocess.CompletedProcess of the command line. stdin: what it can read there."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        given.write(stdin)
        given.seek(0)
        process = Fork([*PYTHON, *arguments], stdin=given, stdout=stdout, stderr=stderr)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())


def _begin_anew(env, streams):
    """In the fork: signals, files, the environment and loggers as in a new process."""
    # Garbage of the tests' process is not collected here: its sockets would close numbers that are used again.
    gc.freeze()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
    for number, stream in enumerate(streams):
        if stream == subprocess.DEVNULL:
            stream = os.open(os.devnull, os.O_RDWR)
        if stream is not None:
            os.dup2(stream if isinstance(stream, int) else stream.fileno(), number)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)
    faulthandler.enable(2)  # a crash then says where
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    logging.root.handlers.clear()
    torch.set_num_threads(torch.get_num_threads())  # makes torch's pool of threads anew: two threads at once fail at it
    local_launch.subprocess = SimpleNamespace(
        Popen=Fork, TimeoutExpired=subprocess.TimeoutExpired,
        _args_from_interpreter_flags=subprocess._args_from_interpreter_flags,
    )  # fmt: skip
