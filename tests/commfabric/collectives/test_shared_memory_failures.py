"""Connecting to shared memory, and how a connection ends; oracles: /dev/shm, /proc, the rank that died, closed or was
late, and the expected messages.

A test kills a rank with `die`: the rank's process is killed, and a fork of it reports in its place.
"""

import ctypes
import os
import resource
import signal
import subprocess
import tempfile
import time
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from commfabric.collectives import counted as collectives
from commfabric.collectives import host, shared_memory
from commfabric.collectives.shared_memory import SIGNATURES, connect
from commfabric.native.library import Library
from shared import die, error_of, joined, needs_library

pytestmark = needs_library
worlds = pytest.mark.parametrize("world", (2, 3, 4))
fewer = pytest.mark.parametrize("world", (pytest.param(2, marks=pytest.mark.full), 3))
CLONE_NEWNET = 0x40000000


def files(pid):
    """The files that a process has created to share and that still have a name."""
    folders = Path("/dev/shm"), Path(tempfile.gettempdir())
    return [path for folder in folders for path in folder.glob(f"sparsefusion-{pid}-*")]


# Connecting


@worlds
def test_connected_ranks_leave_no_file(ranks, world):
    def run(rank):
        memory = joined()
        pids = memory.all_gather(torch.tensor(os.getpid())).tolist()
        assert files(pids[0]) == []
        return os.getpid()

    assert [files(pid) for pid in ranks(run, world)] == [[]] * world


def reason_for_refusal(world, ranks, prepare=lambda rank: None, **options):
    """The reason why connect refuses, after prepare(rank). It is the same on every rank, and no file is left open.

    prepare: may return a function that undoes it. options: arguments of connect on the last rank.
    """

    def run(rank):
        undo = prepare(rank)
        memory, why = connect(dist.group.WORLD, **(options if rank == world - 1 else {}))
        assert memory is None
        if undo:
            undo()
        dist.barrier()
        open_files = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            joined().close()
        assert len(os.listdir("/proc/self/fd")) <= open_files
        return why, os.getpid()

    reasons, pids = zip(*ranks(run, world), strict=True)
    assert len(set(reasons)) == 1 and files(pids[0]) == []
    return reasons[0]


@fewer
def test_one_rank_declines(ranks, world):
    """Then no rank connects, and no rank waits; the reason names the first rank that declined."""
    assert reason_for_refusal(world, ranks, wanted=False) == f"rank {world - 1}: shared_memory=False"
    all_decline = [(None, "rank 0: shared_memory=False")] * world
    assert ranks(lambda rank: connect(dist.group.WORLD, wanted=False), world) == all_decline


@fewer
def test_one_rank_lacks_the_library(ranks, world):
    why = reason_for_refusal(world, ranks, library=Library("commfabric", SIGNATURES, "/nowhere/kernels.so"))
    assert f"rank {world - 1}: no C library" in why and "/nowhere/kernels.so" in why


@fewer
@pytest.mark.parametrize(
    "limit, value, who, why",
    (
        # Files may not grow to the size needed. This must be an error now, not a signal at the first write.
        pytest.param("RLIMIT_FSIZE", 8192, 0, ("rank 0: no ", " bytes in /dev/shm: "), id="space"),
        pytest.param("RLIMIT_NOFILE", 3, 1, ("rank 1: [Errno 24]",), id="descriptors"),
    ),
)
def test_one_rank_has_no_space_or_descriptors(ranks, world, limit, value, who, why):
    number = getattr(resource, limit)

    def prepare(rank):
        limits = resource.getrlimit(number)
        if rank == who:
            resource.setrlimit(number, (value, limits[1]))
        return lambda: resource.setrlimit(number, limits)

    reason = reason_for_refusal(world, ranks, prepare)
    assert all(part in reason for part in why), reason


