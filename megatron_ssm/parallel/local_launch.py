"""Starts a command once per rank on this machine: what `--tp N` does without a launcher. Does not import torch."""

import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from types import FrameType
from typing import Any

GRACE_S = 5.0  # seconds that the other ranks have to end by themselves after one has failed, or after SIGTERM

PASSED_INTERRUPT = signal.SIGUSR1  # what rank 0 gets for a Ctrl-C that is passed on
LIKE_SIGTERM = (signal.SIGHUP, signal.SIGQUIT)
BLOCKED = {signal.SIGINT, PASSED_INTERRUPT, *LIKE_SIGTERM}  # in the ranks
PR_SET_PDEATHSIG = 1  # of Linux's prctl


def run_local_ranks(argv: list[str], ranks: int, passes_signals: bool = False) -> int:
    """Run `python -m megatron_ssm ARGV` as `ranks` processes, which meet over a file; returns the exit code of the command.

    0 if all ranks end well. If one fails, the others are ended, and the code is that of the first to fail, or 1, with a line
    on stderr, if a signal killed it. 130 after Ctrl-C, which the ranks themselves do not see. 143 after SIGTERM, SIGHUP or
    SIGQUIT. No rank outlives this call, and on Linux none outlives this process.

    passes_signals: Ctrl-C and SIGTERM (also instead of SIGHUP and SIGQUIT) are passed on to rank 0, which ends the command;
    its exit code then counts, and the others have GRACE_S to follow. Rank 0 calls `accept_passed_interrupts`.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-ssm-") as folder:  # only this user can read or write it
        arguments = [*argv, "--rendezvous", f"file://{folder}/store"]
        processes: list[subprocess.Popen] = []
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        handle_like_sigterm()
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)  # the ranks inherit this
            for rank in range(ranks):
                processes.append(start_rank("megatron_ssm", arguments, rank, ranks))
            if passes_signals:
                signal.signal(signal.SIGINT, lambda *_: processes[0].send_signal(PASSED_INTERRUPT))
                signal.signal(signal.SIGTERM, lambda number, _: processes[0].send_signal(number))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
            return _wait(processes, follow_first=passes_signals)
        except KeyboardInterrupt:
            return 130
        finally:
            _end(processes, 0.0 if passes_signals else GRACE_S)


def start_rank(module: str, arguments: list[str], rank: int, ranks: int, **streams: Any) -> subprocess.Popen:
    """Start `python -m MODULE ARGUMENTS` as one of `ranks` local ranks, which on Linux is killed when this process ends.

    It imports from the folders that this process imports from, and from no others: `python -m` would begin with the current
    folder, which may be a downloaded checkpoint's. streams: see `subprocess.Popen`.
    """
    # The end of another thread than the main one, in which the process goes on, would count as the end of the process.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    program = (
        f"import sys; sys.path[:] = {[*map(str, sys.path)]!a}; from {__name__} import run_module; "
        f"run_module({module!r}, {parent})"
    )
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -I, -E, -s and the like
    command = [sys.executable, *options, "-c", program, *arguments]
    return subprocess.Popen(command, env=environment_of_rank(rank, ranks), **streams)


def run_module(module: str, parent: int | None) -> None:
    """In the process of a rank: run a module as `python -m` does. parent: the process with which this one ends."""
    if parent is not None:
        end_with(parent)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, and end it now if that has happened. Only on Linux.

    parent: the process that started this one, in its main thread: the kernel acts when the thread ends that did it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def handle_like_sigterm() -> None:
    """Let SIGHUP and SIGQUIT do what SIGTERM does; a SIGHUP that `nohup` has ignored stays ignored."""
    for number in LIKE_SIGTERM:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGTERM))


def accept_passed_interrupts() -> None:
    """On rank 0, whose SIGINT is blocked: let each Ctrl-C that is passed on call the handler of SIGINT.

    A terminal sends SIGINT to all processes of the command, so a rank that took it would be interrupted twice by one Ctrl-C.
    """

    def interrupt(_: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler), "the command has set it"
        handler(signal.SIGINT, frame)

    signal.signal(PASSED_INTERRUPT, interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {PASSED_INTERRUPT})


def environment_of_rank(rank: int, ranks: int) -> dict[str, str]:
    """torchrun's variables for one local rank. Each rank gets its share of the cores, unless OMP_NUM_THREADS is set."""
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    if "lo" in (name for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return environment | {name: str(value) for name, value in numbers.items()}


def _wait(processes: list[subprocess.Popen], follow_first: bool = False) -> int:
    """Wait until all ranks have ended, or one has failed and the others had GRACE_S to follow; returns the exit code.

    follow_first: they also have no more than that when rank 0 has ended well.
    """
    deadline, failed = None, None
    while any(p.poll() is None for p in processes) and (deadline is None or time.monotonic() < deadline):
        if failed is None and (failed := _first_failed(processes)) is not None:
            # Exit code 2 of rank 0: it has printed an error that the others have, too, and they only wait for that.
            # 130: it was interrupted, and the others wait for it.
            is_reported = failed is processes[0] and failed.returncode in (2, 130)
            deadline = time.monotonic() + (0 if is_reported else GRACE_S)
        elif follow_first and deadline is None and processes[0].poll() is not None:
            deadline = time.monotonic() + GRACE_S
        time.sleep(0.02)
    failed = failed or _first_failed(processes)
    if failed is None:
        return 0
    if failed.returncode > 0:
        return failed.returncode
    name = signal.Signals(-failed.returncode).name
    print(f"megatron_ssm: rank {processes.index(failed)} of {len(processes)} was killed by {name}", file=sys.stderr)
    return 1


def _first_failed(processes: list[subprocess.Popen]) -> subprocess.Popen | None:
    """A process that failed, or None. One that a signal killed comes before those that then lost their connection to it."""
    return min((p for p in processes if p.poll()), key=lambda p: p.returncode > 0, default=None)


def _end(processes: list[subprocess.Popen], grace_s: float) -> None:
    """End the ranks that are still running: with SIGTERM, and with SIGKILL those that are still there after `grace_s`.

    A Ctrl-C or SIGTERM meanwhile is ignored, because it would leave ranks behind.
    """
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        running = [p for p in processes if p.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + grace_s
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)  # they are blocked if a rank could not be started
        for number, handler in handlers.items():
            signal.signal(number, handler)
