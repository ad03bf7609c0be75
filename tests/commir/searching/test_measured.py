"""Timing the best few plans: all ranks get the same order, and every rank's search finds the same plans."""

import pytest
import torch.distributed as dist

from commir import In, Mesh, Out, fastest, grid, measure_tile, operator, programs, search


def searched(mesh):
    program = programs.attention(1, 4, 4, 64, 8)
    return search(program, Mesh(**mesh))[:3]


def timed(rank, mesh):
    plans = searched(mesh)
    return [plan.hash for plan in plans], [(plan.hash, plan.reason) for plan in fastest(plans, dist.group.WORLD, 2)]


@pytest.mark.parametrize("world, mesh", [(2, dict(gpu=2)), (4, dict(node=2, gpu=2))])
def test_ranks_agree(ranks, world, mesh):
    results = ranks(timed, world, mesh)
    assert all(result == results[0] for result in results)
    found, ordered = results[0]
    assert found == [plan.hash for plan in searched(mesh)]
    assert sorted(found) == sorted(each for each, _ in ordered)
    times = [float(reason.split()[1]) for _, reason in ordered]
    assert times == sorted(times) and ordered[0][1].endswith("number 1")


def test_one_rank_and_no_plans():
    (plan, *_) = fastest(search(programs.weighted_sum(4, 4), Mesh(gpu=1)))
    assert plan.reason.startswith("measured: ")
    with pytest.raises(ValueError, match="there are no plans to time"):
        fastest([])


def test_an_input_without_axes():
    @operator
    def scaled(rows=4, cols=6):
        s = In[()].home(None)
        x = In[rows, cols]
        y = Out[rows]
        for rows, cols in grid("sr"):
            y[rows] += s[()] * x[rows, cols]

    program = scaled()
    assert measure_tile(program, 2)[1] >= 0
    assert fastest(search(program, Mesh(gpu=1)))[0].reason.startswith("measured: ")
