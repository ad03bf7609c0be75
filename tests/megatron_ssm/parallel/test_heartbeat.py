"""What the watch over ranks does not do; what it does is tested on whole runs, in training/test_faults.py."""

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_ssm.parallel.heartbeat import watched


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("seconds", (60.0, 0.9))
def test_a_bug_is_raised_while_another_rank_is_busy(ranks, tmp_path, world, seconds):
    """The silent rank has announced its pause, so it is not blamed for an error that is not one of communication."""

    def run(rank):
        processes = [None] * world
        dist.all_gather_object(processes, os.getpid())
        try:
            with watched(2.0, tmp_path) as watch:
                if rank == 0:
                    with watch.busy(seconds):
                        os.kill(os.getpid(), signal.SIGSTOP)
                elif rank == 1:
                    while state(processes[0]) != "T":
                        pass
                    raise RuntimeError("shapes cannot be multiplied")
        except RuntimeError as error:
            os.kill(processes[0], signal.SIGCONT)
            return str(error)
        return None

    assert ranks(run, world) == [None, "shapes cannot be multiplied", *[None] * (world - 2)]


def state(process: int) -> str:
    """The letter of Linux for the state of a process; T: stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
