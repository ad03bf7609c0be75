"""Timing the best few plans: all ranks get the same order, and every rank's search finds the same plans."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commir import In, Mesh, Out, fastest, grid, measure_overlap, measure_tile, operator, programs, search


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


@pytest.mark.parametrize("world", (2, 3))
def test_ranks_that_call_with_other_plans(ranks, world):
    """One error on all of them, and no rank waits."""
    plans = search(programs.attention(1, 6, 6, 36, 8), Mesh(gpu=world))[:3]

    def run(rank, given, repeated):
        with pytest.raises(ValueError) as error:
            fastest(given[rank], dist.group.WORLD, repeated[rank])
        return str(error.value)

    fewer, more = ([plans[:n] if rank == world - 1 else plans[: 5 - n] for rank in range(world)] for n in (2, 3))
    other_times = [*range(1, world + 1)]
    for given, repeated, message in (
        (fewer, [2] * world, f"rank {world - 1}: no more plans; on rank 0: a plan is {plans[2].hash[:16]}, "),
        (more, [2] * world, f"rank {world - 1}: a plan is {plans[2].hash[:16]}, "),
        ([plans] * world, other_times, "rank 1: repeated is 2; "),
    ):
        (found,) = set(ranks(run, world, given, repeated))
        assert message in found and "\n" not in found


def with_a_gpu():
    """As if torch could make tensors on a GPU of this machine: they are on the CPU."""
    empty = torch.empty
    return mock.patch("torch.empty", lambda *shape, device=None, **others: empty(*shape, **others))


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize(
    "other, message",
    [
        ("cuda", "rank 1: device is cuda; on rank 0: device is cpu"),
        ("meta", "device='meta': its tensors have no data to compute with (rank 1)"),
    ],
)
def test_ranks_that_measure_on_other_devices(ranks, world, other, message):
    plans = search(programs.attention(1, 6, 6, 36, 8), Mesh(gpu=world))[:2]

    def run(rank):
        device, found = other if rank == 1 else "cpu", []
        for measure in (
            lambda: fastest(plans, dist.group.WORLD, device=device),
            lambda: measure_tile(plans[0].program, world, dist.group.WORLD, device),
            lambda: measure_overlap(plans[0].program, dist.group.WORLD, device),
        ):
            with with_a_gpu(), pytest.raises(ValueError) as error:
                measure()
            found.append(str(error.value))
        return found

    for found in ranks(run, world):
        assert found == [message] * 3


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
