"""Wrong arguments of commir's public functions: one case for each rule. Oracle: the text of the errors."""

import re
from dataclasses import replace

import pytest
import torch

import commir
from commir import In, Mesh, Out, Schedule, grid, place, programs
from commir.ir.mesh import MeshAxis
from commir.ir.program import Axis, Operand, Program, Result
from commir.searching.layers import transformer_layer


@commir.operator
def product(rows=4, cols=4):
    a = In[rows, cols]
    b = In[cols].home(None)
    c = Out[rows]
    for rows, cols in grid("sr"):
        c[rows] += torch.exp(a[rows, cols]) * b[cols]


MESH = Mesh(gpu=2)
ATTENTION = programs.attention(1, 2, 2, 8, 4)
SCHEDULE = place(Schedule(product(), MESH), gpu="rows")
BLOCK = torch.zeros(2)


def copy(a=None, c="c", outputs=("c",), kind="s", tile="a[rows]", **others):
    """c[rows] = a[rows], with something changed."""
    a, c = a or Operand("a", ("rows",), "rows"), Operand(c, ("rows",))
    return Program("copy", (Axis("rows", 4, kind),), (a,), (c,), (Result("sum", outputs),), tile, **others)


MESHES = {  # part of the error's message: the call
    "a mesh needs at least one axis": lambda: Mesh(),
    "mesh axis gpu has size 0: expected a whole number of at least 1": lambda: Mesh(gpu=0),
    "mesh axis gpu of 4 ranks is not 2 * 3 = 6": lambda: Mesh(gpu=4).split("gpu", a=2, b=3),
    "the mesh has an axis 'node' already": lambda: Mesh(node=2, gpu=4).split("gpu", node=4),
    "speed of unknown mesh axis 'node': expected gpu": lambda: Mesh(gpu=2, speeds={"node": (0, 1e9)}),
    "speed of mesh axis gpu is (0, 0): expected (seconds": lambda: MESH.with_speeds({"gpu": (0, 0)}),
    "speed of mesh axis gpu is 'fabric.json': expected": lambda: Mesh(gpu=2, speeds={"gpu": "fabric.json"}),
    "with different names, not a, a": lambda: Mesh.of_axes([MeshAxis("a", 2, "x"), MeshAxis("a", 2, "y")]),
    "rank 2 is not in a mesh of 2 ranks": lambda: MESH.coordinates(2),
    "the mesh has no axis 'node': expected gpu": lambda: MESH.size("node"),
}
PROGRAMS = {
    "'a b' cannot be the name of an axis": lambda: Axis("a b", 4),
    "axis rows has size 2.0: expected a whole number of at least 1": lambda: Axis("rows", 2.0),
    "axis rows has unknown kind 'x': expected s, r, c, w": lambda: Axis("rows", 4, "x"),
    "axis rows has unknown order 'cyclic'": lambda: Axis("rows", 4, "s", "cyclic"),
    "operand c has an axis twice: rows, rows": lambda: Operand("c", ("rows", "rows")),
    "operand a cannot have groups of 3 along axis rows": lambda: copy(Operand("a", ("rows",), groups=(("rows", 3),))),
    "s: unknown reduction 'product': expected sum, max, softmax": lambda: Result("product", ("s",)),
    "operand a names the axis cols": lambda: copy(Operand("a", ("cols",))),
    "two operands are called a": lambda: copy(c="a", outputs=("a",)),
    "the results of copy name c, d: expected each of c once": lambda: copy(outputs=("c", "d")),
    "operand a is kept along rows: expected a loop that indexes it": lambda: copy(kind="w"),
    "copy has 0 inputs and 1 outputs: expected at least one of each": lambda: replace(copy(), inputs=(), tile="1.0"),
    "unknown dtype 'int8': expected float64": lambda: copy(dtype="int8"),
    "copy: the tile 'a[rows' is neither": lambda: copy(tile="a[rows"),
    "the tile attention has the inputs q, k, v": lambda: replace(ATTENTION, inputs=ATTENTION.inputs[1:]),
    "option scale is -0.5: expected a positive, finite number": lambda: programs.attention(scale=-0.5),
    "attention has no option 'caussal': expected causal, scale": lambda: ATTENTION.with_options(caussal=True),
    "product has no axis 'depth': expected rows, cols": lambda: product(depth=3),
    "8 heads do not divide over 3 key/value heads": lambda: programs.attention(heads=8, kv_heads=3),
    "6 heads do not divide into 4 groups": lambda: programs.gated_delta(heads=6, groups=4),
    "100 hidden elements do not divide over 8 heads": lambda: transformer_layer(hidden=100, heads=8),
}
PLANS = {
    "expected a Program (call an operator to get one) and a Mesh, not Operator": lambda: Schedule(product, MESH),
    "and a Mesh, not Operator and Mesh": lambda: commir.search(product, MESH),
    "attention has no known schedule 'spiral': expected ring": lambda: commir.known(
        Schedule(ATTENTION, MESH), "spiral"
    ),
    "USP needs 2 mesh axes (q, streamed; heads), not 1 (gpu)": lambda: commir.known(Schedule(ATTENTION, MESH), "USP"),
    "place: the mesh has no axis 'node': expected gpu": lambda: place(Schedule(ATTENTION, MESH), node="q"),
    "place: attention has no loop 'seq': expected batch": lambda: place(Schedule(ATTENTION, MESH), gpu="seq"),
    "unknown primitive 'lower': expected tile": lambda: Schedule(ATTENTION, MESH).apply([("lower",)]),
    "top=0: expected at least 1": lambda: commir.search(ATTENTION, MESH, top=0),
    "memory=-1: every plan of attention": lambda: commir.search(ATTENTION, MESH, memory=-1),
    "expected times of at least 0": lambda: commir.search(ATTENTION, MESH, point_seconds=-1.0),
    "there are no plans to time": lambda: commir.fastest([]),
    "expected a Plan (from Schedule.lower()": lambda: commir.verify(SCHEDULE),
    "product takes a, b, not a": lambda: commir.interpret(SCHEDULE.lower(), {"a": torch.ones(4, 4)}),
    "a has dtype torch.int64: expected": lambda: commir.interpret(
        SCHEDULE.lower(), {"a": torch.ones(4, 4).long(), "b": torch.ones(4)}
    ),
    "b has shape (3,): expected (4,)": lambda: commir.interpret(
        SCHEDULE.lower(), {"a": torch.ones(4, 4), "b": torch.ones(3)}
    ),
    "unshard needs the blocks of 2 ranks, not of 1": lambda: SCHEDULE.lower().unshard([{"c": BLOCK}]),
    "c of rank 1 has shape (3,): expected (2,)": lambda: SCHEDULE.lower().unshard([{"c": BLOCK}, {"c": torch.ones(3)}]),
}
CALLS = MESHES | PROGRAMS | PLANS


