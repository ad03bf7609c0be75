"""Placements in the source of an operator. Oracle: the same schedules made by primitives, and torch."""

import pytest
import torch
import torch.distributed as dist

import commir
from commir import In, Mesh, Out, Placement, Schedule, execute, grid, parallel, place, shift, verify
from commir.programs.operators import LoopNestError
from commir.scheduling.loop_nest import IllegalSchedule
from loop_programs import assert_close


@commir.operator
def nearest(points=16, centres=8):
    x = In[points]
    y = In[centres]
    best = Out[points]
    for points, centres in grid("sr", points=parallel("gpu"), centres=shift("gpu")):
        best[points] = max(best[points], -torch.abs(x[points] - y[centres]))


@commir.operator
def product(rows=8, cols=8, inner=8):
    """The columns are on the GPUs of a node, which pass rows around; both nodes have all columns."""
    a = In[rows, inner]
    b = In[inner, cols].home(cols).replicate("node")
    c = Out[rows, cols].home(rows)
    for rows, cols, inner in grid("ssr", rows=parallel("node"), cols=parallel("gpu")):
        c[rows, cols] += a[rows, inner] * b[inner, cols]


def on_ranks(rank, plan, inputs):
    """This rank's outputs."""
    return execute(plan, plan.shard(inputs, rank), dist.group.WORLD)


def test_the_schedule_is_that_of_the_primitives(ranks):
    plan = Schedule.of(nearest, Mesh(gpu=4), dtype="float64", centres=12).lower()
    program = nearest(dtype="float64", centres=12)
    assert plan == place(Schedule(program, Mesh(gpu=4)), gpu=Placement("points", True)).lower()
    verify(plan)
    inputs = {"x": torch.randn(16, dtype=torch.float64), "y": torch.randn(12, dtype=torch.float64)}
    results = ranks(on_ranks, 4, plan, inputs)
    assert_close(plan.unshard(results), {"best": -(inputs["x"][:, None] - inputs["y"]).abs().amin(1)})


def test_operands_that_some_ranks_have_whole(ranks):
    mesh = Mesh(node=2, gpu=2)
    plan = Schedule.of(product, mesh, "float64").lower()
    plain = Schedule(product("float64"), mesh).replicate("b", "node")
    assert plan == place(plain, node="rows", gpu="cols").lower()
    assert plan.schedule.home("b") == {"gpu": "cols"}
    verify(plan)
    inputs = {"a": torch.randn(8, 8, dtype=torch.float64), "b": torch.randn(8, 8, dtype=torch.float64)}
    assert_close(plan.unshard(ranks(on_ranks, 4, plan, inputs)), {"c": inputs["a"] @ inputs["b"]})


def test_a_shifted_loop_may_be_another_than_that_of_the_homes():
    """Here partial results travel along rows, in a ring of the ranks that divide the sum."""

    @commir.operator
    def sums(rows=8, inner=8):
        a = In[inner, rows]
        c = Out[rows]
        for rows, inner in grid("sr", inner=parallel("gpu"), rows=shift("gpu")):
            c[rows] += a[inner, rows]

    plan = Schedule.of(sums, Mesh(gpu=4)).lower()
    verify(plan)
    assert str(plan.schedule).endswith("inner on gpu with rows shifted")


def annotated_twice():
    @commir.operator
    def wrong(i=4, j=4):
        x = In[i, j]
        y = Out[i, j]
        for i, j in grid("ss", i=parallel("gpu"), j=parallel("gpu")):
            y[i, j] = x[i, j]


def shifted_alone():
    @commir.operator
    def wrong(i=4, j=4):
        x = In[i, j]
        y = Out[i, j]
        for i, j in grid("ss", i=parallel("node"), j=shift("gpu")):
            y[i, j] = x[i, j]


def of_no_loop():
    @commir.operator
    def wrong(i=4):
        x = In[i]
        y = Out[i]
        for i in grid("s", k=parallel("gpu")):
            y[i] = x[i]


def without_a_name():
    @commir.operator
    def wrong(i=4):
        x = In[i].replicate(i)
        y = Out[i]
        for i in grid("s"):
            y[i] = x[i]


@pytest.mark.parametrize(
    "make, message",
    [
        (annotated_twice, "mesh axis gpu has the loop i already"),
        (shifted_alone, "j is shifted along gpu, but no loop is parallel there"),
        (of_no_loop, r'a loop is annotated as rows=parallel\("gpu"\)'),
        (without_a_name, r"In\[i\].replicate\(i\): expected the names of mesh axes"),
    ],
)
def test_wrong_annotations(make, message):
    with pytest.raises(LoopNestError, match=rf"test_annotations.py:\d+: wrong: {message}"):
        make()


def test_annotations_of_another_mesh():
    with pytest.raises(IllegalSchedule, match="the mesh has no axis 'gpu': expected node"):
        Schedule.of(nearest, Mesh(node=4))
    with pytest.raises(IllegalSchedule, match="mesh axis more has no placement"):
        Schedule.of(nearest, Mesh(gpu=2, more=2))
    with pytest.raises(RuntimeError, match="is read, not called"):
        parallel("gpu")
