"""Memory of a call; oracle: the bytes of all tensors alive, counted operation by operation.

Tiles are small here, as they are beside long sequences: what a kernel takes is little against what it is added to.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from attention2d import USP, AllGather, Attention2D, Ring, Ulysses
from attention2d.compute import tile
from benchmarks.support.live_memory import taken

POINTS = {
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

OF_ANY = [POINTS[name] for name in ("ring", "all-gather", "one row", "one row, overlapped")]


def of_all(cases):
    """[(measured, formula)] of each case."""
    tile.NUMBERS, tile.LEAST = 2**12, 1
    found = []
    for name, batch, causal, dtype in cases:
        schedule = POINTS[name](dist.group.WORLD)
        shape = dict(batch=batch, seq=128 * schedule.ranks, heads=4, kv_heads=2, head_dim=16)
        formula = schedule.memory(**shape, itemsize=dtype.itemsize)
        measured = taken(schedule, **shape, dtype=dtype, causal=causal)
        found.append((measured, (formula.saved, formula.forward, formula.backward)))
    return found


def check(ranks, world_size, cases):
    """The most that a rank takes is within 7 % of the formula."""
    cases = [case for case in cases if case[0] != "Ulysses" or world_size == 2]  # two key/value heads
    results = zip(*ranks(lambda rank: of_all(cases), world_size, timeout=300), strict=True)
    for case, of_ranks in zip(cases, results, strict=True):
        most = [max(each) for each in zip(*(measured for measured, _ in of_ranks), strict=True)]
        shares = [ours / formula for ours, formula in zip(most, of_ranks[0][1], strict=True)]
        assert shares[0] == 1 and all(0.93 < share < 1.07 for share in shares), (case, shares)


@pytest.mark.parametrize("world_size", (2, pytest.param(4, marks=pytest.mark.full)))
def test_bytes_are_the_formulas(world_size, ranks):
    check(ranks, world_size, [(name, 2, True, torch.bfloat16) for name in POINTS])


@pytest.mark.full
@pytest.mark.parametrize("world_size", (2, 3, 4, 6))
def test_bytes_of_everything_are_the_formulas(world_size, ranks):
    names = [name for name in POINTS if world_size % 2 == 0 or POINTS[name] in OF_ANY]
    check(ranks, world_size, list(itertools.product(names, (1, 2), (False, True), (torch.float32, torch.bfloat16))))


def test_chunks_smaller_than_a_tile_take_no_more_than_the_formula():
    """Oracle as above; the formula does not know that one tile for all needs no room to be added up in."""
    for dtype, causal in itertools.product((torch.float32, torch.float64, torch.bfloat16), (False, True)):
        schedule = Attention2D(None, 1, 1)
        shape = dict(batch=1, seq=64, heads=4, kv_heads=1, head_dim=8)
        formula = schedule.memory(**shape, itemsize=dtype.itemsize)
        saved, forward, backward = taken(schedule, **shape, dtype=dtype, causal=causal)
        assert saved == formula.saved and forward <= 1.15 * formula.forward and backward <= 1.15 * formula.backward
