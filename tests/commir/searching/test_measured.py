"""Timing the best few plans: all ranks get the same order, and every rank's search finds the same plans. Oracle: torch."""

import os
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from commir import (
    In,
    Mesh,
    Out,
    Placement,
    Schedule,
    execute,
    fastest,
    grid,
    interpret,
    measure_tile,
    operator,
    place,
    programs,
    search,
    verify,
)
from loop_programs import assert_close


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


@operator
def nearest(points=64, centres=64):
    x = In[points]
    y = In[centres]
    best = Out[points]
    for points, centres in grid("sr"):
        best[points] = max(best[points], -abs(x[points] - y[centres]))


def with_kernels(rank, plans, inputs):
    """The kernels and times of a ring, and its outputs by the compiled tile."""
    found = fastest(plans, dist.group.WORLD, 2, kernels=["library", "compiled"])
    compiled = next(plan for plan in found if plan.schedule.kernel == "compiled")
    outputs = execute(compiled, compiled.shard(inputs, rank), dist.group.WORLD)
    return [plan.reason for plan in found], outputs


RING = place(Schedule(nearest(dtype="float64"), Mesh(gpu=4)), gpu=Placement("points", True)).lower()


@pytest.fixture
def distances(monkeypatch):
    """Inputs of RING and its outputs; torch.compile starts no other processes."""
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("torch.compile needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    x, y = torch.randn(2, 64, dtype=torch.float64)
    return {"x": x, "y": y}, {"best": -(x[:, None] - y).abs().amin(1)}


def test_a_compiled_tile_computes_the_same(distances):
    inputs, expected = distances
    assert_close(interpret(replace(RING, schedule=RING.schedule.patch("compiled")), inputs), expected)
    scan = search(programs.selective_scan(1, 8, 2, 2, 2), Mesh(gpu=1))
    with pytest.raises(ValueError, match="selective_scan has no kernel 'compiled': expected library"):
        fastest(scan, kernels=["compiled"])


@pytest.mark.full  # each of the ranks compiles
def test_compiled_tiles_on_ranks(ranks, distances):
    inputs, expected = distances
    verify(replace(RING, schedule=RING.schedule.patch("compiled")))
    results = ranks(with_kernels, 4, [RING], inputs, timeout=300)
    assert sorted(reason.split()[-1] for reason in results[0][0]) == ["compiled", "library"]
    assert_close(RING.unshard([outputs for _, outputs in results]), expected)
