"""Sums and gathers in shared memory; oracles: sparsefusion.all_reduce by one_shot, numpy in rank order, bytes by hand.

What compares bits does so with each variant of the C library: the installed one, and builds for older processors.
"""

import math
import random
from itertools import cycle, product

import numpy as np
import pytest
import torch
import torch.distributed as dist

import sparsefusion
from native_variants import MARKED, library_path
from shared import joined, needs_library
from sparsefusion.collectives import counted as collectives
from sparsefusion.collectives.counted import Counter
from sparsefusion.collectives.shared_memory import SIGNATURES, connect
from sparsefusion.collectives.shared_memory_calls import FORMATS
from sparsefusion.native.library import Library
from sparsefusion.reduction.quantized import wire_bytes

__all__ = ["library_path"]
pytestmark = needs_library
worlds = pytest.mark.parametrize("world", (2, 3, 4))
fewer = pytest.mark.parametrize("world", (2, 3))
# Of variants; the bits depend on the number of ranks where that is no power of two.
three = pytest.mark.parametrize("world", (3, pytest.param(2, marks=pytest.mark.full)))
SIZES = (0, 1, 127, 128, 129, 511, 513, 70_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SLOT = 256 * 1024  # bytes of a message that go in one piece


@pytest.fixture(params=MARKED, scope="module")
def library(request, library_path):
    """A variant of the C library."""
    library = Library("sparsefusion", SIGNATURES, library_path("sparsefusion", request.param))
    assert library, library.why
    return library


def drawn(n, rank, dtype=torch.float32, spread=2.0):
    """A rank's numbers of many magnitudes, the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(1000 * rank + n)
    return (torch.randn(n, generator=generator) * torch.exp(spread * torch.randn(n, generator=generator))).to(dtype)


def one_shot(tensor, format):
    """The oracle."""
    return sparsefusion.all_reduce(tensor, dist.group.WORLD, format, "one_shot")


def assert_same(got, expected, *what):
    """The same shape, dtype and bits, but that a nan is a nan."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), what
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    same = (got.view(as_integers) == expected.view(as_integers)) | (got.isnan() & expected.isnan())
    assert same.all(), (what, (~same).nonzero()[:3].tolist(), got[~same][:3], expected[~same][:3])


def assert_sums(memory, x, formats=FORMATS):
    """The sums of every rank's x are the oracle's."""
    for format in formats:
        assert_same(memory.all_reduce(x, format), one_shot(x.detach(), format), x.shape, x.dtype, format)


# Sums


def all_sums(rank, library=None, sizes=SIZES):
    """Of a rank: in all dtypes, sizes and formats."""
    memory = joined(library=library)
    for dtype, n in product(DTYPES, sizes):
        x = drawn(n, rank, dtype)
        given = x.clone()
        assert_sums(memory, x, FORMATS[: 1 if library and dtype is torch.float64 else None])  # the rest is torch's
        assert_same(x, given)
        assert n == 0 or memory.all_reduce(x).data_ptr() != x.data_ptr()


def all_maxima(rank, library=None):
    """Of a rank: in all dtypes, of one piece and of several, one number a nan on one rank."""
    memory = joined(library=library)
    for dtype, n in product(DTYPES, (1, 1000, 140_001)):
        given = [drawn(n, other, dtype) for other in range(memory.size)]
        given[-1][n // 2] = np.nan
        expected = torch.stack(given).amax(0)
        assert expected[n // 2].isnan()
        assert_same(memory.all_reduce(given[rank], op="max"), expected, n)


def all_beside(rank, library=None):
    """Of a rank: sums with an exact one beside, in each format; also one of two pieces beside."""
    memory, owns = joined(library=library), cycle((torch.float32, torch.bfloat16, torch.float64))
    columns = {(7,): torch.float32, (2, 3, 1): torch.float64, (5, 1): torch.bfloat16, (0,): torch.float32}
    long = (3, ((70_001,), torch.float32), "int8")
    for n, (shape, dtype), format in [*product((0, 3, 70_001), columns.items(), FORMATS), long]:
        x, exact, counter = drawn(n, rank, next(owns)), drawn(math.prod(shape), rank, dtype).view(shape), Counter()
        total, exact_total = memory.all_reduce(x, format, counter, exact)
        assert_same(total, one_shot(x, format), n, shape, format)
        assert_same(exact_total, one_shot(exact, "fp32"), n, shape, format)
        assert sum(counter.calls.values()) == (x.numel() + exact.numel() > 0)


@pytest.mark.parametrize("world", (2, 4, pytest.param(5, marks=pytest.mark.full)))
def test_other_numbers_of_ranks(ranks, world):
    """With the installed library."""

    def run(rank):
        all_sums(rank, sizes=(0, 1, 129, 70_001))
        all_maxima(rank)
        all_beside(rank)

    ranks(run, world)


@three
def test_sums_are_those_of_one_shot(ranks, world, library):
    """Bit for bit; the input is left alone, the output new."""
    ranks(all_sums, world, library)


@three
def test_maximum(ranks, world, library):
    ranks(all_maxima, world, library)


@three
def test_exact_beside(ranks, world, library):
    """Both sums are those of one_shot of each alone; one call is counted."""
    ranks(all_beside, world, library)


@three
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


@three
def test_every_fp16_number_and_its_neighbours(ranks, world, library):
    """All 65,536, their midpoints, and the float32 on either side of both, as halves of sums and as parts; in pieces."""

    def run(rank):
        memory = joined(library=library)
        halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
        bits = halves.view(torch.int32)
        middles = (bits.long() + bits.roll(-1)).div(2, rounding_mode="floor").int()
        near = torch.cat([middle + step for middle in (bits, middles) for step in (-1, 0, 1)]).view(torch.float32)
        for own in (0, world - 1):
            assert_sums(memory, near * world if rank == own else torch.zeros_like(near), ("fp16", "bf16"))
        assert_sums(memory, near, ("fp16", "int8"))

    ranks(run, world)


@three
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
        for given in (x, edges, -edges * world, alone, alone[5:6], alone[7:8]):
            assert_sums(memory, given)

    ranks(run, world)


@three
def test_what_is_not_finite(ranks, world, library):
    """One number at either end, each on another rank; inf less inf."""

    def run(rank):
        memory = joined(library=library)
        for bad, owners in product((np.inf, -np.inf, np.nan), ((0, world - 1), (world - 1, 0))):
            x = drawn(1000, rank)
            x[[place for owner, place in zip(owners, (0, 999), strict=True) if owner == rank]] = bad
            assert_sums(memory, x)
        assert_sums(memory, torch.full((3,), -np.inf if rank else np.inf))

    ranks(run, world)


@three
def test_the_edge_of_the_range_of_fp16(ranks, world, library):
    """What rounding alone carried out of it is put back, and nothing else."""

    def run(rank):
        memory = joined(library=library)
        generator = torch.Generator().manual_seed(rank)
        x = 65504 * world * (1 + 0.002 * torch.randn(20_000, generator=generator)) * (1 if rank == 0 else 0.0005)
        for given in (x, -x, x / world, torch.tensor([80096.0, 50912.0][rank % 2])):
            assert_sums(memory, given, ("fp16",))

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
        for x in forms:
            assert_sums(memory, x)
            totals = [memory.all_reduce(x, format) for format in FORMATS]
            assert all(total.is_contiguous() and not total.requires_grad for total in totals)

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
@pytest.mark.parametrize("seed", (0, pytest.param(1, marks=pytest.mark.full)))
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


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
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