@pytest.mark.parametrize("message", CALLS)
def test_the_error_says_what_is_expected(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CALLS[message]()


def test_axes_that_are_called_like_an_argument_of_python():
    """`self` is a name like any other."""
    axis, x, y = Axis("self", 4), Operand("x", ("self",), "self"), Operand("y", ("self",), "self")
    program = Program("copy", (axis,), (x,), (y,), (Result("sum", ("y",)),), "x[self]").resized(self=8)
    plan = place(Schedule(program, Mesh(**{"self": 2})), **{"self": "self"}).lower()
    assert plan.at(self=4).program.axis("self").size == 4


def test_statistics_are_in_float32():
    """lse of a bf16 backward pass is kept in at least fp32."""
    program = programs.attention(1, 2, 2, 8, 4, backward=True, dtype="bfloat16")
    plan = commir.search(program, MESH)[0]
    shapes = {each.name: program.shape(each) for each in plan.inputs()}
    inputs = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=r"lse has dtype torch.bfloat16: expected torch.float32, as \w+ is"):
        commir.interpret(plan, inputs)
    inputs["lse"] = inputs["lse"].float()
    assert {x.dtype for x in commir.interpret(plan, inputs).values()} == {torch.bfloat16}


def test_a_list_of_speeds_that_changes_later():
    """As JSON has it: the same as a tuple, and the mesh stays as it is."""
    speed = [1e-5, 1e9]
    mesh = Mesh(gpu=4, speeds={"gpu": speed})
    speed[1] = 1.0
    assert mesh == Mesh(gpu=4, speeds={"gpu": (1e-5, 1e9)}) == Mesh(gpu=4).with_speeds({"gpu": [1e-5, 1e9]})
