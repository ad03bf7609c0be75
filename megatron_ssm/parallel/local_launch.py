"""Start this command once per rank on this machine: what `--tp N` does when no launcher did. Imports no torch."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

GRACE_S = 5.0  # for the other ranks to end by themselves after one has


def run_local_ranks(argv: list[str], ranks: int) -> int:
    """Run `python -m megatron_ssm ARGV` as `ranks` processes that meet over a file; the exit code of the whole.

    0 when all end well; the first failing rank's code otherwise (1 if a signal killed it, and a line saying so), after
    which the others are ended; 130 after Ctrl-C, which the ranks themselves do not see. No rank outlives this call.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-ssm-") as folder:
        command = [sys.executable, "-m", "megatron_ssm", *argv, "--rendezvous", f"file://{folder}/store"]
        processes = []
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the ranks inherit this
            for rank in range(ranks):
                processes.append(subprocess.Popen(command, env=_environment(rank, ranks)))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            return _wait(processes)
        except KeyboardInterrupt:
            return 130
        finally:
            _end(processes)


def _environment(rank, ranks) -> dict:
    """torchrun's variables for one local rank; the cores are shared out unless OMP_NUM_THREADS says otherwise."""
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    given = {"OMP_NUM_THREADS": threads, **os.environ}
    if "lo" in (name for _, name in socket.if_nameindex()):
        given.setdefault("GLOO_SOCKET_IFNAME", "lo")
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return given | {name: str(value) for name, value in places.items()}


def _wait(processes) -> int:
    """Until all have ended, or one has failed and the rest have had their time to follow."""
    deadline, failed = None, None
    while any(p.poll() is None for p in processes) and (deadline is None or time.monotonic() < deadline):
        if failed is None:
            failed = _first_failed(processes)
            told = failed is processes[0] and failed.returncode == 2  # rank 0 has said it: the others wait for this
            deadline = failed and time.monotonic() + (0 if told else GRACE_S)
        time.sleep(0.02)
    failed = failed or _first_failed(processes)
    if failed is None:
        return 0
    if failed.returncode > 0:
        return failed.returncode
    name = signal.Signals(-failed.returncode).name
    print(f"megatron_ssm: rank {processes.index(failed)} of {len(processes)} was killed by {name}", file=sys.stderr)
    return 1


def _first_failed(processes):
    """A process that failed, or None. One that a signal killed comes before those that then lost their connection."""
    return min((p for p in processes if p.poll()), key=lambda p: p.returncode > 0, default=None)


def _end(processes) -> None:
    """Ask those still running to end, then make them."""
    running = [p for p in processes if p.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
