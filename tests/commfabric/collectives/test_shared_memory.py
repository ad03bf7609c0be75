"""Sums and gathers in shared memory; oracles: one_shot of sparsefusion.all_reduce, numpy in rank order, bytes by hand.

Results are bitwise equal with each variant of the C library: the installed one, and builds for older processors.
"""

import math
import random
from itertools import cycle, product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sent_bytes import bytes_by_hand

import sparsefusion
from commfabric.collectives import counted as collectives
from commfabric.collectives.counted import Counter
from commfabric.collectives.shared_memory import SIGNATURES, connect
from commfabric.native.library import Library
from native_variants import MARKED, library_path
from shared import joined, needs_library

__all__ = ["library_path"]
pytestmark = needs_library
worlds = pytest.mark.parametrize("world", (2, 3, 4))
fewer = pytest.mark.parametrize("world", (2, 3))
# For the tests of all variants: with three ranks, dividing by the number of ranks (fp16) rounds as well.
worlds_of_variants = pytest.mark.parametrize("world", (3, pytest.param(2, marks=pytest.mark.full)))
FORMATS = ("fp32", "fp16", "bf16", "int8")
SIZES = (0, 1, 127, 128, 129, 511, 513, 70_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SLOT = 256 * 1024  # bytes of a piece: longer messages are sent in several


@pytest.fixture(params=MARKED, scope="module")
def library(request, library_path):
    """A variant of the C library."""
    library = Library("commfabric", SIGNATURES, library_path("commfabric", request.param))
    assert library, library.why
    return library


def random_values(n, rank, dtype=torch.float32, spread=2.0):
    """The input of a rank: values of many magnitudes, which every rank can compute."""
    generator = torch.Generator().manual_seed(1000 * rank + n)
    return (torch.randn(n, generator=generator) * torch.exp(spread * torch.randn(n, generator=generator))).to(dtype)


def one_shot(tensor, format):
    """The oracle: the sum that sparsefusion.all_reduce computes with algorithm one_shot."""
    return sparsefusion.all_reduce(tensor, dist.group.WORLD, format, "one_shot")


def assert_same(got, expected, *what):
    """Assert that shapes, dtypes and bits are equal; a NaN equals every NaN. what: shown on failure."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), what
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    same = (got.view(as_integers) == expected.view(as_integers)) | (got.isnan() & expected.isnan())
    assert same.all(), (what, (~same).nonzero()[:3].tolist(), got[~same][:3], expected[~same][:3])


def assert_sums(memory, x, formats=FORMATS):
    """Assert that the sums of all ranks' x equal the oracle's."""
    for format in formats:
        assert_same(memory.all_reduce(x, format), one_shot(x.detach(), format), x.shape, x.dtype, format)


# Sums


def assert_sums_of_all_sizes(rank, library=None, sizes=SIZES):
    """Assert on one of all ranks that sums in all dtypes, sizes and formats equal the oracle's."""
    memory = joined(library=library)
    for dtype, n in product(DTYPES, sizes):
        x = random_values(n, rank, dtype)
        given = x.clone()
        # torch computes the lossy formats of float64, with whatever library, so one test of them suffices.
        assert_sums(memory, x, FORMATS[: 1 if library and dtype is torch.float64 else None])
        assert_same(x, given)
        assert n == 0 or memory.all_reduce(x).data_ptr() != x.data_ptr()


def assert_maxima(rank, library=None):
    """Assert on one of all ranks that maxima equal torch's: in all dtypes, one piece and several, a NaN on the last rank."""
    memory = joined(library=library)
    for dtype, n in product(DTYPES, (1, 1000, 140_001)):
        given = [random_values(n, other, dtype) for other in range(memory.size)]
        given[-1][n // 2] = np.nan
        expected = torch.stack(given).amax(0)
        assert expected[n // 2].isnan()
        assert_same(memory.all_reduce(given[rank], op="max"), expected, n)


def assert_sums_with_exact(rank, library=None):
    """Assert on one of all ranks that sums in each format, with an exact sum of one or two pieces, are the oracle's."""
    memory, dtypes = joined(library=library), cycle((torch.float32, torch.bfloat16, torch.float64))
    shapes = {(7,): torch.float32, (2, 3, 1): torch.float64, (5, 1): torch.bfloat16, (0,): torch.float32}
    long = (3, ((70_001,), torch.float32), "int8")
    for n, (shape, dtype), format in [*product((0, 3, 70_001), shapes.items(), FORMATS), long]:
        x, counter = random_values(n, rank, next(dtypes)), Counter()
        exact = random_values(math.prod(shape), rank, dtype).view(shape)
        total, exact_total = memory.all_reduce(x, format, counter, exact)
        assert_same(total, one_shot(x, format), n, shape, format)
        assert_same(exact_total, one_shot(exact, "fp32"), n, shape, format)
        assert sum(counter.calls.values()) == (x.numel() + exact.numel() > 0)


@pytest.mark.parametrize("world", (2, 4, pytest.param(5, marks=pytest.mark.full)))
def test_other_numbers_of_ranks(ranks, world):
    """Only with the installed library."""

    def run(rank):
        assert_sums_of_all_sizes(rank, sizes=(0, 1, 129, 70_001))
        assert_maxima(rank)
        assert_sums_with_exact(rank)

    ranks(run, world)


@worlds_of_variants
def test_sums_are_bitwise_those_of_one_shot(ranks, world, library):
    """The input is unchanged, and the output does not share its memory."""
    ranks(assert_sums_of_all_sizes, world, library)


@worlds_of_variants
def test_maximum(ranks, world, library):
    ranks(assert_maxima, world, library)


@worlds_of_variants
def test_sums_with_exact(ranks, world, library):
    """Each of the two sums equals one_shot of that tensor alone; they are counted as one call."""
    ranks(assert_sums_with_exact, world, library)


@worlds_of_variants
def test_fp32_is_summed_in_rank_order(ranks, world, library):
    def run(rank):
        memory = joined(library=library)
        for dtype in (torch.float32, torch.float64):
            total = None
            for other in range(world):
                x = random_values(100_001, other, dtype, spread=5).numpy()
                total = x if total is None else total + x
            assert np.array_equal(memory.all_reduce(random_values(100_001, rank, dtype, spread=5)).numpy(), total), (
                dtype
            )

    ranks(run, world)


@worlds_of_variants
def test_every_fp16_value_and_its_neighbours(ranks, world, library):
    """All 65,536 values, their midpoints, and the next float32 above and below each: of one rank, and then of all ranks."""

    def run(rank):
        memory = joined(library=library)
        halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
        bits = halves.view(torch.int32)
        middles = (bits.long() + bits.roll(-1)).div(2, rounding_mode="floor").int()
        near = torch.cat([center + step for center in (bits, middles) for step in (-1, 0, 1)]).view(torch.float32)
        for owner in (0, world - 1):
            assert_sums(memory, near * world if rank == owner else torch.zeros_like(near), ("fp16", "bf16"))
        assert_sums(memory, near, ("fp16", "int8"))

    ranks(run, world)


@worlds_of_variants
def test_every_magnitude_of_float32(ranks, world, library):
    """Values, and blocks of values, with every exponent; also subnormals and the ends of the range of fp16."""

    def run(rank):
        memory = joined(library=library)
        generator = torch.Generator().manual_seed(rank)
        exponents = torch.arange(256).repeat_interleave(384) << 23
        random_bits = torch.randint(-(2**31), 2**31, exponents.shape, generator=generator) & ~(255 << 23)
        x = (random_bits | exponents).to(torch.int32).view(torch.float32)
        largest, smallest = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
        edges = torch.tensor([65504.0, 65519.9, 65520.0, 65536.0, 131008.0, largest, smallest, 1e-45, 0.0, -0.0])
        alone = edges if rank == 0 else torch.zeros_like(edges)
        for given in (x, edges, -edges * world, alone, alone[5:6], alone[7:8]):
            assert_sums(memory, given)

    ranks(run, world)


@worlds_of_variants
def test_nan_and_inf(ranks, world, library):
    """In the first and the last element, each on another rank; and inf - inf."""

    def run(rank):
        memory = joined(library=library)
        for bad, owners in product((np.inf, -np.inf, np.nan), ((0, world - 1), (world - 1, 0))):
            x = random_values(1000, rank)
            x[[index for owner, index in zip(owners, (0, 999), strict=True) if owner == rank]] = bad
            assert_sums(memory, x)
        assert_sums(memory, torch.full((3,), -np.inf if rank else np.inf))

    ranks(run, world)


@worlds_of_variants
def test_sums_near_the_largest_fp16_value(ranks, world, library):
    """A sum that exceeds the range only through rounding becomes the largest value; other sums beyond it are infinite."""

    def run(rank):
        memory = joined(library=library)
        generator = torch.Generator().manual_seed(rank)
        x = 65504 * world * (1 + 0.002 * torch.randn(20_000, generator=generator)) * (1 if rank == 0 else 0.0005)
        for given in (x, -x, x / world, torch.tensor([80096.0, 50912.0][rank % 2])):
            assert_sums(memory, given, ("fp16",))

    ranks(run, world)


@fewer
def test_shapes_and_strides(ranks, world):
    """A scalar; a view that is transposed on some ranks only; slices; a parameter that requires a gradient."""

    def run(rank):
        memory = joined()
        given = random_values(60, rank).view(3, 4, 5)
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
            random_values(12, rank).view(3, 4),
            random_values(12, rank).view(3, 4).T,
            torch.arange(300_001) * rank,
            torch.tensor(rank % 2 == 0),
            random_values(4, rank).to(torch.complex64),
            random_values(5, rank).bfloat16(),
            torch.full((7, 1), rank, dtype=torch.uint8),
            torch.empty(2, 0),
        ]
        for x in given:
            counters = Counter(), Counter()
            parts = memory.all_gather(x, counters[0])
            expected = collectives.all_gather(x, dist.group.WORLD, counters[1])
            assert parts.dtype == x.dtype and torch.equal(parts, expected) and counters[0] == counters[1]

    ranks(run, world)


# Counters


@worlds
def test_counts(ranks, world):
    """fp32 is counted as in collectives.all_reduce, a lossy format as in one_shot. Each sum counts as one call."""

    def run(rank):
        memory = joined()
        for n, exact, dtype in product((1, 129, 1000), (0, 7), (torch.float32, torch.bfloat16)):
            exact_tensor = torch.ones(exact) if exact else None
            for format in FORMATS:
                counter = Counter()
                memory.all_reduce(torch.ones(n, dtype=dtype), format, counter, exact_tensor)
                blocks = -(-n // 128)
                by_hand = {"fp32": 4 * n, "fp16": 2 * n, "bf16": 2 * n, "int8": 132 * blocks}[format] + 4 * exact
                assert (dict(counter.calls), counter.nbytes) == ({"all_reduce": 1}, by_hand), format
                if format == "fp32":
                    assert counter.sent == -(-2 * (world - 1) * by_hand // world)
                else:
                    assert counter.sent == bytes_by_hand(format, "one_shot", n, world, exact)
        counters = Counter(), Counter()
        memory.all_reduce(torch.ones(33, dtype=torch.float64), counter=counters[0])
        collectives.all_reduce(torch.ones(33, dtype=torch.float64), dist.group.WORLD, counters[1])
        assert counters[0] == counters[1]

    ranks(run, world)


# Many calls


@worlds
@pytest.mark.parametrize("seed", (0, pytest.param(1, marks=pytest.mark.full)))
def test_calls_of_all_kinds_and_sizes_one_after_the_other(ranks, world, seed):
    """Empty messages, one piece and several, and sizes near a multiple of a piece. The oracle computes from all inputs."""

    def run(rank):
        memory, rng = joined(), random.Random(seed)
        pool = [random_values(4 * SLOT // 4, other) for other in range(world)]
        for _ in range(100):
            edge = rng.choice((1, 2, 3)) * SLOT // 4 + rng.randint(-3, 3)
            n = rng.choice((rng.randint(0, 300), rng.randint(0, 20_000), edge))
            start = rng.randint(0, len(pool[0]) - n)
            given = [each[start : start + n] for each in pool]
            if rng.random() < 0.3:
                assert torch.equal(memory.all_gather(given[rank]), torch.stack(given))
            elif rng.random() < 0.3:
                total, exact = memory.all_reduce(given[rank], "bf16", exact=given[rank][:5].double())
                assert_same(exact, collectives.in_rank_order([each[:5].double() for each in given]))
                rounded = collectives.in_rank_order([each.bfloat16().float() for each in given])
                assert_same(total, rounded.bfloat16().float())
            else:
                assert_same(memory.all_reduce(given[rank]), collectives.in_rank_order(given))

    ranks(run, world)


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_ten_thousand_calls(ranks, world):
    """It also works with more ranks than processors."""

    def run(rank):
        memory, x, expected = joined(), torch.ones(768), torch.ones(768)
        for call in range(10_000):
            expected.fill_(call * world)
            if not torch.equal(memory.all_reduce(x.fill_(call)), expected):
                return call
        return None

    assert ranks(run, world) == [None] * world


@fewer
def test_two_memories_of_one_group_and_one_of_a_subgroup(ranks, world):
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
