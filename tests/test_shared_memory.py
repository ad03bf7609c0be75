"""Memory shared by ranks; oracles: sparsefusion.all_reduce by one_shot, numpy sums in rank order, bytes by hand, /dev/shm.

A test that lets a rank die does so with `die`: the rank's process is killed, and a fork of it reports in its place.
"""

import ctypes
import math
import os
import random
import resource
import signal
import subprocess
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import sparsefusion
from sparsefusion import collectives, one_host, shared_memory
from sparsefusion.collectives import Counter
from sparsefusion.native import Library
from sparsefusion.reduction import wire_bytes
from sparsefusion.shared_memory import FORMATS, SIGNATURES, connect

worlds = pytest.mark.parametrize("world", (2, 3, 4))
fewer = pytest.mark.parametrize("world", (2, 3))
SIZES = (0, 1, 2, 127, 128, 129, 511, 513, 1000, 4097, 70_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LIBRARIES = {"own": None}  # {name: path of a build; None: the package's own}
SLOT = 256 * 1024  # bytes of a message that go in one piece
SOON = 10  # seconds: 3 times what an error may take, and more, for busy machines
CLONE_NEWNET = 0x40000000

pytestmark = pytest.mark.skipif(not shared_memory.kernels(), reason=f"no C library: {shared_memory.kernels().why}")


@pytest.fixture(params=LIBRARIES)
def library(request):
    """The C library to test: one that each rank loads."""
    return Library("sparsefusion", SIGNATURES, LIBRARIES[request.param])


def joined(timeout=None, library=None):
    """This rank's SharedMemory of all ranks."""
    memory, why = connect(dist.group.WORLD, timeout, library)
    assert why == ""
    return memory


def drawn(n, rank, dtype=torch.float32, spread=2.0):
    """A rank's numbers of many magnitudes, the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(1000 * rank + n)
    return (torch.randn(n, generator=generator) * torch.exp(spread * torch.randn(n, generator=generator))).to(dtype)


def assert_same(got, expected, what=None):
    """The same shape, dtype and bits, but that a nan is a nan."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), what
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    same = (got.view(as_integers) == expected.view(as_integers)) | (got.isnan() & expected.isnan())
    assert same.all(), (what, (~same).nonzero()[:3].tolist(), got[~same][:3], expected[~same][:3])


def one_shot(tensor, format):
    """The oracle."""
    return sparsefusion.all_reduce(tensor, dist.group.WORLD, format, "one_shot")


def die():
    """Kill this rank's process; what returns is a fork of it, which reports to the parent in its place."""
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)


def error_of(function):
    """The (kind, message) of what it raises, within SOON."""
    start = time.monotonic()
    with pytest.raises(Exception) as caught:
        function()
    assert time.monotonic() - start < SOON
    return caught.type, str(caught.value)


def files(pid):
    """The files that a process has made to share and that still have a name."""
    folders = Path("/dev/shm"), Path(tempfile.gettempdir())
    return [path for folder in folders for path in folder.glob(f"sparsefusion-{pid}-*")]


# Sums


@worlds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_those_of_one_shot(ranks, world, dtype, library):
    """Bit for bit, in all formats and sizes; the input is left alone, the output new."""

    def run(rank):
        memory = joined(library=library)
        for n, format in product(SIZES, FORMATS):
            x = drawn(n, rank, dtype)
            given = x.clone()
            total = memory.all_reduce(x, format)
            assert_same(total, one_shot(x, format), (n, format))
            assert_same(x, given)
            assert n == 0 or total.data_ptr() != x.data_ptr()

    ranks(run, world)


@worlds
def test_fp32_is_added_up_in_rank_order(ranks, world, library):
    def run(rank):
        memory = joined(library=library)
        for dtype in (torch.float32, torch.float64):
            total = None
            for other in range(world):
                x = drawn(100_001, other, dtype, spread=5).numpy()
                total = x if total is None else total + x
            assert np.array_equal(memory.all_reduce(drawn(100_001, rank, dtype, spread=5)).numpy(), total), dtype

    ranks(run, world)


