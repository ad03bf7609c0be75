"""What the watch over ranks leaves alone; what it does is tested on whole runs, in train/test_faults.py."""

import subprocess
import sys

import pytest
import torch.distributed as dist

from megatron_ssm.parallel.heartbeat import _Process, watched


@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.full)))
def test_a_bug_is_raised_while_all_ranks_run(ranks, world):
    """It is not mistaken for the loss of a rank, and ends no process."""

    def run(rank):
        try:
            with watched(2.0, local=True):
                if rank == 1:
                    raise RuntimeError("shapes cannot be multiplied")
                dist.barrier()
        except RuntimeError as error:
            dist.barrier()
            return str(error)
        return None

    assert ranks(run, world) == [None, "shapes cannot be multiplied", *[None] * (world - 2)]


def test_only_processes_of_this_machine_are_killed():
    """Another machine, or another container of it, may have a process with the same number."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        own = _Process.own()._replace(pid=process.pid)
        for machine in ("", own.machine + "another"):
            own._replace(machine=machine).kill_if_here()
        assert own.machine and process.poll() is None
        own.kill_if_here()
        assert process.wait(60) == -9
