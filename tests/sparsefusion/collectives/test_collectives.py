"""Counted collectives; oracles: plain float64 sums and slices of what the ranks held, and the kernel's own byte counter."""

import ctypes
import fcntl
import os
import socket
import struct
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist

from sparsefusion.collectives import counted as collectives
from sparsefusion.collectives.counted import Counter
from sparsefusion.reduction.quantized import all_reduce, wire_bytes

worlds = pytest.mark.parametrize("world", (2, 3, 4))
fewer = pytest.mark.parametrize("world", (2, 3))
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
IN_ROWS = ("reduce_scatter", "all_to_all")  # one row for each rank
SHAPES = [(5, 3), (1,), (0,), ()]


def normal(*shape, seed=0):
    """The same float64 numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def held(name, shape, world):
    """What each rank puts in: of this shape, or rows of it."""
    shape = (world, *shape) if name in IN_ROWS else shape
    return [normal(*shape, seed=rank) for rank in range(world)]


def expected(name, given, rank):
    """What a rank gets, computed from what all held."""
    if name == "all_reduce":
        return sum(given)
    if name == "all_gather":
        return torch.stack(given)
    rows = [tensor[rank] for tensor in given]
    return sum(rows) if name == "reduce_scatter" else torch.stack(rows)


@worlds
def test_against_plain_sums_and_slices(ranks, world):
    """Of every shape, in float64 and float32; the input is left alone, the output is new."""

    def run(rank):
        for name, shape, dtype in product(COLLECTIVES, SHAPES, (torch.float64, torch.float32)):
            given = [tensor.to(dtype) for tensor in held(name, shape, world)]
            mine = given[rank].clone()
            got = getattr(collectives, name)(mine, dist.group.WORLD)
            assert torch.equal(mine, given[rank]), "the input was overwritten"
            assert mine.numel() == 0 or got.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()
            exact = expected(name, [tensor.double() for tensor in given], rank)
            assert got.dtype == dtype and got.shape == exact.shape, name
            tolerance = 1e-15 if dtype == torch.float64 else 1e-6
            assert torch.allclose(got.double(), exact, rtol=tolerance, atol=2 * tolerance)

    ranks(run, world)


@worlds
def test_tensors_that_are_not_contiguous(ranks, world):
    """Transposed, and every other one of a longer one; different strides on different ranks."""

    def run(rank):
        for name in COLLECTIVES:
            given = held(name, (4, 6), world)
            transposed = given[rank].mT.contiguous().mT if rank % 2 == 0 else given[rank]
            spread = torch.full((*given[rank].shape, 2), float("nan"), dtype=torch.float64)
            spread[..., 1] = given[rank]
            for mine in (transposed, spread[..., 1]):
                got, exact = getattr(collectives, name)(mine, dist.group.WORLD), expected(name, given, rank)
                assert got.shape == exact.shape and torch.allclose(got, exact, rtol=0, atol=1e-14), name
                assert torch.equal(mine, given[rank]), name

    ranks(run, world)


@fewer
def test_any_dtype_travels_whole(ranks, world):
    dtypes = torch.uint8, torch.bool, torch.int64, torch.bfloat16

    def run(rank):
        for name, dtype in product(("all_gather", "all_to_all"), dtypes):
            given = [(100 * tensor).to(dtype) for tensor in held(name, (7,), world)]
            got = getattr(collectives, name)(given[rank], dist.group.WORLD)
            assert got.dtype == dtype and torch.equal(got, expected(name, given, rank)), name

    ranks(run, world)


@worlds
def test_long_messages(ranks, world):
    """Which are sent to one rank after the other; shorter and longer ones in turn, and several of one after the other."""

    def run(rank):
        lengths = [collectives.STEP_BYTES // 8 + more for more in (-1, 0, 1, 5000)]
        for length, name in product(lengths, COLLECTIVES):
            given = held(name, (length,), world)
            results = [getattr(collectives, name)(factor * given[rank], dist.group.WORLD) for factor in (1, 2, 4)]
            assert torch.allclose(results[0], expected(name, given, rank), rtol=0, atol=1e-13)
            assert torch.equal(results[1], 2 * results[0]) and torch.equal(results[2], 4 * results[0])

    ranks(run, world)


@worlds
def test_few_bytes_gathered_in_rounds(ranks, world):
    def run(rank):
        given = [torch.arange(number, number + 6).view(3, 2).to(torch.int64) for number in range(world)]
        for mine in (given[rank], given[rank].mT.contiguous().mT, given[rank][:0]):
            got = collectives.all_gather_small(mine, dist.group.WORLD)
            assert torch.equal(got, torch.stack(given)[:, : len(mine)])

    ranks(run, world)


@worlds
def test_reduce_scatter_adds_in_rank_order(ranks, world):
    """So a sum has the same bits whoever makes it, and as `in_rank_order` gives it."""
    given = [tensor.float() for tensor in held("reduce_scatter", (1000,), world)]

    def run(rank):
        return collectives.reduce_scatter(given[rank], dist.group.WORLD)

    for rank, got in enumerate(ranks(run, world)):
        total = given[0][rank]
        for tensor in given[1:]:
            total = total + tensor[rank]
        assert torch.equal(got, total)
        parts = torch.stack([tensor[rank] for tensor in given])
        assert torch.equal(collectives.in_rank_order(parts), total)
        assert torch.equal(parts[0], given[0][rank])


@fewer
def test_reduce_operations(ranks, world):
    given = [normal(10, seed=rank) for rank in range(world)]

    def run(rank):
        return [
            collectives.all_reduce(given[rank], dist.group.WORLD, op=op)
            for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN)
        ]

    for largest, smallest in ranks(run, world):
        assert torch.equal(largest, torch.stack(given).amax(0)) and torch.equal(smallest, torch.stack(given).amin(0))


def test_one_rank_sends_nothing():
    counter = Counter()
    x = normal(3, 2)
    assert torch.equal(collectives.all_reduce(x, None, counter), x)
    assert torch.equal(collectives.all_gather(x, None, counter), x[None])
    assert torch.equal(collectives.all_to_all(x[None], None, counter), x[None])
    assert torch.equal(collectives.reduce_scatter(x[None], None, counter), x)
    assert collectives.exchange([], [], None, counter).wait() == []
    assert (counter.calls, counter.nbytes, counter.sent) == ({}, 0, 0)
    with pytest.raises(ValueError, match="1 messages to send and 0 to receive, and group None is one rank"):
        collectives.exchange([(x, 0)], [])
    with pytest.raises(ValueError, match="0 messages to send and 1 to receive"):
        collectives.exchange([], [(x, 0)])


@fewer
def test_the_wrong_number_of_rows(ranks, world):
    """Refused before anything is sent; the ranks can go on."""

    def run(rank):
        counter = Counter()
        for name in IN_ROWS:
            for rows in (world - 1, world + 1, 2 * world):
                with pytest.raises(ValueError, match=rf"{rows} rows of shape \(5,\) for {world} ranks"):
                    getattr(collectives, name)(normal(rows, 5), dist.group.WORLD, counter)
        assert (counter.calls, counter.nbytes, counter.sent) == ({}, 0, 0)
        return collectives.all_reduce(torch.ones(1), dist.group.WORLD).item()

    assert ranks(run, world) == [world] * world


# Messages between pairs


@worlds
def test_exchange_in_a_ring(ranks, world):
    """In both directions at once, of different sizes; also of tensors that are not contiguous."""

    def run(rank):
        counter, right, left = Counter(), (rank + 1) % world, (rank - 1) % world
        to_right, to_left = normal(4, 3, seed=rank).T, normal(5, seed=10 + rank)
        empty = [torch.full((3, 4), float("nan"), dtype=torch.float64), torch.full((5,), float("nan")).double()]
        # Two ranks are each other's left and right: messages meet in the order in which they are listed.
        order = [(to_right, right), (to_left, left)], [(empty[0], left), (empty[1], right)]
        received = collectives.exchange(*order, dist.group.WORLD, counter).wait()
        assert received[0] is empty[0] and received[1] is empty[1]
        assert (counter.calls, counter.nbytes, counter.sent) == ({"exchange": 2}, 8 * 17, 8 * 17)
        return [tensor.clone() for tensor in received]

    for rank, (from_left, from_right) in enumerate(ranks(run, world)):
        assert torch.equal(from_left, normal(4, 3, seed=(rank - 1) % world).T)
        assert torch.equal(from_right, normal(5, seed=10 + (rank + 1) % world))


@worlds
def test_exchange_of_several_messages_with_one_peer(ranks, world):
    """In the order in which they are listed; the first rank sends to all others, who send nothing to one another."""

    def run(rank):
        counter = Counter()
        if rank == 0:
            sends = [(torch.full((i + 1,), 10.0 * peer + i), peer) for i in range(3) for peer in range(1, world)]
            assert collectives.exchange(sends, [], dist.group.WORLD, counter).wait() == []
            return counter.sent, counter.calls["exchange"]
        buffers = [(torch.full((i + 1,), float("nan")), 0) for i in range(3)]
        received = collectives.exchange([], buffers, dist.group.WORLD, counter).wait()
        assert counter == Counter()
        return [tensor.tolist() for tensor in received]

    first, *others = ranks(run, world)
    assert first == ((world - 1) * 4 * 6, 3 * (world - 1))
    assert others == [[[10.0 * rank + i] * (i + 1) for i in range(3)] for rank in range(1, world)]


@fewer
def test_exchange_returns_at_once_and_may_wait_twice(ranks, world):
    """Whoever receives may do so later; what was handed in may be forgotten meanwhile."""

    def run(rank):
        right, left = (rank + 1) % world, (rank - 1) % world
        sending = collectives.exchange([(normal(1000, seed=rank).clone(), right)], [], dist.group.WORLD)
        dist.barrier()
        buffer = torch.full((1000,), float("nan"), dtype=torch.float64)
        receiving = collectives.exchange([], [(buffer, left)], dist.group.WORLD)
        assert torch.equal(receiving.wait()[0], normal(1000, seed=left)) and receiving.wait()[0] is buffer
        assert sending.wait() == sending.wait() == []

    ranks(run, world)


@pytest.mark.parametrize("world", (3, 4))
def test_in_a_group_of_some_ranks(ranks, world):
    """Peers and rows are ranks in the group, not in the world."""

    def run(rank):
        group = dist.new_group(range(1, world))
        if rank == 0:
            return None
        size, mine = world - 1, rank - 1
        for name in COLLECTIVES:
            given = held(name, (5, 3), size)
            got = getattr(collectives, name)(given[mine], group)
            assert torch.allclose(got, expected(name, given, mine), rtol=0, atol=1e-14)
        buffer = torch.full((6,), float("nan"), dtype=torch.float64)
        sends, receives = [(normal(6, seed=mine), (mine + 1) % size)], [(buffer, (mine - 1) % size)]
        return collectives.exchange(sends, receives, group).wait()[0]

    _, *received = ranks(run, world)
    for mine, tensor in enumerate(received):
        assert torch.equal(tensor, normal(6, seed=(mine - 1) % (world - 1)))


# Bytes


def sent(name, nbytes, world):
    """By the table of the module, of a buffer handed in of `nbytes` bytes; rounded up."""
    times = {"all_reduce": 2 * (world - 1), "all_gather": world * (world - 1)}.get(name, world - 1)
    return -(-times * nbytes // world)


@fewer
def test_counted_bytes(ranks, world):
    """Of what is handed in, not of what it is a part of. On the CPU the rows of a reduce-scatter go by all-to-all."""

    def run(rank):
        for name, dtype in product(COLLECTIVES, (torch.float64, torch.bfloat16, torch.uint8)):
            counter, nbytes, total = Counter(), 0, 0
            for calls, length in enumerate((1, 7, 128, 1001), 1):
                x = torch.ones(length, 2)[:, 0].to(dtype)
                x = torch.stack([x] * world) if name in IN_ROWS else x
                getattr(collectives, name)(x, dist.group.WORLD, counter)
                nbytes, total = nbytes + x.nbytes, total + sent(name, x.nbytes, world)
                kind = "all_to_all" if name == "reduce_scatter" else name
                assert (counter.calls, counter.nbytes, counter.sent) == ({kind: calls}, nbytes, total)
            counter.reset()
            assert counter == Counter()

    ranks(run, world)


CLONE_NEWNET, SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x40000000, 0x8913, 0x8914, 1
libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def loopback_of_our_own():
    """A network namespace for this thread and the ranks it forks, whose loopback nobody else uses; needs root."""
    with open("/proc/thread-self/ns/net") as before:
        if libc.unshare(CLONE_NEWNET) != 0:
            pytest.skip(f"no network namespace of its own: {os.strerror(ctypes.get_errno())}")
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
                name = b"lo".ljust(16, b"\0")
                (flags,) = struct.unpack_from("H", fcntl.ioctl(handle, SIOCGIFFLAGS, name + bytes(16)), 16)
                fcntl.ioctl(handle, SIOCSIFFLAGS, name + struct.pack("H", flags | IFF_UP) + bytes(14))
            yield
        finally:
            assert libc.setns(before.fileno(), CLONE_NEWNET) == 0


def transmitted():
    """Bytes that this namespace's loopback has transmitted, by the kernel."""
    with open("/proc/thread-self/net/dev") as lines:
        (line,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def quantized(name):
    """The all-reduce called "format algorithm" as a collective."""
    format, algorithm = name.split()
    return lambda tensor, group, counter: all_reduce(tensor, group, format, algorithm, counter)


MESSAGES = {
    **{name: getattr(collectives, name) for name in COLLECTIVES},
    **{name: quantized(name) for name in ("int8 two_shot", "int8 one_shot", "bf16 two_shot", "fp16 native")},
}


@worlds
def test_the_kernel_sends_what_is_counted(ranks, world, monkeypatch):
    """Of messages so large that headers do not matter, all ranks together; what TCP sends twice, it seldom sends thrice."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    length, repetitions = 3 * 2**16, 4

    def measured(call, x, counter):
        """The least that the kernel sent, and the bytes counted, of one call."""
        by_kernel = []
        for _ in range(repetitions + 1):  # the first connects
            counter.reset()
            dist.barrier()
            before = transmitted()
            dist.barrier()
            call(x, dist.group.WORLD, counter)
            dist.barrier()
            by_kernel.append(transmitted() - before)
        return min(by_kernel[1:]), counter.sent

    def run(rank):
        rows = torch.ones(world, length // world)
        return {
            name: measured(call, rows if name in IN_ROWS else rows.flatten(), Counter())
            for name, call in MESSAGES.items()
        }

    with loopback_of_our_own():
        found = ranks(run, world)[0]
    for name, (by_kernel, counted) in found.items():
        assert world * counted <= by_kernel <= 1.03 * world * counted, name
        if " " in name:
            assert counted == wire_bytes(*name.split(), length, world)
