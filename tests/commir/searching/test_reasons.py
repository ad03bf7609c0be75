"""Why a plan was chosen. Oracle: the plans themselves, compared number by number."""

import re
from dataclasses import replace

import pytest

from benchmarks.support.plans import all_plans
from commir import Mesh, Placement, Plan, Schedule, place, programs, search
from commir.scheduling.known_schedules import known_as
from commir.scheduling.placements import in_chunks
from commir.searching.search import TIES, _order, longer

MESHES = [Mesh(gpu=4), Mesh(gpu=8), Mesh(node=2, gpu=2, speeds={"node": (1e-4, 1e8), "gpu": (1e-6, 1e11)})]
PROGRAMS = [
    programs.attention(1, 8, 8, 256, 8),
    programs.attention(2, 8, 2, 256, 8),
    programs.all_gather_matmul(64, 64, 64),
    programs.weighted_sum(64, 64),
]
# What the plan that comes first has less of, by the words of its reason.
LESS = {
    "sends fewer bytes": lambda plan: plan.bytes_per_rank,
    "divides the mesh into fewer axes": lambda plan: len(plan.mesh.axes),
    "is a known schedule": lambda plan: not known_as(plan.schedule),
    "sends fewer messages": lambda plan: plan.messages,
    "holds less memory": lambda plan: plan.memory,
    "comes first in the order of their texts": lambda plan: str(plan.schedule),
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.name)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_reason_names_what_decided(mesh, program):
    """Also where only one plan was asked for."""
    best, other = search(program, mesh, top=2)
    assert search(program, mesh, top=1)[0].reason == best.reason
    assert str(other.schedule) in best.reason
    if other.seconds > best.seconds * (1 + 1e-8):
        times = other.seconds / best.seconds
        longer = f"{times:.3g} times as long as" if times >= 2 else f"{100 * (times - 1):.3g} % longer than"
        assert best.reason.startswith(f"fastest by prediction; the next takes {longer} this: ")
        assert other.reason == f"number 2 of the search; by prediction it takes {longer} the best"
        return
    why = best.reason.removeprefix("as fast by prediction as the next, but ").partition("; ")[0]
    assert best.reason.endswith(f"; the next is {other.schedule}")
    assert LESS[why](best) < LESS[why](other)
    for earlier in list(LESS)[: list(LESS).index(why)]:
        assert LESS[earlier](best) == LESS[earlier](other)


@pytest.mark.parametrize(
    "seconds, best, words",
    [
        (3.0, 3.0, "as long as"),
        (0.5, 0.0, "0.5 s longer than"),
        (1.256, 1.0, "25.6 % longer than"),
        (3.98, 2.0, "99 % longer than"),
        (4.0, 2.0, "2 times as long as"),
        (32.04, 1.0, "32 times as long as"),
        (999.6, 1.0, "1,000 times as long as"),
        (12345.6, 1.0, "12,346 times as long as"),
    ],
)
def test_from_twice_on_a_reason_says_how_many_times_as_long(seconds, best, words):
    assert longer(seconds, best) == words


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("placement", ["q", "heads", "kv", Placement("q", True)], ids=str)
def test_the_times_of_messages_are_those_of_the_plan(placement, chunks):
    """Messages that are under way together share their latency."""
    program, mesh = programs.attention(4, 8, 8, 64, 8), Mesh(gpu=8, speeds={"gpu": (1e-3, 1e7)})
    plan = in_chunks(place(Schedule(program, mesh), gpu=placement), "batch", chunks).lower()
    rows = [re.split(" {2,}", line) for line in plan.explain().splitlines()[3:-1]]
    assert sum(float(row[-1]) for row in rows) == pytest.approx(plan.seconds, rel=0.01)
    assert sum(int(row[-2].replace(",", "")) for row in rows) == plan.bytes_per_rank


def test_every_tie_is_named():
    (plan,) = search(PROGRAMS[0], MESHES[0], top=1)
    assert list(LESS) == list(TIES) and len(_order(plan)) == 1 + len(TIES)


def test_the_only_plan_that_fits():
    program, mesh = programs.weighted_sum(4, 1), Mesh(gpu=4)
    program = replace(program, inputs=(program.inputs[0], replace(program.inputs[1], home=None)))
    (plan,) = search(program, mesh)
    assert plan.reason == "the only placement that fits"


def test_the_only_plan_that_fits_in_chunks():
    """Of all plans, in chunks or not, one fits: the same placement in fewer chunks holds more."""
    program, mesh, memory = programs.attention(2, 8, 2, 64, 16), Mesh(node=2, gpu=2), 49612
    (plan,) = search(program, mesh, memory=memory)
    assert plan.reason == "the only placement that fits, in the fewest chunks that do"
    fitting = [each for each in all_plans(program, mesh, with_chunks=True) if each.memory <= memory]
    assert [each.schedule for each in fitting] == [plan.schedule] and plan.schedule.chunks > 1


def test_a_plan_that_was_read_does_not_know_its_reason():
    plan = Plan.from_json(search(PROGRAMS[0], MESHES[0])[0].to_json())
    assert plan.explain().endswith("chosen: not recorded, as the plan was read from JSON")
