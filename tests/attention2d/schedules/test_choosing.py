"""The cheapest schedule. Oracle: bytes computed by hand for some shapes, and the costs of all other grids."""

import pytest
import torch
import torch.distributed as dist

from attention2d import Ring, Tree, choose
from attention2d.schedules.choosing import candidates
from commfabric.fabric.cost_model import Fabric
from commfabric.fabric.curve import Curve

# (heads, kv_heads, ranks): what the best grid sends in forward, and its (ulysses, rows, cols). The unit is a chunk, which is
# one rank's queries. On U x R x C ranks with k = kv_heads / heads it is (2 + 2 k) (U - 1) / U + 2 (C - 1) + 2 k (R - 1).
BEST = {
    (32, 32, 16): (3.75, (16, 1, 1)),
    (32, 32, 64): (5.88, None),
    (8, 8, 16): (5.5, None),
    (4, 4, 4): (3, (4, 1, 1)),
    (4, 4, 16): (7, (4, 2, 2)),
    (4, 4, 64): (15, (4, 4, 4)),
    (32, 8, 16): (2.69, (8, 2, 1)),
    (32, 8, 64): (5.69, (8, 4, 2)),
    (8, 1, 16): (3.75, None),  # several grids send the same
    (8, 1, 64): (9.75, (1, 16, 4)),
}


@pytest.mark.parametrize("shape", BEST)
def test_best_grids(shape):
    """With wide heads, so that the bytes of statistics are negligible."""
    heads, kv_heads, ranks = shape
    chunks, grid = BEST[shape]
    best = candidates(ranks, heads, kv_heads, head_dim=4096, seq=1024 * ranks, training=False)[0]
    assert best.bytes_sent / (1024 * heads * 4096 * 2) == pytest.approx(chunks, abs=0.006)
    assert grid in (None, (best.ulysses, best.rows, best.cols))


@pytest.mark.parametrize("training", (False, True))
def test_no_other_grid_sends_less(training):
    for heads, kv_heads, ranks in ((8, 8, 8), (8, 2, 12), (6, 1, 9)):
        found = candidates(ranks, heads, kv_heads, 64, 4096, training)
        assert len({(each.ulysses, each.rows, each.cols, each.overlap) for each in found}) == len(found)
        assert all(each.ulysses * each.rows * each.cols == ranks for each in found)
        assert found[0].bytes_sent <= 1.02 * min(each.bytes_sent for each in found)


def curve(operation, latency, rate, ranks=4):
    points = [(2**k, latency + 2**k / rate, latency + 2**k / rate) for k in range(8, 26)]
    return Curve.fit(operation, ranks, points)


@pytest.mark.parametrize("operation", ("p2p", "all_gather"))
def test_a_fabric_with_high_latency_prefers_few_steps(operation):
    """For short sequences. For long ones the rate decides, so the order is that of bytes."""
    fabric = Fabric((curve(operation, 1e-3, 1e10),))
    shape = dict(heads=2, kv_heads=2, head_dim=64, ranks=8)
    by_bytes, by_time = candidates(seq=2**22, **shape)[0], candidates(seq=2**22, fabric=fabric, **shape)[0]
    assert (by_bytes.ulysses, by_bytes.rows, by_bytes.cols) == (by_time.ulysses, by_time.rows, by_time.cols)
    short = candidates(seq=64, fabric=fabric, **shape)
    assert short[0].seconds == min(each.seconds for each in short)
    if operation == "p2p":
        assert short[0].steps == min(each.steps for each in short)


@pytest.mark.parametrize("world_size", [4])
def test_every_rank_chooses_the_same_and_says_why(world_size, ranks):
    def run(rank):
        heads = dict(heads=4, kv_heads=1, head_dim=16, seq=64)
        schedule = choose(dist.group.WORLD, **heads)
        q, kv = torch.ones(1, 64 // world_size, 4, 16), torch.ones(1, 64 // world_size, 1, 16)
        return repr(schedule), schedule.reason, schedule(q, kv, kv).sum().item()

    found = ranks(run, world_size)
    assert len(set(found)) == 1 and found[0][2] == pytest.approx(64 // world_size * 64)
    name, reason, _ = found[0]
    assert name in reason and "MB in" in reason and "forward and backward" in reason
    assert "overlap=True" in name  # with one key/value head on few ranks, a ring is the cheapest


@pytest.mark.parametrize("training", (False, True))
def test_the_cheapest_that_fits_into_memory(training):
    """With less and less memory: first the same grid with overlap, in the end one row or column, then an error."""
    shape = dict(heads=3, kv_heads=3, head_dim=64, seq=2**16, training=training)
    found = candidates(64, **shape)
    assert not found[0].overlap
    first = candidates(64, **shape, memory=found[0].peak_bytes - 1)[0]
    assert first.overlap and (first.rows, first.cols) == (found[0].rows, found[0].cols)
    for memory in {each.peak_bytes for each in found}:
        best = candidates(64, **shape, memory=memory)[0]
        assert best.peak_bytes <= memory
        assert best.bytes_sent <= 1.02 * min(each.bytes_sent for each in found if each.peak_bytes <= memory)
    least = min(each.peak_bytes for each in found)
    last = candidates(64, **shape, memory=least)[0]
    assert last.overlap and 1 in (last.rows, last.cols)
    with pytest.raises(ValueError, match=f"memory={least - 1}: no schedule on 64 ranks holds less than {least} bytes"):
        candidates(64, **shape, memory=least - 1)
    with pytest.raises(ValueError, match="memory=1000: no schedule on 1 ranks"):
        choose(**shape, memory=1000)


@pytest.mark.parametrize("name", ("seq", "batch", "head_dim", "itemsize"))
def test_sizes_below_one_are_refused(name):
    shape = dict(heads=4, kv_heads=2, head_dim=8, seq=16, batch=1, itemsize=2) | {name: 0}
    for compute in (choose, Ring().volume, Ring().memory, Tree().volume):
        with pytest.raises(ValueError, match=f"^{name}=0: expected at least 1"):
            compute(**shape)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="6 query heads do not divide over 4 key/value heads"):
        choose(heads=6, kv_heads=4, head_dim=8, seq=16)
