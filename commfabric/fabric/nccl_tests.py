"""Measures with the programs of NVIDIA's nccl-tests, which run the GPUs of one host from one process."""

import argparse
import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from commfabric.foundation.command_line import Failure
from commfabric.foundation.launcher import launched_ranks

from .command import print_left_out, print_limits
from .cost_model import Fabric, check_writable
from .curve import Curve
from .measurement import time_shares
from .nccl import environment
from .readers import has_rows, read_curves

PROGRAMS = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
    "p2p": "sendrecv_perf",
}
END = "# Avg bus bandwidth    : -\n"  # for the reader, where a program that printed complete rows was stopped


def measure_with_nccl_tests(arguments: argparse.Namespace) -> None:
    """`python -m sparsefusion measure --nccl-tests`: run the programs, write the fabric, and print its table.

    ValueError: a launcher started several ranks, --ranks is missing, a program is not on the PATH, or the fabric's directory
    is missing or not writable. Failure: every program failed, or printed no row in its time.
    """
    if launched_ranks() > 1:
        raise ValueError("--nccl-tests measures from one process: start it without torchrun")
    if not arguments.ranks:
        raise ValueError("--nccl-tests needs --ranks N, the number of GPUs")
    operations = [(name, "") for name in arguments.collectives] + [("all_reduce", name) for name in arguments.nccl]
    if missing := sorted({PROGRAMS[name] for name, _ in operations if not shutil.which(PROGRAMS[name])}):
        raise ValueError(f"--nccl-tests: not on the PATH: {', '.join(missing)} (from the build folder of nccl-tests)")
    check_writable(Path(arguments.out))
    runs = list(itertools.product(arguments.ranks, ("eager", "graph"), operations))
    curves: list[Curve] = []
    failures: list[tuple[str, Failure]] = []
    for (ranks, mode, (operation, setting)), seconds in zip(
        runs, time_shares(arguments.seconds, len(runs)), strict=True
    ):
        try:
            curves += run_program(operation, ranks, mode, setting, arguments.sizes, seconds)
        except Failure as failure:
            failures.append((f"{operation} {setting}".strip() + f" on {ranks} ranks ({mode})", failure))
    if not curves:
        raise failures[0][1]
    for name, reason in failures:
        print_left_out(name, reason)
    fabric = Fabric(tuple(curves), {"source": "measured by nccl-tests", "device": "cuda", "host": os.uname().nodename})
    fabric.save(arguments.out)
    print_limits(fabric, arguments.sizes)
    print(fabric.table())


def run_program(
    operation: str, ranks: int, mode: str, setting: str, sizes: Sequence[int], seconds: float
) -> list[Curve]:
    """Run one program; returns its curve. Failure if it failed, or printed no row.

    mode: "eager" or "graph". sizes: the first and the last of these are the range, which doubles. After `seconds` the
    program is stopped, and the sizes that it has printed are kept.
    """
    program = PROGRAMS[operation]
    share = ranks if operation == "all_gather" else 1  # nccl-tests counts the whole output
    words = [program, "-b", sizes[0] * share, "-e", sizes[-1] * share, "-f", 2, "-g", ranks, "-G", int(mode == "graph")]
    variables = environment(setting)
    try:
        command = list(map(str, words))
        done = subprocess.run(command, capture_output=True, timeout=seconds, env=os.environ | variables)
        output = done.stdout.decode()
        if done.returncode:
            raise Failure(f"{program}: {_last_line(output + done.stderr.decode())}")
    except subprocess.TimeoutExpired as stopped:
        complete, _, _ = (stopped.stdout or b"").decode().rpartition("\n")
        output = f"{complete}\n{END}"
        if not has_rows(output):
            raise Failure(f"{program} printed no time within {seconds:.3g} s: pass more --seconds") from None
    title = " ".join(f"{name.removeprefix('NCCL_')}={value}" for name, value in variables.items())
    return read_curves(program, operation, ranks, f"### {title}\n{output}")


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
