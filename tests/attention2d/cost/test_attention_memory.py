"""Peak memory of a call. Oracle: the bytes of all live tensors, counted after every operation.

Tiles are small compared with a rank's tensors, as in long sequences, so a kernel call needs little compared with the sums to
which its result is added.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from attention2d import USP, AllGather, Attention2D, Ring, Ulysses
from attention2d.compute import tile
from benchmarks.support.live_memory import taken

SCHEDULES = {
    "ring": lambda group: Ring(group),
    "all-gather": lambda group: AllGather(group),
    "Ulysses": lambda group: Ulysses(group),
    "one row": lambda group: Attention2D(group, 1, group.size()),
    "one row, overlapped": lambda group: Attention2D(group, 1, group.size(), overlap=True),
    "grid": lambda group: Attention2D(group, 2, group.size() // 2),
    "grid, overlapped": lambda group: Attention2D(group, 2, group.size() // 2, overlap=True),
    "tall grid": lambda group: Attention2D(group, group.size() // 2, 2),
    "tall grid, overlapped": lambda group: Attention2D(group, group.size() // 2, 2, overlap=True),
    "USP": lambda group: USP(group, 2),
    "3-D": lambda group: Attention2D(group, 1, group.size() // 2, ulysses=2),
    "transposed": lambda group: Attention2D(group, 2, group.size() // 2, order="cyclic", transpose=True),
}

FOR_ANY_RANKS = [SCHEDULES[name] for name in ("ring", "all-gather", "one row", "one row, overlapped")]


def measure_all(cases):
    """For each case on this rank: (measured, formula), each the bytes (saved, most in forward, most in backward)."""
    tile.CPU_ELEMENTS, tile.MIN_LENGTH = 2**12, 1
    found = []
    for name, batch, causal, dtype in cases:
        schedule = SCHEDULES[name](dist.group.WORLD)
        shape = dict(batch=batch, seq=128 * schedule.ranks, heads=4, kv_heads=2, head_dim=16)
        formula = schedule.memory(**shape, itemsize=dtype.itemsize)
        measured = taken(schedule, **shape, dtype=dtype, causal=causal)
        found.append((measured, (formula.saved, formula.forward, formula.backward)))
    return found


def check(ranks, world_size, cases):
    """Assert that saved bytes equal the formula, and that the rank that needs most is within 7 % of it in each pass."""
    cases = [case for case in cases if case[0] != "Ulysses" or world_size == 2]  # there are two key/value heads
    results = zip(*ranks(lambda rank: measure_all(cases), world_size, timeout=300), strict=True)
    for case, rank_results in zip(cases, results, strict=True):
        most = [max(each) for each in zip(*(measured for measured, _ in rank_results), strict=True)]
        shares = [ours / formula for ours, formula in zip(most, rank_results[0][1], strict=True)]
        assert shares[0] == 1 and all(0.93 < share < 1.07 for share in shares), (case, shares)


@pytest.mark.parametrize("world_size", (2, pytest.param(4, marks=pytest.mark.full)))
def test_peak_memory(world_size, ranks):
    check(ranks, world_size, [(name, 2, True, torch.bfloat16) for name in SCHEDULES])


@pytest.mark.full
@pytest.mark.parametrize("world_size", (2, 3, 4, 6))
def test_peak_memory_of_all_cases(world_size, ranks):
    names = [name for name in SCHEDULES if world_size % 2 == 0 or SCHEDULES[name] in FOR_ANY_RANKS]
    check(ranks, world_size, list(itertools.product(names, (1, 2), (False, True), (torch.float32, torch.bfloat16))))


def test_chunks_smaller_than_a_tile_need_no_more_than_the_formula():
    """The formula counts the sums of several tiles, which a single tile does not need."""
    for dtype, causal in itertools.product((torch.float32, torch.float64, torch.bfloat16), (False, True)):
        schedule = Attention2D(None, 1, 1)
        shape = dict(batch=1, seq=64, heads=4, kv_heads=1, head_dim=8)
        formula = schedule.memory(**shape, itemsize=dtype.itemsize)
        saved, forward, backward = taken(schedule, **shape, dtype=dtype, causal=causal)
        assert saved == formula.saved and forward <= 1.15 * formula.forward and backward <= 1.15 * formula.backward
