"""The `ranks` fixture, which forks ranks. Oracles: what each rank was told to do, and the process table."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

worlds = pytest.mark.parametrize("world_size", (pytest.param(2, marks=pytest.mark.full), 4))


@pytest.fixture(autouse=True)
def nothing_left():
    """Assert after every test that it leaves no child process, zombie or open pipe."""

    def resources():
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        return children, len(os.listdir("/dev/fd"))

    before = resources()
    yield
    assert resources() == before


def barrier():
    dist.all_reduce(torch.zeros(1))


@worlds
def test_results_come_back_in_rank_order(ranks, world_size):
    def sum_of_ranks(rank, factor):
        total = torch.tensor(float(rank)) * factor
        dist.all_reduce(total)
        return rank, dist.get_world_size(), torch.get_num_threads(), total.item()

    total = 3.0 * sum(range(world_size))
    assert ranks(sum_of_ranks, world_size, 3.0) == [(rank, world_size, 1, total) for rank in range(world_size)]


@worlds
def test_tensors_larger_than_a_pipe_come_back(ranks, world_size):
    def large(rank):
        return {"weight": torch.full((1_000_000,), rank, dtype=torch.float64), "name": f"rank {rank}"}

    for rank, result in enumerate(ranks(large, world_size)):
        assert result["name"] == f"rank {rank}"
        assert torch.equal(result["weight"], torch.full((1_000_000,), rank, dtype=torch.float64))


@worlds
@pytest.mark.parametrize("kind", (ValueError, KeyError, AssertionError, FileNotFoundError, SystemExit))
def test_an_exception_comes_back_with_type_rank_and_traceback(ranks, world_size, kind):
    def split_heads(rank):
        if rank == 1:
            raise kind("24 heads do not divide over 5 ranks (24 % 5 = 4)")
        barrier()  # the others wait for rank 1

    with pytest.raises(kind, match=rf"rank 1 of {world_size}: .*24 heads do not divide") as caught:
        ranks(split_heads, world_size)
    assert "Traceback" in str(caught.value) and "in split_heads" in str(caught.value)


@worlds
def test_the_earliest_exception_is_the_one_raised(ranks, world_size):
    def fail(rank):
        if rank == world_size - 1:
            raise ValueError("the cause")
        time.sleep(0.3)
        raise RuntimeError("what follows from it")

    with pytest.raises(ValueError, match=f"rank {world_size - 1} of {world_size}: the cause"):
        ranks(fail, world_size)


@worlds
def test_an_exception_that_cannot_be_rebuilt_is_a_runtime_error(ranks, world_size):
    def decode(rank):
        return b"\xff".decode("utf-8")  # UnicodeDecodeError takes five arguments

    class Local(ValueError):
        pass

    def fail(rank):
        raise Local("not importable")

    with pytest.raises(RuntimeError, match="UnicodeDecodeError"):
        ranks(decode, world_size)
    with pytest.raises(RuntimeError, match=r"Local: not importable"):
        ranks(fail, world_size)


@worlds
def test_a_result_that_cannot_be_sent_is_an_error(ranks, world_size):
    with pytest.raises(Exception, match="rank . of .*(?s:.)*pickle"):
        ranks(lambda rank: lambda: None, world_size)


@worlds
def test_a_killed_rank_fails_the_call_at_once(ranks, world_size):
    def die(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        barrier()

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank 1 of {world_size}: died without a result \(killed by SIGKILL\)"):
        ranks(die, world_size)
    assert time.monotonic() - start < 5


@worlds
def test_a_rank_that_exits_fails_the_call_at_once(ranks, world_size):
    def leave(rank):
        if rank == 0:
            os._exit(3)
        threading.Event().wait()

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank 0 of {world_size}: died without a result \(exit status 3\)"):
        ranks(leave, world_size)
    assert time.monotonic() - start < 5


@worlds
def test_a_crash_shows_where(ranks, world_size):
    def crash_here(rank):
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RuntimeError, match=r"killed by SIGSEGV(?s:.*)in crash_here"):
        ranks(crash_here, world_size)


@worlds
def test_a_hang_is_reported_in_time_with_the_ranks_and_their_stacks(ranks, world_size):
    def wait_for_rank_0(rank):
        if rank > 0:
            barrier()

    late = ", ".join(str(rank) for rank in range(1, world_size))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=f"of {world_size} ranks, {late} had not finished after 1 s") as caught:
        ranks(wait_for_rank_0, world_size, timeout=1)
    assert time.monotonic() - start < 4
    assert str(caught.value).count("in wait_for_rank_0") == world_size - 1


@worlds
def test_refuses_to_fork_with_several_threads(ranks, world_size):
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="torch uses 2 threads"):
            ranks(lambda rank: rank, world_size)
    finally:
        torch.set_num_threads(1)


@worlds
def test_ranks_end_when_the_parent_is_killed(tmp_path, world_size):
    program = f"""
        import os, sys, threading
        sys.path.insert(0, {str(Path(__file__).resolve().parents[2] / "helpers")!r})
        import torch
        from ranks import run_ranks
        def sleep(rank):
            os.write(1, b"up;")  # one system call: a print may be two, and then mixes with another rank's
            threading.Event().wait()
        torch.set_num_threads(1)
        run_ranks(sleep, {world_size})
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed parent leaves its temporary directory behind
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.read(3 * world_size) == b"up;" * world_size
        parent.kill()
        parent.communicate(timeout=5)  # the pipe closes only when all ranks have ended
