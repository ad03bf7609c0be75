"""The best grid of attention2d. Oracle: all plans of a search, and the bytes of attention2d's formula."""

import re

import pytest

from attention2d.cost.volume import messages
from attention2d.layout.grid import Grid
from benchmarks.support.plans import all_plans
from commir import Mesh, best_grid, programs
from commir.execution.attention_grids import grid_of
from commir.execution.gradient import backward_plan
from commir.scheduling.placements import placements_of
from commir.searching import grids
from commir.searching.grids import leaving_lse
from commir.searching.search import rounded

FAST, SLOW = (1e-6, 1e11), (1e-5, 1e9)


def attention(ranks, kv_heads=4, batch=3):
    return programs.attention(batch, 12, kv_heads, 8 * ranks, 16)


@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize("kv_heads", (1, 4, 12))
@pytest.mark.parametrize("sizes", [(4,), (6,), (12,), (2, 4), (3, 2)])
def test_no_grid_among_all_plans_is_faster(sizes, kv_heads, training):
    """Without the messages that bring lse home."""
    mesh = Mesh(**dict(zip(("node", "gpu"), sizes, strict=False)), speeds={"node": SLOW})
    if len(sizes) > 1:
        mesh = mesh.with_speeds({"gpu": FAST})
    program = attention(mesh.ranks, kv_heads)
    best, grid = best_grid(program, mesh, training)
    assert grid[0] * grid[1] * grid[2] == mesh.ranks

    def seconds(plan):
        return rounded(sum(each.seconds for each in ([plan, backward_plan(plan)] if training else [plan])))

    others = [leaving_lse(plan) for plan in all_plans(program, mesh) if grid_of(plan.schedule) is not None]
    assert seconds(leaving_lse(best)) == min(map(seconds, others))
    assert f"the fastest of {len(others)} grids by prediction" in best.reason or len(others) == 1


@pytest.mark.parametrize("kv_heads", (1, 4, 12))
@pytest.mark.parametrize("ranks_of_mesh", (4, 6, 8))
def test_its_plan_sends_what_attention2d_sends(ranks_of_mesh, kv_heads):
    """The plan itself also brings lse home, as attention2d does if it is asked for lse."""
    plan, grid = best_grid(attention(ranks_of_mesh, kv_heads), Mesh(gpu=ranks_of_mesh))
    rows, cols, ulysses, _ = grid
    assert grid_of(plan.schedule) == grid
    sent = messages(Grid(0, ulysses, rows, cols), 8, 3, 12, kv_heads, 16, 4, False).volume
    alone = leaving_lse(plan)
    assert (alone.bytes_per_rank, backward_plan(plan).bytes_per_rank) == (sent.forward, sent.backward)
    assert plan.bytes_per_rank - sent.forward == (ulysses - 1) * 8 * 3 * 12 * 4 // ulysses
    assert alone.reason == plan.reason


@pytest.mark.parametrize(
    "ranks_of_mesh, kv_heads",
    [(64, 4), pytest.param(96, 4, marks=pytest.mark.full), pytest.param(128, 2, marks=pytest.mark.full), (128, 12)],
)
def test_on_many_ranks_the_same_placement_is_verified_on_fewer(monkeypatch, ranks_of_mesh, kv_heads):
    verified = []
    monkeypatch.setattr(grids, "verify", verified.append)
    plan, _ = best_grid(attention(ranks_of_mesh, kv_heads), Mesh(gpu=ranks_of_mesh))
    assert len(verified) == 2
    for each in verified:
        assert placements_of(each.schedule) == placements_of(plan.schedule)
        assert (each.mesh.ranks == 64) if ranks_of_mesh == 64 else (each.mesh.ranks <= 27)
    monkeypatch.undo()
    if ranks_of_mesh > 64:
        for each in verified:
            grids.verify(each)


def test_the_reason():
    """A ring and an all-gather send the same; without latency only memory tells them apart."""
    reasons = []
    for speed in ((0.0, 1e9), (1e-6, 1e9)):
        plan, _ = best_grid(programs.attention(1, 4, 1, 32, 16), Mesh(gpu=4, speeds={"gpu": speed}))
        reasons.append(plan.reason.split("; ", 1)[1])
    assert reasons[0] == "as fast as the next, but holds less memory; the next is attention on Mesh(gpu=4): q on gpu"
    assert re.fullmatch(
        r"the next takes [0-9.]+ % longer than this: attention on .*q on gpu with kv shifted", reasons[1]
    )


def test_a_program_that_no_grid_computes():
    with pytest.raises(ValueError, match="no grid of attention2d computes decode_attention"):
        best_grid(programs.decode_attention(1, 8, 8, 64), Mesh(gpu=2))
    with pytest.raises(ValueError, match=r"q: axis q of 32 does not divide over 3 ranks .*32 % 6 = 2"):
        best_grid(programs.attention(1, 2, 2, 32, 16), Mesh(gpu=3))
