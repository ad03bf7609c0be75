"""Measured times of tiles, and plans with other speeds. Oracle: the plan's own steps; the times are only bounded below."""

import re
from dataclasses import replace

import pytest
import torch.distributed as dist

from benchmarks.support.plans import all_plans
from commir import Mesh, Plan, Schedule, measure_overlap, measure_tile, programs, search
from commir.lowering.plan import CHANGED
from commir.lowering.timeline import collective_seconds
from commir.scheduling.placements import Placement, place
from commir.searching.candidates import candidates
from commir.searching.cost import CostModel
from commir.searching.tile_times import LEAST_OVERLAP, tile_program

PROGRAMS = [
    programs.attention(1, 4, 2, 256, 16, dtype="bfloat16"),
    programs.attention(1, 4, 2, 256, 16, backward=True),
    programs.all_gather_matmul(256, 256, 64),
    programs.selective_scan(1, 64, 8),
    programs.gated_delta(1, 64, 8, 4, 4, 2),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_tile_takes_time(program):
    point_seconds, call_seconds = measure_tile(program, 4)
    assert point_seconds >= 0 and call_seconds >= 0 and point_seconds + call_seconds > 0


SMALL = [
    programs.decode_attention(1, 32, 8, 256, 16),
    programs.decode_attention(2, 8, 2, 4, 4, dtype="float16"),
    programs.weighted_sum(4, 4),
    programs.weighted_sum(1, 1, dtype="float64"),
    programs.attention(1, 6, 2, 7, 4, backward=True, dtype="float64"),
    programs.matmul_reduce_scatter(1, 3, 5, dtype="bfloat16"),
    programs.selective_scan(1, 3, 1),
]


@pytest.mark.parametrize("number", range(len(SMALL)))
@pytest.mark.parametrize("parts", [1, 2, 9, 16, 1000])
def test_tiles_of_small_programs_on_many_ranks(parts, number):
    point_seconds, call_seconds = measure_tile(SMALL[number], parts)
    assert point_seconds >= 0 and call_seconds >= 0 and point_seconds + call_seconds > 0


def test_the_smallest_tile_has_no_time_for_each_point():
    point_seconds, call_seconds = measure_tile(programs.weighted_sum(4, 4), 16)
    assert point_seconds == 0 and call_seconds > 0


def test_an_axis_with_groups_of_several_sizes():
    """The number of heads in a tile is a multiple of 2 and of 3."""
    program, groups = programs.attention(heads=12, seq=1), {"q": 1, "k": 2, "v": 3}
    inputs = (replace(each, groups=(("heads", groups[each.name]),)) for each in program.inputs)
    program = replace(program, inputs=tuple(inputs))
    assert [tile_program(program, blocks).axis("heads").size for blocks in (1, 4, 9, 100)] == [12, 6, 6, 6]


@pytest.mark.parametrize("world", [2])
def test_ranks_get_the_same_times(ranks, world):
    times = ranks(lambda rank: measure_tile(PROGRAMS[0], world, dist.group.WORLD), world)
    assert len(set(times)) == 1


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_get_the_same_overlap(ranks, world):
    """One rank has nothing to overlap."""
    found = ranks(lambda rank: measure_overlap(PROGRAMS[0], dist.group.WORLD), world)
    assert len(set(found)) == 1 and LEAST_OVERLAP <= found[0] <= 1
    assert world > 1 or found == [1.0]


def differing(rank, measure, odd, *others):
    """The message of the error if the last rank measures a tile with other arguments."""
    try:
        measure(*(odd if rank == dist.get_world_size() - 1 else (PROGRAMS[0], *others)), dist.group.WORLD)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("world", [2])
def test_a_rank_that_measures_something_else(ranks, world):
    """All ranks get the error, and none waits for the others."""
    is_other = "got program='attention_backward in float32: .*, rank 0 got program='attention in bfloat16: batch 1, "
    for odd, message in (
        ((PROGRAMS[1], 4), is_other),
        ((PROGRAMS[0], 5), "rank . got ranks=5, rank 0 got ranks=4"),
    ):
        found = ranks(differing, world, measure_tile, odd, 4)
        assert all(re.search(message, error) for error in found), found
    found = ranks(differing, world, measure_overlap, (PROGRAMS[1],))
    assert all(re.search(is_other, error) for error in found), found


def test_no_group_has_nothing_to_overlap():
    assert measure_overlap(PROGRAMS[0]) == measure_overlap(PROGRAMS[0], None) == 1.0


def test_wrong_times_of_a_tile():
    plan = place(Schedule(PROGRAMS[0], Mesh(gpu=2)), gpu="q").lower()
    for times, message in (
        ((-1.0, 0.0), "point_seconds=-1.0, call_seconds=0.0, overlap=1.0: expected times of at least 0"),
        ((0.0, 0.0, 2.0), "overlap=2.0: expected times of at least 0 and an overlap of at most 1"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.with_tile(*times)


@pytest.mark.parametrize("tile", [1.0, 5.0])
@pytest.mark.parametrize("overlap", [1.0, 0.0, -1.0])
def test_a_tile_and_a_message_delay_each_other(tile, overlap):
    """A ring of two ranks: one message while the first tile is computed."""
    program, mesh = programs.attention(1, 4, 4, 64, 8), Mesh(gpu=2)
    plan = place(Schedule(program, mesh), gpu=Placement("q", True)).lower()
    message = 3.0
    plan = plan.on_mesh(mesh.with_speeds({"gpu": (0.0, plan.bytes_per_rank / message)})).with_tile(0.0, tile, overlap)
    assert plan.seconds == pytest.approx(max(tile, message) + (1 - overlap) * min(tile, message) + tile)


@pytest.mark.parametrize(
    "latency, count, at_once, expected",
    [(0.0, 5, 2, 5.0), (1.0, 5, 2, 6.0), (3.0, 1, 2, 4.0), (3.0, 2, 2, 5.0), (3.0, 3, 2, 8.0), (3.0, 4, 2, 9.0)]
    + [(3.0, 3, 1, 12.0), (3.0, 3, 3, 6.0), (3.0, 5, 3, 9.0)],
)
def test_some_messages_of_a_collective_are_under_way_at_a_time(latency, count, at_once, expected):
    """Each takes the link for one second; with two at once, the third begins when the first has arrived."""
    assert collective_seconds(latency, 1.0, count, at_once) == expected


@pytest.mark.parametrize("batch, expected", [(1, 6.0), (2, 8.0)])
def test_messages_that_arrive_in_place_are_under_way_at_once(batch, expected):
    """An all-gather of k and v on 4 ranks: with a batch of 1 their blocks are contiguous in the result."""
    program, mesh = programs.attention(batch, 4, 4, 64, 8), Mesh(gpu=4)
    plan = place(Schedule(program, mesh), gpu="q").lower()
    block = plan.bytes_per_rank / 3
    assert plan.on_mesh(mesh.with_speeds({"gpu": (3.0, block / 1.0)})).seconds == pytest.approx(expected)


def test_a_plan_with_the_time_of_a_tile():
    """As the search computes it, for every candidate."""
    program, mesh = programs.attention(1, 4, 4, 64, 8), Mesh(gpu=4)
    model = CostModel(program, mesh, 1e-9, 1e-6)
    for candidate in candidates(program, mesh):
        plan = candidate.schedule(program, mesh).lower().with_tile(1e-9, 1e-6)
        assert plan.tile_seconds == pytest.approx(model.tile_seconds(candidate), rel=1e-12)


def test_a_plan_on_a_mesh_with_other_speeds():
    program, mesh = programs.attention(1, 4, 4, 64, 8), Mesh(gpu=4)
    plan = place(Schedule(program, mesh), gpu="q").lower()
    slow = plan.on_mesh(mesh.with_speeds({"gpu": (0.0, 1e3)}))
    assert slow.seconds == pytest.approx(plan.bytes_per_rank / 1e3)
    assert slow.hash == plan.hash and slow.steps == plan.steps
    with pytest.raises(ValueError, match=r"the plan is for Mesh\(gpu=4\), not for Mesh\(gpu=8\)"):
        plan.on_mesh(Mesh(gpu=8))


def test_a_plan_from_json_gets_the_speeds_of_the_mesh_that_was_searched():
    """Also one that the search has split; a mesh with its parts as axes of their own is another."""
    mesh = Mesh(gpu=8, speeds={"gpu": (1e-5, 1e9)})
    plans = all_plans(programs.attention(1, 2, 2, 64, 8), mesh, 1e-9, 1e-6)
    plan = next(plan for plan in plans if plan.mesh.names == ("gpu0", "gpu1"))
    read = Plan.from_json(plan.to_json())
    again = read.on_mesh(mesh).with_tile(1e-9, 1e-6)
    assert again.seconds == plan.seconds > read.seconds and again.mesh == plan.mesh and again.reason == read.reason
    halves = mesh.split("gpu", a=plan.mesh.axes[0].size, b=plan.mesh.axes[1].size)
    assert read.on_mesh(halves).seconds == read.on_mesh(mesh).seconds
    assert not plan.mesh.refines(Mesh(gpu=8).split("gpu", a=2, b=2, c=2)) and plan.mesh.refines(mesh)
    sizes = {axis.name: axis.size for axis in plan.mesh.axes}
    with pytest.raises(ValueError, match=r"for (Mesh\(gpu0=., gpu1=.\)), parts of Mesh\(gpu=8\), not for \1$"):
        read.on_mesh(Mesh(**sizes))


def test_a_plan_that_was_changed_is_not_the_one_that_was_chosen():
    """Its prediction has no times of other tiles, and its reason is gone."""
    mesh = Mesh(gpu=4, speeds={"gpu": (1e-5, 1e9)})
    (plan,) = search(programs.attention(1, 4, 4, 64, 8), mesh, point_seconds=1e-6, top=1)
    changed = plan.at(q=128, kv=128)
    (larger,) = (each for each in all_plans(changed.program, mesh, 1e-6) if each.hash == changed.hash)
    assert changed.tile_seconds == 0
    assert changed.with_tile(1e-6, 0.0).seconds == pytest.approx(larger.seconds)
    whole = plan.with_options(causal=False).with_tile(1e-6, 0.0)
    assert whole.tile_seconds == pytest.approx(plan.tile_seconds * 2)
    others = changed, whole, plan.on_mesh(Mesh(gpu=4)), plan.with_tile(0.0, 0.0)
    assert "fastest" in plan.reason and {each.reason for each in others} == {CHANGED}
    assert plan.on_mesh(mesh) is plan
