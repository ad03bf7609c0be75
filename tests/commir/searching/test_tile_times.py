"""Measured times of tiles, and plans with other speeds. Oracle: the plan's own steps; the times are only bounded below."""

import pytest
import torch.distributed as dist

from commir import Mesh, Schedule, measure_tile, programs
from commir.scheduling.placements import place
from commir.searching.candidates import candidates
from commir.searching.cost import CostModel

PROGRAMS = [
    programs.attention(1, 4, 2, 256, 16, dtype="bfloat16"),
    programs.attention(1, 4, 2, 256, 16, backward=True),
    programs.all_gather_matmul(256, 256, 64),
    programs.selective_scan(1, 64, 8),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_tile_takes_time(program):
    point_seconds, call_seconds = measure_tile(program, 4)
    assert point_seconds >= 0 and call_seconds >= 0 and point_seconds + call_seconds > 0


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_get_the_same_times(ranks, world):
    times = ranks(lambda rank: measure_tile(PROGRAMS[0], world, dist.group.WORLD), world)
    assert len(set(times)) == 1


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