@fewer
def test_every_fp16_number_and_its_neighbours(ranks, world, library):
    """All 65,536 of them, their midpoints, and the float32 on either side of both, as halves of sums and as parts."""

    def run(rank):
        memory = joined(library=library)
        halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
        bits = halves.view(torch.int32)
        middles = (bits.long() + bits.roll(-1)).div(2, rounding_mode="floor").int()
        near = torch.cat([middle + step for middle in (bits, middles) for step in (-1, 0, 1)]).view(torch.float32)
        for format, own in product(("fp16", "bf16"), range(world)):
            x = near * world if rank == own else torch.zeros_like(near)
            assert_same(memory.all_reduce(x, format), one_shot(x, format), format)
        assert_same(memory.all_reduce(near, "fp16"), one_shot(near, "fp16"))

    ranks(run, world)


@fewer
def test_every_magnitude_of_float32(ranks, world, library):
    """Numbers, and blocks of them, of all exponents, subnormal and at the edges included."""

    def run(rank):
        memory = joined(library=library)
        generator = torch.Generator().manual_seed(rank)
        exponents = torch.arange(256).repeat_interleave(384) << 23
        drawn_bits = torch.randint(-(2**31), 2**31, exponents.shape, generator=generator) & ~(255 << 23)
        x = (drawn_bits | exponents).to(torch.int32).view(torch.float32)
        largest, smallest = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
        edges = torch.tensor([65504.0, 65519.9, 65520.0, 65536.0, 131008.0, largest, smallest, 1e-45, 0.0, -0.0])
        alone = edges if rank == 0 else torch.zeros_like(edges)
        for given, format in product((x, edges, -edges * world, alone, alone[5:6], alone[7:8]), FORMATS):
            assert_same(memory.all_reduce(given, format), one_shot(given, format), format)

    ranks(run, world)


@worlds
def test_what_is_not_finite(ranks, world, library):
    def run(rank):
        memory = joined(library=library)
        for bad, owner, place, format in product((np.inf, -np.inf, np.nan), (0, world - 1), (0, 999), FORMATS):
            x = drawn(1000, rank)
            if rank == owner:
                x[place] = bad
            assert_same(memory.all_reduce(x, format), one_shot(x, format), (bad, place, format))
        opposite = torch.full((3,), -np.inf if rank else np.inf)
        for format in FORMATS:
            assert_same(memory.all_reduce(opposite, format), one_shot(opposite, format), format)

    ranks(run, world)


@fewer
def test_the_edge_of_the_range_of_fp16(ranks, world, library):
    """What rounding alone carried out of it is put back, and nothing else."""

    def run(rank):
        memory = joined(library=library)
        generator = torch.Generator().manual_seed(rank)
        x = 65504 * world * (1 + 0.002 * torch.randn(20_000, generator=generator)) * (1 if rank == 0 else 0.0005)
        for given in (x, -x, x / world, torch.tensor([80096.0, 50912.0][rank % 2])):
            assert_same(memory.all_reduce(given, "fp16"), one_shot(given, "fp16"))

    ranks(run, world)


@fewer
def test_shapes_and_strides(ranks, world):
    """A single number; transposed on some ranks only; every third; as a parameter that wants a gradient."""

    def run(rank):
        memory = joined()
        given = drawn(60, rank).view(3, 4, 5)
        forms = (
            given[0, 1, 2],
            given.mT if rank % 2 else given.mT.contiguous(),
            given[:, 1:3, ::2],
            given.flatten()[::3],
            torch.nn.Parameter(given),
            given.view(1, 3, 4, 5).to(memory_format=torch.channels_last),
        )
        for x, format in product(forms, FORMATS):
            total = memory.all_reduce(x, format)
            assert total.is_contiguous() and not total.requires_grad
            assert_same(total, one_shot(x.detach(), format), x.shape)

    ranks(run, world)