@fewer
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_one_rank_runs_as_another_user(ranks, world):
    """That user may not open the file that the ranks share."""

    def prepare(rank):
        if rank == 1:
            os.seteuid(65534)
            return lambda: os.seteuid(0)

    assert "rank 1: [Errno 13]" in reason_for_refusal(world, ranks, prepare)


@fewer
def test_one_rank_finds_another_file(ranks, world):
    """Its /proc may be another mount. If the ranks used different files, they would wait for one another for ever."""

    def prepare(rank):
        if rank == 1:
            open_file = os.open

            def open_other(path, flags):
                if not str(path).startswith("/proc/"):
                    return open_file(path, flags)
                other = os.memfd_create("other")
                os.truncate(other, 1 << 24)
                return other

            os.open = open_other
            return lambda: setattr(os, "open", open_file)

    assert "is not the same file as on rank 0" in reason_for_refusal(world, ranks, prepare)


@fewer
def test_more_ranks_than_the_memory_can_have(ranks, world):
    """The C library returns sizes as an int. 8192 ranks would need 4 GiB, of which an int keeps 2 MB."""
    functions = shared_memory.kernels().functions
    assert functions.shared_memory_bytes(8192) == 0 < functions.shared_memory_bytes(4000)
    without_space = SimpleNamespace(native_sources=functions.native_sources, shared_memory_bytes=lambda ranks: 0)
    library = SimpleNamespace(functions=without_space)
    refusals = ranks(lambda rank: connect(dist.group.WORLD, library=library), world)
    assert refusals == [(None, f"{world} ranks would share 2 GiB or more")] * world


