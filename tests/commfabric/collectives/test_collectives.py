"""Counted collectives; oracles: float64 sums and slices of all ranks' inputs, and the byte counter of the Linux kernel."""

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
from sent_bytes import bytes_by_hand

from commfabric.collectives import counted as collectives
from commfabric.collectives.counted import Counter
from commfabric.reduction.quantized import all_reduce

worlds = pytest.mark.parametrize("world", (2, 3, 4))
fewer = pytest.mark.parametrize("world", (2, 3))
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
IN_ROWS = ("reduce_scatter", "all_to_all")  # collectives whose input has one row for each rank
SHAPES = [(5, 3), (1,), (0,), ()]


def normal(*shape, seed=0):
    """Random float64 values, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rank_inputs(name, shape, world):
    """The input of each rank: a tensor of this shape, or one row of this shape for each rank."""
    shape = (world, *shape) if name in IN_ROWS else shape
    return [normal(*shape, seed=rank) for rank in range(world)]


def expected(name, inputs, rank):
    """The output of a rank, computed from the inputs of all ranks."""
    if name == "all_reduce":
        return sum(inputs)
    if name == "all_gather":
        return torch.stack(inputs)
    rows = [tensor[rank] for tensor in inputs]
    return sum(rows) if name == "reduce_scatter" else torch.stack(rows)


@worlds
def test_against_plain_sums_and_slices(ranks, world):
    """In float64 and float32. The input is unchanged, and the output does not share its memory."""

    def run(rank):
        for name, shape, dtype in product(COLLECTIVES, SHAPES, (torch.float64, torch.float32)):
            inputs = [tensor.to(dtype) for tensor in rank_inputs(name, shape, world)]
            mine = inputs[rank].clone()
            output = getattr(collectives, name)(mine, dist.group.WORLD)
            assert torch.equal(mine, inputs[rank]), "the input was overwritten"
            assert mine.numel() == 0 or output.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()
            exact = expected(name, [tensor.double() for tensor in inputs], rank)
            assert output.dtype == dtype and output.shape == exact.shape, name
            tolerance = 1e-15 if dtype == torch.float64 else 1e-6
            assert torch.allclose(output.double(), exact, rtol=tolerance, atol=2 * tolerance)

    ranks(run, world)


@worlds
def test_tensors_that_are_not_contiguous(ranks, world):
    """A transposed tensor, on even ranks only, and every second element of a longer one."""

    def run(rank):
        for name in COLLECTIVES:
            inputs = rank_inputs(name, (4, 6), world)
            transposed = inputs[rank].mT.contiguous().mT if rank % 2 == 0 else inputs[rank]
            spread = torch.full((*inputs[rank].shape, 2), float("nan"), dtype=torch.float64)
            spread[..., 1] = inputs[rank]
            for mine in (transposed, spread[..., 1]):
                output, exact = getattr(collectives, name)(mine, dist.group.WORLD), expected(name, inputs, rank)
                assert output.shape == exact.shape and torch.allclose(output, exact, rtol=0, atol=1e-14), name
                assert torch.equal(mine, inputs[rank]), name

    ranks(run, world)


@fewer
def test_gathers_copy_every_dtype_exactly(ranks, world):
    dtypes = torch.uint8, torch.bool, torch.int64, torch.bfloat16

    def run(rank):
        for name, dtype in product(("all_gather", "all_to_all"), dtypes):
            inputs = [(100 * tensor).to(dtype) for tensor in rank_inputs(name, (7,), world)]
            output = getattr(collectives, name)(inputs[rank], dist.group.WORLD)
            assert output.dtype == dtype and torch.equal(output, expected(name, inputs, rank)), name

    ranks(run, world)


@worlds
def test_long_messages(ranks, world):
    """From STEP_BYTES on, messages are sent to one rank after the other. Sizes on both sides of it; three calls of each."""

    def run(rank):
        lengths = [collectives.STEP_BYTES // 8 + more for more in (-1, 0, 1, 5000)]
        for length, name in product(lengths, COLLECTIVES):
            inputs = rank_inputs(name, (length,), world)
            results = [getattr(collectives, name)(factor * inputs[rank], dist.group.WORLD) for factor in (1, 2, 4)]
            assert torch.allclose(results[0], expected(name, inputs, rank), rtol=0, atol=1e-13)
            assert torch.equal(results[1], 2 * results[0]) and torch.equal(results[2], 4 * results[0])

    ranks(run, world)


@worlds
def test_reduce_scatter_adds_in_rank_order(ranks, world):
    """So a sum has the same bits on whichever rank it is computed, and equals that of `in_rank_order`."""
    inputs = [tensor.float() for tensor in rank_inputs("reduce_scatter", (1000,), world)]

    def run(rank):
        return collectives.reduce_scatter(inputs[rank], dist.group.WORLD)

    for rank, output in enumerate(ranks(run, world)):
        total = inputs[0][rank]
        for tensor in inputs[1:]:
            total = total + tensor[rank]
        assert torch.equal(output, total)
        parts = torch.stack([tensor[rank] for tensor in inputs])
        assert torch.equal(collectives.in_rank_order(parts), total)
        assert torch.equal(parts[0], inputs[0][rank])


@fewer
def test_reduce_operations(ranks, world):
    inputs = [normal(10, seed=rank) for rank in range(world)]

    def run(rank):
        return [
            collectives.all_reduce(inputs[rank], dist.group.WORLD, op=op)
            for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN)
        ]

    for largest, smallest in ranks(run, world):
        assert torch.equal(largest, torch.stack(inputs).amax(0)) and torch.equal(smallest, torch.stack(inputs).amin(0))


def test_one_rank_sends_nothing():
    counter = Counter()
    x = normal(3, 2)
    assert torch.equal(collectives.all_reduce(x, None, counter), x)
    assert torch.equal(collectives.all_gather(x, None, counter), x[None])
    assert torch.equal(collectives.all_to_all(x[None], None, counter), x[None])
    assert torch.equal(collectives.reduce_scatter(x[None], None, counter), x)
    assert collectives.exchange([], [], None, counter).wait() == []
    assert (counter.calls, counter.nbytes, counter.sent) == ({}, 0, 0)


# Messages between pairs


@worlds
def test_exchange_in_a_ring(ranks, world):
    """Messages of different sizes travel in both directions at once. One of the tensors is not contiguous."""

    def run(rank):
        counter, right, left = Counter(), (rank + 1) % world, (rank - 1) % world
        to_right, to_left = normal(4, 3, seed=rank).T, normal(5, seed=10 + rank)
        empty = [torch.full((3, 4), float("nan"), dtype=torch.float64), torch.full((5,), float("nan")).double()]
        # With two ranks, left and right are the same rank: its messages are matched in the order in which they are listed.
        messages = [(to_right, right), (to_left, left)], [(empty[0], left), (empty[1], right)]
        received = collectives.exchange(*messages, dist.group.WORLD, counter).wait()
        assert received[0] is empty[0] and received[1] is empty[1]
        assert (counter.calls, counter.nbytes, counter.sent) == ({"exchange": 2}, 8 * 17, 8 * 17)
        return [tensor.clone() for tensor in received]

    for rank, (from_left, from_right) in enumerate(ranks(run, world)):
        assert torch.equal(from_left, normal(4, 3, seed=(rank - 1) % world).T)
        assert torch.equal(from_right, normal(5, seed=10 + (rank + 1) % world))


@worlds
def test_exchange_of_several_messages_with_one_peer(ranks, world):
    """They arrive in the order in which they are listed. Rank 0 sends to all other ranks, which send nothing."""

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
    """The receiver may call `exchange` later, and the sender need not keep a reference to its tensor."""

    def run(rank):
        right, left = (rank + 1) % world, (rank - 1) % world
        sending = collectives.exchange([(normal(1000, seed=rank).clone(), right)], [], dist.group.WORLD)
        dist.barrier()
        buffer = torch.full((1000,), float("nan"), dtype=torch.float64)
        receiving = collectives.exchange([], [(buffer, left)], dist.group.WORLD)
        assert torch.equal(receiving.wait()[0], normal(1000, seed=left)) and receiving.wait()[0] is buffer
        assert sending.wait() == sending.wait() == []

    ranks(run, world)


@pytest.mark.parametrize("world", (3, pytest.param(4, marks=pytest.mark.full)))
def test_in_a_group_of_some_ranks(ranks, world):
    """Peers and rows are numbered by the rank in the group, not by the rank in the world."""

    def run(rank):
        group = dist.new_group(range(1, world))
        if rank == 0:
            return None
        size, mine = world - 1, rank - 1
        for name in COLLECTIVES:
            inputs = rank_inputs(name, (5, 3), size)
            output = getattr(collectives, name)(inputs[mine], group)
            assert torch.allclose(output, expected(name, inputs, mine), rtol=0, atol=1e-14)
        buffer = torch.full((6,), float("nan"), dtype=torch.float64)
        sends, receives = [(normal(6, seed=mine), (mine + 1) % size)], [(buffer, (mine - 1) % size)]
        return collectives.exchange(sends, receives, group).wait()[0]

    _, *received = ranks(run, world)
    for mine, tensor in enumerate(received):
        assert torch.equal(tensor, normal(6, seed=(mine - 1) % (world - 1)))


# Bytes


def sent(name, nbytes, world):
    """Bytes sent for an input of `nbytes` bytes, rounded up, by the table in the module's docstring."""
    times = {"all_reduce": 2 * (world - 1), "all_gather": world * (world - 1)}.get(name, world - 1)
    return -(-times * nbytes // world)


@fewer
def test_counted_bytes(ranks, world):
    """Those of the input, here a view, not of its whole storage. On the CPU a reduce-scatter is counted as an all-to-all."""

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
def private_loopback():
    """Move this thread, and the ranks it forks, to a network namespace whose loopback nobody else uses; needs root."""
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
    """Bytes that the loopback of this namespace has transmitted, as the kernel counts them."""
    with open("/proc/thread-self/net/dev") as lines:
        (line,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def quantized(name):
    """The quantized all-reduce with this name, "format algorithm", called as the other collectives are."""
    format, algorithm = name.split()
    return lambda tensor, group, counter: all_reduce(tensor, group, format, algorithm, counter)


MESSAGES = {
    **{name: getattr(collectives, name) for name in COLLECTIVES},
    **{name: quantized(name) for name in ("int8 two_shot", "int8 one_shot", "bf16 two_shot", "fp16 native")},
}


@worlds
def test_the_kernel_sends_what_is_counted(ranks, world, monkeypatch):
    """All ranks together send the counted bytes and headers, which add at most 3 % to such large messages. The minimum of
    several calls excludes retransmissions."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    length, repetitions = 3 * 2**16, 4

    def measured(call, x, counter):
        """(fewest bytes that the kernel sent for one call, bytes that were counted for it)."""
        by_kernel = []
        for _ in range(repetitions + 1):  # the first call also opens connections
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

    with private_loopback():
        found = ranks(run, world)[0]
    for name, (by_kernel, counted) in found.items():
        assert world * counted <= by_kernel <= 1.03 * world * counted, name
        if " " in name:
            assert counted == bytes_by_hand(*name.split(), length, world)