@worlds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_maximum(ranks, world, dtype, library):
    def run(rank):
        memory = joined(library=library)
        for n in (1, 1000, 140_001):
            given = [drawn(n, other, dtype) for other in range(world)]
            given[world - 1][n // 2] = np.nan
            expected = torch.stack(given).amax(0)
            assert expected[n // 2].isnan()
            assert_same(memory.all_reduce(given[rank], op="max"), expected)

    ranks(run, world)


@worlds
def test_exact_beside(ranks, world, library):
    """Both sums are those of one_shot of each alone; one call is counted."""
    columns = {(7,): torch.float32, (2, 3, 1): torch.float64, (5, 1): torch.bfloat16, (0,): torch.float32}

    def run(rank):
        memory = joined(library=library)
        for n, (shape, dtype), format, own in product(
            (0, 3, 70_001), columns.items(), FORMATS, (torch.float32, torch.float64)
        ):
            x, exact, counter = drawn(n, rank, own), drawn(math.prod(shape), rank, dtype).view(shape), Counter()
            total, exact_total = memory.all_reduce(x, format, counter, exact)
            assert_same(total, one_shot(x, format), (n, shape, format, own))
            assert_same(exact_total, one_shot(exact, "fp32"), (n, shape, format, own))
            assert sum(counter.calls.values()) == (x.numel() + exact.numel() > 0)

    ranks(run, world)


# Gathers


@worlds
def test_gathers(ranks, world):
    def run(rank):
        memory = joined()
        given = [
            drawn(12, rank).view(3, 4),
            drawn(12, rank).view(3, 4).T,
            torch.arange(300_001) * rank,
            torch.tensor(rank % 2 == 0),
            drawn(4, rank).to(torch.complex64),
            drawn(5, rank).bfloat16(),
            torch.full((7, 1), rank, dtype=torch.uint8),
            torch.empty(2, 0),
        ]
        for x in given:
            counters = Counter(), Counter()
            parts = memory.all_gather(x, counters[0])
            expected = collectives.all_gather(x, dist.group.WORLD, counters[1])
            assert parts.dtype == x.dtype and torch.equal(parts, expected) and counters[0] == counters[1]

    ranks(run, world)


# What is counted


@worlds
def test_counts(ranks, world):
    """fp32 as collectives.all_reduce counts, lossy formats as one_shot sends; one call each."""

    def run(rank):
        memory = joined()
        for n, exact, dtype in product((1, 129, 1000), (0, 7), (torch.float32, torch.bfloat16)):
            beside = torch.ones(exact) if exact else None
            for format in FORMATS:
                counter = Counter()
                memory.all_reduce(torch.ones(n, dtype=dtype), format, counter, beside)
                blocks = -(-n // 128)
                by_hand = {"fp32": 4 * n, "fp16": 2 * n, "bf16": 2 * n, "int8": 132 * blocks}[format] + 4 * exact
                assert (dict(counter.calls), counter.nbytes) == ({"all_reduce": 1}, by_hand), format
                if format == "fp32":
                    assert counter.sent == -(-2 * (world - 1) * by_hand // world)
                else:
                    assert counter.sent == wire_bytes(format, "one_shot", n, world, exact)
        counters = Counter(), Counter()
        memory.all_reduce(torch.ones(33, dtype=torch.float64), counter=counters[0])
        collectives.all_reduce(torch.ones(33, dtype=torch.float64), dist.group.WORLD, counters[1])
        assert counters[0] == counters[1]

    ranks(run, world)


# Many calls


@worlds
@pytest.mark.parametrize("seed", (0, 1))
def test_calls_of_all_kinds_and_sizes_one_after_the_other(ranks, world, seed):
    """Of no pieces, of one and of several, about their ends too; the oracle computes from what all ranks were given."""

    def run(rank):
        memory, choose = joined(), random.Random(seed)
        pool = [drawn(4 * SLOT // 4, other) for other in range(world)]
        for _ in range(100):
            edge = choose.choice((1, 2, 3)) * SLOT // 4 + choose.randint(-3, 3)
            n = choose.choice((choose.randint(0, 300), choose.randint(0, 20_000), edge))
            start = choose.randint(0, len(pool[0]) - n)
            given = [each[start : start + n] for each in pool]
            if choose.random() < 0.3:
                assert torch.equal(memory.all_gather(given[rank]), torch.stack(given))
            elif choose.random() < 0.3:
                total, beside = memory.all_reduce(given[rank], "bf16", exact=given[rank][:5].double())
                assert_same(beside, collectives.in_rank_order([each[:5].double() for each in given]))
                rounded = collectives.in_rank_order([each.bfloat16().float() for each in given])
                assert_same(total, rounded.bfloat16().float())
            else:
                assert_same(memory.all_reduce(given[rank]), collectives.in_rank_order(given))

    ranks(run, world)


@pytest.mark.parametrize("world", (2, 4))
def test_ten_thousand_calls(ranks, world):
    """Also with more ranks than processors."""

    def run(rank):
        memory, x, expected = joined(), torch.ones(768), torch.ones(768)
        for call in range(10_000):
            expected.fill_(call * world)
            if not torch.equal(memory.all_reduce(x.fill_(call)), expected):
                return call
        return None

    assert ranks(run, world) == [None] * world


@fewer
def test_several_groups_and_memories_side_by_side(ranks, world):
    def run(rank):
        first, second = joined(), joined()
        pair = dist.new_group([0, 1])
        small, why = connect(pair) if rank < 2 else (None, "")
        assert why == ""
        for memory in (first, second, first):
            assert memory.all_reduce(torch.ones(3)).tolist() == [world] * 3
            assert (memory.rank, memory.size) == (rank, world)
        assert small is None or small.all_reduce(torch.ones(3)).tolist() == [2] * 3

    ranks(run, world)


# Ends


@fewer
@pytest.mark.parametrize("n", (768, 300_000))
def test_a_killed_rank_is_named(ranks, world, n):
    """By all others, at once and in every later call; a fork of the dead rank does not pass for it."""

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
        if rank == 0:
            dist.barrier()
            die()
            return None
        dist.barrier()
        return error_of(lambda: memory.all_gather(torch.ones(1)))[1]

    assert all("rank 0 of" in message and "has died" in message for message in ranks(run, world)[1:])


@fewer
@pytest.mark.parametrize("way", ("close", "collected"))
def test_a_rank_that_closed(ranks, world, way):
    def run(rank):
        memory = joined()
        memory.all_reduce(torch.ones(1))
        if rank == 1:
            if way == "close":
                memory.close()
                memory.close()
                for call in (memory.all_reduce, memory.all_gather):
                    for n in (0, 5):
                        assert error_of(lambda call=call, n=n: call(torch.ones(n)))[0] is RuntimeError
                return "is closed" in error_of(lambda: memory.all_reduce(torch.ones(5)))[1]
            del memory
            return True
        kind, message = error_of(lambda: memory.all_reduce(torch.ones(5)))
        return kind is RuntimeError and f"rank 1 of {world}" in message and "closed" in message

    assert all(ranks(run, world))


@fewer
def test_what_was_sent_before_a_close_arrives(ranks, world):
    def run(rank):
        memory = joined()
        if rank == 1:
            assert memory.all_gather(torch.tensor(rank)).tolist() == list(range(world))
            memory.close()
            return
        assert memory.all_gather(torch.tensor(rank)).tolist() == list(range(world))

    ranks(run, world)


@fewer
def test_a_rank_that_does_not_come(ranks, world):
    """The one that waits names it; who comes later hears of that."""

    def run(rank):
        memory = joined(timeout=0.3)
        if rank == world - 1:
            dist.barrier()
            memory.all_reduce(torch.ones(2))  # all others came
            return error_of(lambda: memory.all_reduce(torch.ones(2)))
        error = error_of(lambda: memory.all_reduce(torch.ones(2)))
        dist.barrier()
        return error

    *waited, came = ranks(run, world)
    for kind, message in waited:
        assert kind is RuntimeError
        assert f"rank {world - 1} of {world} (process" in message and "has not come within 0.3 s" in message
    assert came[0] is RuntimeError and "has given up" in came[1]


@fewer
def test_an_interrupt_reaches_a_rank_that_waits(ranks, world):
    class Interrupt(Exception):
        pass

    def interrupt(*_):
        raise Interrupt("enough")

    def run(rank):
        memory = joined()
        if rank:
            dist.barrier()
            memory.all_reduce(torch.ones(2))
            return error_of(lambda: memory.all_reduce(torch.ones(2)))[1]
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        error_of(lambda: memory.all_reduce(torch.ones(2)))
        dist.barrier()
        return error_of(lambda: memory.all_reduce(torch.ones(2)))[1]

    interrupted, *others = ranks(run, world)
    assert "cannot be used any more: enough" in interrupted
    assert all("rank 0 of" in message and "has given up" in message for message in others)


@worlds
@pytest.mark.parametrize("difference", ("size", "operation", "format", "exact"))
def test_calls_that_differ(ranks, world, difference):
    """Each rank names itself and another one with what they call."""
    calls = {
        "size": (lambda m: m.all_reduce(torch.ones(3)), lambda m: m.all_reduce(torch.ones(4))),
        "operation": (lambda m: m.all_reduce(torch.ones(3)), lambda m: m.all_gather(torch.ones(3))),
        "format": (lambda m: m.all_reduce(torch.ones(4), "fp16"), lambda m: m.all_reduce(torch.ones(4), "bf16")),
        "exact": (
            lambda m: m.all_reduce(torch.ones(3), exact=torch.ones(2)),
            lambda m: m.all_reduce(torch.ones(2), exact=torch.ones(3)),
        ),
    }
    names = {
        "size": ("all_reduce (sum, fp32) of 12 bytes", "all_reduce (sum, fp32) of 16 bytes"),
        "operation": ("all_reduce (sum, fp32) of 12 bytes", "all_gather of 12 bytes"),
        "format": ("all_reduce (sum, fp16) of 8 bytes", "all_reduce (sum, bf16) of 8 bytes"),
        "exact": ("all_reduce (sum, fp32) of 12 + 8 bytes", "all_reduce (sum, fp32) of 8 + 12 bytes"),
    }
    usual, other = names[difference]

    def run(rank):
        memory = joined()
        memory.all_reduce(torch.ones(3))
        last = rank == world - 1
        kind, message = error_of(lambda: calls[difference][last](memory))
        own, theirs = (other, usual) if last else (usual, other)
        expected = f"rank {rank} calls {own}, and rank {0 if last else world - 1} {theirs}"
        assert (kind, message) == (ValueError, expected)

    ranks(run, world)


# Connecting


@worlds
def test_nothing_has_a_name_once_ranks_are_connected(ranks, world):
    def run(rank):
        memory = joined()
        pids = memory.all_gather(torch.tensor(os.getpid())).tolist()
        assert files(pids[0]) == []
        return os.getpid()

    assert [files(pid) for pid in ranks(run, world)] == [[]] * world


def refused(world, ranks, prepare, **options):
    """Why connect refuses after prepare(rank), the same on every rank; nothing is left behind."""

    def run(rank):
        again = prepare(rank)
        memory, why = connect(dist.group.WORLD, **(options if rank == world - 1 else {}))
        assert memory is None
        if again:
            again()
        dist.barrier()
        open_files = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            joined_again, _ = connect(dist.group.WORLD)
            if joined_again is not None:
                joined_again.close()
        assert len(os.listdir("/proc/self/fd")) <= open_files
        return why, os.getpid()

    reasons, pids = zip(*ranks(run, world), strict=True)
    assert len(set(reasons)) == 1 and files(pids[0]) == []
    return reasons[0]


@fewer
def test_one_rank_lacks_the_library(ranks, world):
    lacking = Library("sparsefusion", SIGNATURES, "/nowhere/kernels.so")
    why = refused(world, ranks, lambda rank: None, library=lacking)
    assert f"rank {world - 1}: no C library" in why and "/nowhere/kernels.so" in why


@fewer
def test_no_space(ranks, world):
    """A file may not grow to the size that is needed: an error now, not a signal later."""

    def prepare(rank):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    why = refused(world, ranks, prepare)
    assert "rank 0: no " in why and " bytes in /dev/shm: " in why


@fewer
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_one_rank_cannot_open_the_memory(ranks, world):
    """It is another user's."""

    def prepare(rank):
        if rank == 1:
            os.seteuid(65534)
            return lambda: os.seteuid(0)

    why = refused(world, ranks, prepare)
    assert "rank 1: [Errno 13]" in why


@fewer
def test_one_rank_has_no_descriptors_left(ranks, world):
    def prepare(rank):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert "rank 1: [Errno 24]" in refused(world, ranks, prepare)


@fewer
def test_a_rank_that_dies_while_ranks_connect(ranks, world):
    """When the file has its name: connect raises, and the name is gone."""

    def run(rank):
        if rank < world - 1:
            return error_of(lambda: connect(dist.group.WORLD))[0], os.getpid()
        one_host.gathered(one_host.presence(shared_memory.kernels()), dist.group.WORLD)
        path, _ = one_host.gathered((None, ""), dist.group.WORLD)[0]
        assert Path(path).name.startswith("sparsefusion-") and Path(path).stat().st_mode & 0o777 == 0o600
        die()
        return RuntimeError, os.getpid()

    kinds, pids = zip(*ranks(run, world), strict=True)
    assert kinds == (RuntimeError,) * world and files(pids[0]) == []


@fewer
def test_a_rank_in_a_network_namespace_of_its_own(ranks, world):
    """As in launch/netlab.sh: that stands for another machine."""
    if subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("needs root that may create network namespaces")

    def run(rank):
        if rank == world - 1:
            assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0
        return connect(dist.group.WORLD)

    assert ranks(run, world) == [(None, f"ranks 0 and {world - 1} are in different network namespaces")] * world


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


# Arguments


@fewer
def test_arguments_that_are_wrong(ranks, world):
    """A ValueError, on whichever rank; the memory stays usable."""
    x = torch.ones(3)
    wrong = {
        "fp32, fp16, bf16, int8": lambda m: m.all_reduce(x, "auto"),
        "'fp8' is none of fp32": lambda m: m.all_reduce(x, "fp8"),
        "'min' is none of sum, max": lambda m: m.all_reduce(x, op="min"),
        "'max' is for format fp32": lambda m: m.all_reduce(x, "bf16", op="max"),
        "not for fp32 and exact": lambda m: m.all_reduce(x, exact=x, op="max"),
        "torch.int64 is none of": lambda m: m.all_reduce(x.long()),
        "list is no tensor": lambda m: m.all_reduce([1.0]),
        "torch.int32 is none of": lambda m: m.all_reduce(x, exact=x.int()),
        "on meta": lambda m: m.all_reduce(x.to("meta")),
        "is on meta": lambda m: m.all_gather(x.to("meta")),
    }

    def run(rank):
        memory = joined()
        for text, call in wrong.items():
            if rank == 0:
                with pytest.raises(ValueError, match=text):
                    call(memory)
        assert memory.all_reduce(x).tolist() == [world] * 3

    ranks(run, world)


@fewer
def test_groups_that_share_nothing(ranks, world):
    def run(rank):
        alone = [dist.new_group([other]) for other in range(world)][rank]
        first = dist.new_group([0, 1])
        memory, why = connect(alone)
        assert memory is None and "one rank" in why
        for group in (None, first):
            if group is None or rank > 1:
                with pytest.raises(ValueError, match="no process group"):
                    connect(group)

    ranks(run, world)


@fewer
def test_the_time_limit_is_the_group_s(ranks, world):
    """run_ranks gives its default group 30 seconds more than the ranks have."""

    def run(rank):
        return shared_memory._timeout_of(dist.group.WORLD)

    assert ranks(run, world, timeout=20) == [50] * world