@pytest.mark.parametrize("killed_in", ("posix_fallocate", "close"))
def test_a_rank_killed_while_it_creates_the_file_leaves_none(killed_in):
    """The kernel frees the file, because it has no name by the time it takes space."""
    child = os.fork()
    if not child:
        setattr(os, killed_in, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        os.close(host._create(1 << 20))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert files(child) == []


@fewer
def test_a_rank_that_dies_while_ranks_connect(ranks, world):
    """connect raises an error on the other ranks. The file has no name, and only its user may open it."""

    def run(rank):
        if rank < world - 1:
            return error_of(lambda: connect(dist.group.WORLD))[0], os.getpid()
        host.gather_objects(host.describe_rank(shared_memory.kernels()), dist.group.WORLD)
        (path, *identity), _ = host.gather_objects((None, ""), dist.group.WORLD)[0]
        status = os.stat(path)
        assert (status.st_mode & 0o777, status.st_nlink) == (0o600, 0) and files(path.split("/")[2]) == []
        assert identity == [status.st_dev, status.st_ino]
        die()
        return RuntimeError, os.getpid()

    kinds, pids = zip(*ranks(run, world), strict=True)
    assert kinds == (RuntimeError,) * world and files(pids[0]) == []


@fewer
def test_a_rank_in_a_network_namespace_of_its_own(ranks, world):
    """As in launch/netlab.sh, where a network namespace stands for a machine."""
    if subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("needs root that may create network namespaces")

    def run(rank):
        if rank == world - 1:
            assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0
        return connect(dist.group.WORLD)

    assert ranks(run, world) == [(None, f"ranks 0 and {world - 1} are in different network namespaces")] * world


def test_ranks_that_differ():
    """Each difference between descriptions of ranks, other than the process, is a reason."""
    here = host.describe_rank(shared_memory.kernels())
    assert host.reason_not_to_share([here, here | {"pid": 1}]) == ""
    for what in here.keys() - {"why", "pid"}:
        assert host.reason_not_to_share([here, here, here | {what: "other"}]) == f"ranks 0 and 2 {what}"
    for what in ("machines", "network namespaces", "process namespaces", "sources"):
        assert any(name.endswith(what) for name in here)


@fewer
def test_a_group_of_one_rank_cannot_share(ranks, world):
    def run(rank):
        alone = [dist.new_group([other]) for other in range(world)][rank]
        memory, why = connect(alone)
        assert memory is None and "one rank" in why

    ranks(run, world)


@fewer
def test_the_timeout_is_that_of_the_group(ranks, world):
    """run_ranks gives the default group 30 seconds more than its own timeout."""
    assert ranks(lambda rank: shared_memory._timeout_of(dist.group.WORLD), world, timeout=20) == [50] * world


# Ranks that die, close, or do not come


@fewer
@pytest.mark.parametrize("n", (768, 300_000))
def test_a_killed_rank_is_named(ranks, world, n):
    """All other ranks name it, at once and in every later call. A fork of the dead rank does not count as the rank."""

    def run(rank):
        memory = joined()
        memory.all_reduce(torch.ones(n))
        pids = collectives.all_gather(torch.tensor(os.getpid()), dist.group.WORLD).tolist()
        if rank == world - 1:
            die()
            return None
        first = error_of(lambda: memory.all_reduce(torch.ones(n)))
        assert first == (RuntimeError, f"rank {world - 1} of {world} (process {pids[-1]}) has died")
        for later in (lambda: memory.all_reduce(torch.ones(5)), lambda: memory.all_gather(torch.ones(5))):
            kind, message = error_of(later)
            assert kind is RuntimeError and "cannot be used any more" in message and first[1] in message

    ranks(run, world)


@fewer
def test_a_rank_that_dies_while_others_wait(ranks, world):
    def run(rank):
        memory = joined()
        dist.barrier()
        if rank == 0:
            time.sleep(0.2)  # until the other ranks' C calls have returned NOT_YET
            die()
            return None
        return error_of(lambda: memory.all_gather(torch.ones(1)))[1]

    assert all("rank 0 of" in message and "has died" in message for message in ranks(run, world)[1:])


@fewer
@pytest.mark.parametrize("way", ("close", "garbage collection"))
def test_a_rank_that_closed(ranks, world, way):
    def run(rank):
        memory = joined()
        memory.all_reduce(torch.ones(1))
        if rank != 1:
            kind, message = error_of(lambda: memory.all_reduce(torch.ones(5)))
            assert kind is RuntimeError and f"rank 1 of {world}" in message and "closed" in message
        elif way == "garbage collection":
            del memory
        else:
            memory.close()
            memory.close()
            for call, n in product((memory.all_reduce, memory.all_gather), (0, 5)):
                kind, message = error_of(lambda call=call, n=n: call(torch.ones(n)))
                assert kind is RuntimeError and "is closed" in message

    ranks(run, world)


@fewer
def test_messages_sent_before_a_close_arrive(ranks, world):
    def run(rank):
        memory = joined()
        assert memory.all_gather(torch.tensor(rank)).tolist() == list(range(world))
        if rank == 1:
            memory.close()

    ranks(run, world)


@fewer
def test_a_fork_of_a_rank_does_not_close_it(ranks, world):
    def run(rank):
        memory = joined()
        child = os.fork()
        if not child:
            memory.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert memory.all_reduce(torch.ones(3)).tolist() == [world] * 3

    ranks(run, world)


@fewer
def test_a_rank_that_is_late(ranks, world):
    """The ranks that wait name it; the late rank learns that another one has given up."""

    def run(rank):
        memory = joined(timeout=0.3)
        if rank == world - 1:
            dist.barrier()
            memory.all_reduce(torch.ones(2))  # the other ranks have already sent their parts of this sum
            kind, message = error_of(lambda: memory.all_reduce(torch.ones(2)))
            assert kind is RuntimeError and "has given up" in message
        else:
            kind, message = error_of(lambda: memory.all_reduce(torch.ones(2)))
            dist.barrier()
            assert kind is RuntimeError and "has not come within 0.3 s" in message
            assert f"rank {world - 1} of {world} (process" in message

    ranks(run, world)


@fewer
def test_a_signal_interrupts_a_rank_that_waits(ranks, world):
    def interrupt(*_):
        raise KeyboardInterrupt("enough")

    def run(rank):
        memory = joined()
        if rank:
            dist.barrier()
            memory.all_reduce(torch.ones(2))
        else:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                memory.all_reduce(torch.ones(2))
            dist.barrier()
        return error_of(lambda: memory.all_reduce(torch.ones(2)))[1]

    interrupted, *others = ranks(run, world)
    assert "cannot be used any more: enough" in interrupted
    assert all("rank 0 of" in message and "has given up" in message for message in others)


@fewer
def test_calls_that_differ(ranks, world):
    """The last rank makes another call than the others. Each rank's error names that rank, another one, and both calls."""
    x, long = torch.ones(8), torch.ones(128)
    calls = {  # each differs from the next
        "all_reduce (sum, fp32) of 12 bytes": lambda m: m.all_reduce(x[:3]),
        "all_reduce (sum, fp32) of 16 bytes": lambda m: m.all_reduce(x[:4]),
        "all_reduce (max, fp32) of 16 bytes": lambda m: m.all_reduce(x[:4], op="max"),
        "all_gather of 16 bytes": lambda m: m.all_gather(x[:4]),
        "all_reduce (sum, fp16) of 16 bytes": lambda m: m.all_reduce(x, "fp16"),
        "all_reduce (sum, bf16) of 16 bytes": lambda m: m.all_reduce(x, "bf16"),
        "all_reduce (sum, bf16) of 16 + 8 bytes": lambda m: m.all_reduce(x, "bf16", exact=x[:2]),
        "all_reduce (sum, bf16) of 12 + 12 bytes": lambda m: m.all_reduce(x[:6], "bf16", exact=x[:3]),
        "all_reduce (sum, bf16) of 12 + 8 bytes": lambda m: m.all_reduce(x[:6], "bf16", exact=x[:2]),
        "all_reduce (sum, bf16) of 12 + 8 bytes from torch.float32 + torch.float16": lambda m: m.all_reduce(
            x[:6], "bf16", exact=x[:2].half()
        ),
        "all_reduce (sum, int8) of 132 bytes (128 elements)": lambda m: m.all_reduce(long, "int8"),
        "all_reduce (sum, int8) of 132 bytes (100 elements)": lambda m: m.all_reduce(long[:100], "int8"),
        "all_reduce (sum, int8) of 132 bytes (100 elements) from torch.bfloat16": lambda m: m.all_reduce(
            long[:100].bfloat16(), "int8"
        ),
        "all_reduce (sum, fp32) of 400 bytes from torch.bfloat16": lambda m: m.all_reduce(long[:100].bfloat16()),
        "all_reduce (sum, fp64) of 400 bytes from torch.float64": lambda m: m.all_reduce(long[:50].double()),
        "all_reduce (sum, fp32) of 400 bytes": lambda m: m.all_reduce(long[:100]),
    }

    def run(rank):
        last = rank == world - 1
        for pair in pairwise(calls):
            memory = joined()
            memory.all_reduce(x)
            own, theirs = pair if last else pair[::-1]
            raised = error_of(lambda call=calls[own], memory=memory: call(memory))
            assert raised == (ValueError, f"rank {rank} calls {own}, and rank {0 if last else world - 1} {theirs}")

    ranks(run, world)


# Arguments


@fewer
def test_tensors_on_another_device(ranks, world):
    """A ValueError on the rank that passes them; the memory stays usable."""
    x = torch.ones(3)
    wrong = {
        "all_reduce": lambda m: m.all_reduce(x.to("meta")),
        "exact": lambda m: m.all_reduce(x, exact=x.to("meta")),
        "all_gather": lambda m: m.all_gather(x.to("meta")),
    }

    def run(rank):
        memory = joined()
        for call in wrong.values() if rank == 0 else ():
            with pytest.raises(ValueError, match="on the CPU, not on meta"):
                call(memory)
        assert memory.all_reduce(x).tolist() == [world] * 3

    ranks(run, world)
