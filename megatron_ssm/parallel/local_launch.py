"""Starts a command once per rank on this machine, for `--tp N` without a launcher. Does not import torch."""

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

GRACE_S = 5.0  # the seconds in which the other ranks may end by themselves after one has failed, or after SIGTERM

PASSED_INTERRUPT = signal.SIGUSR1  # sent to rank 0 for a Ctrl-C
LIKE_SIGTERM = (signal.SIGHUP, signal.SIGQUIT)
BLOCKED = {signal.SIGINT, PASSED_INTERRUPT, *LIKE_SIGTERM}  # signals that are blocked in the ranks
PR_SET_PDEATHSIG = 1  # a constant of Linux's prctl


def run_local_ranks(argv: list[str], ranks: int, passes_signals: bool = False) -> int:
    """Run `python -m megatron_ssm ARGV` as `ranks` processes with a rendezvous file; returns the exit code of the command.

    The exit code is 0 if all ranks succeed. If a rank fails, the others are ended, and it is the code of the first to fail,
    or 1, with a line on stderr, if a signal killed it. It is 130 after Ctrl-C, which the ranks themselves do not receive,
    and 143 after SIGTERM, SIGHUP or SIGQUIT. No rank outlives this call, and on Linux none outlives this process.

    passes_signals: Pass Ctrl-C and SIGTERM (also for SIGHUP and SIGQUIT) to rank 0, which ends the command. Its exit code
        is then returned, and the other ranks have GRACE_S to end. Rank 0 must call `accept_passed_interrupts`.
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
    return start_module(module, arguments, environment_of_rank(rank, ranks), **streams)


def start_module(module: str, arguments: list[str], environment: dict[str, str], **options: Any) -> subprocess.Popen:
    """Start `python -m MODULE ARGUMENTS`, which on Linux is killed when this process ends.

    It imports only from this process's sys.path, whereas `python -m` would begin with the current folder, which may be a
    downloaded checkpoint. options: see `subprocess.Popen`.
    """
    # Linux takes the end of the thread that started the rank for the end of the process, so only the main thread counts.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    program = (
        f"import sys; sys.path[:] = {[*map(str, sys.path)]!a}; from {__name__} import run_module; "
        f"run_module({module!r}, {parent})"
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -I, -E, -s and the like
    command = [sys.executable, *flags, "-c", program, *arguments]
    return subprocess.Popen(command, env=environment, **options)


def run_module(module: str, parent: int | None) -> None:
    """In the process of a rank, run a module as `python -m` does. parent: the process with which this one ends, or None."""
    if parent is not None:
        end_with(parent)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_with(parent: int) -> None:
    """Let Linux kill this process when its parent ends; end it now if the parent has ended.

    parent: The process whose main thread started this one; the kernel acts when the starting thread ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def handle_like_sigterm() -> None:
    """Handle SIGHUP and SIGQUIT like SIGTERM; a SIGHUP that `nohup` ignores stays ignored."""
    for number in LIKE_SIGTERM:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGTERM))


def accept_passed_interrupts() -> None:
    """On rank 0, whose SIGINT is blocked, call the handler of SIGINT for each Ctrl-C that is passed on.

    A terminal sends SIGINT to all processes of the command, so without blocking, one Ctrl-C would interrupt a rank twice.
    """

    def interrupt(_: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
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
    """Wait until all ranks have ended, or one has failed and the others had GRACE_S to end; returns the exit code.

    follow_first: The other ranks also have only GRACE_S after rank 0 has succeeded.
    """
    deadline, failed = None, None
    while any(p.poll() is None for p in processes) and (deadline is None or time.monotonic() < deadline):
        if failed is None and (failed := _first_failed(processes)) is not None:
            # Exit codes of rank 0 that need no grace: 2, an error that it has printed and that all ranks have, and 130, an
            # interrupt.
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
    print(f"megatron-ssm: rank {processes.index(failed)} of {len(processes)} was killed by {name}", file=sys.stderr)
    return 1


def _first_failed(processes: list[subprocess.Popen]) -> subprocess.Popen | None:
    """A process that failed, or None. Processes that a signal killed come first: others then lost the connection to them."""
    return min((p for p in processes if p.poll()), key=lambda p: p.returncode > 0, default=None)


def _end(processes: list[subprocess.Popen], grace_s: float) -> None:
    """End the running ranks with SIGTERM, and after `grace_s` with SIGKILL.

    Ctrl-C and SIGTERM are ignored meanwhile, because they would leave ranks behind.
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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)  # still blocked if the start of a rank failed
        for number, handler in handlers.items():
            signal.signal(number, handler)
