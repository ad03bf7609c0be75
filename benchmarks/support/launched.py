"""Runs of examples/pretrain.py on forked ranks that are killed, stopped and cut off: what a launcher would start, in 0.1 s.

Each rank is a process with an environment, an exit code and an output of its own.
"""

import ctypes
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from commfabric.foundation import command_line
from megatron_ssm.checkpoints.shards import ShardWriter
from megatron_ssm.train.options import parse_options
from megatron_ssm.train.pretraining import pretrain
from megatron_ssm.train.trainer import Trainer

CLONE_NEWNET = 0x40000000
TINY = """--data text --out out --log log.jsonl --num-layers 2 --hidden-size 16 --mamba-state-dim 4 --mamba-head-dim 4
    --seq-length 16 --micro-batch-size 1 --global-batch-size 6 --train-iters 6 --log-interval 1 --save-interval 2
    --params-dtype float64 --device cpu --lost-rank-timeout 5""".split()


def write_text():
    """Write two documents to text/, on which TINY trains."""
    words = random.Random(0)
    Path("text").mkdir()
    for name in "ab":
        Path("text", name).write_text(" ".join(words.choice(("the", "state", "space")) for _ in range(100)))


@dataclass(frozen=True)
class Fault:
    """What one rank does in a step: send itself a signal (a number), or call a function of the trainer.

    while_saving: in the middle of writing the checkpoint of that step, instead of before the step.
    """

    rank: int
    step: int
    action: object
    while_saving: bool = False

    def strike(self, trainer=None):
        """Note the time, and do it."""
        Path("fault-at").write_text(repr(time.time()))
        if isinstance(self.action, int):
            os.kill(os.getpid(), self.action)
        else:
            self.action(trainer)


@dataclass
class Run:
    """Ranks that run. Files of each, in the working directory: out-RANK and err-RANK."""

    pids: list
    codes: dict = field(default_factory=dict)

    def wait(self, *ranks, timeout=30):
        """Wait for these ranks; returns their exit codes (negative: the signal) and the seconds since the fault."""
        deadline = time.monotonic() + timeout
        for rank in set(ranks) - set(self.codes):
            descriptor = os.pidfd_open(self.pids[rank])
            has_ended, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            os.close(descriptor)
            if not has_ended:
                raise TimeoutError(f"rank {rank} runs after {timeout} s: {texts('err', len(self.pids))}")
            self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(self.pids[rank], 0)[1])
        struck = Path("fault-at")
        seconds = time.time() - float(struck.read_text()) if struck.exists() else 0.0
        return [self.codes[rank] for rank in ranks], seconds

    def end(self):
        """Kill what still runs."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def texts(kind, world):
    """The lines that each rank has printed; kind: out or err."""
    return [Path(f"{kind}-{rank}").read_text().splitlines() for rank in range(world)]


def lines(kind, world):
    """The lines that all ranks have printed."""
    return [line for text in texts(kind, world) for line in text]


@contextmanager
def launched(world, arguments, fault=None, lab=None, grace=0.2):
    """A `Run` of the script with these options on `world` ranks.

    lab: network namespaces LAB-RANK of launch/netlab.sh. grace: how long other ranks wait for rank 0 to print an error.
    """
    environment = dict(WORLD_SIZE=str(world), MASTER_ADDR="10.77.0.1" if lab else "127.0.0.1")
    if lab:
        environment["GLOO_SOCKET_IFNAME"] = "eth0"
    sys.stdout.flush()
    sys.stderr.flush()
    run = Run([])
    with reserved_port() as port:
        environment["MASTER_PORT"] = str(port)
        try:
            for rank in range(world):
                run.pids.append(_fork(rank, arguments, environment, fault, lab, grace))
            yield run
        finally:
            run.end()


def _fork(rank, arguments, environment, fault, lab, grace):
    """The process of a rank."""
    pid = os.fork()
    if pid == 0:
        try:
            command_line.RANK_0_GRACE_S = grace
            _run_rank(rank, arguments, environment, fault, lab)
        finally:
            os._exit(99)
    return pid


def _run_rank(rank, arguments, environment, fault, lab):
    """What examples/pretrain.py does, in a forked process; never returns."""
    os.setsid()
    for stream, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{kind}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ |= dict(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    if lab:
        enter_namespace(f"{lab}-{rank}")
    if fault and fault.rank == rank:
        inject(fault)
    options = parse_options(arguments)
    code = command_line.run("pretrain.py", lambda: pretrain(options))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def inject(fault):
    """Let the fault strike in this process."""
    whole_step, whole_write = Trainer.step, ShardWriter.write_data

    def step(self, batches, number):
        if number + 1 == fault.step and not fault.while_saving:
            fault.strike(self)
        return whole_step(self, batches, number)

    def write_data(self, plan, planner):
        if f"step-{fault.step:06d}" in str(self.path) and fault.while_saving:
            (Path(self.path) / "__half.distcp").write_bytes(b"half a file")
            fault.strike()
        return whole_write(self, plan, planner)

    Trainer.step, ShardWriter.write_data = step, write_data


def enter_namespace(name):
    """Give this process the network of a namespace."""
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {name}")


@contextmanager
def reserved_port():
    """A TCP port that nobody else gets meanwhile. Servers that set SO_REUSEADDR, as torch's store does, can listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))  # and does not listen
        yield holder.getsockname()[1]


@contextmanager
def small_disk(path, kilobytes, files=0):
    """A disk of this size, at a new directory. files: how many files and folders it can hold, itself counted (0: any)."""
    Path(path).mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k,nr_inodes={files}", "tmpfs", path], check=True)
    try:
        yield Path(path)
    finally:
        subprocess.run(["umount", path], check=True)


def fill_disk(trainer=None, folder="out"):
    """Write to a folder until there is no room."""
    with open(f"{folder}/filler", "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def disks_work():
    """Whether `small_disk` works here: that needs root."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return not os.geteuid() and subprocess.run(command, capture_output=True, check=False).returncode == 0


def namespaces_work():
    """Whether launch/netlab.sh can make networks here: that needs root, ip and tc."""
    command = ["unshare", "--net", "--mount", "sh", "-c", "ip link add name bridge type bridge && tc qdisc show"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
