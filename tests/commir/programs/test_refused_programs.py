"""Meshes and programs that are refused. Oracle: the text of the errors."""

import pytest

from commir import Mesh, programs
from commir.ir.mesh import MeshAxis
from commir.ir.program import Axis, Operand, Program, Result


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Mesh(gpu=4).split("gpu", a=-2, b=-2), "mesh axis a has size -2"),
        (lambda: Mesh(gpu=1).split("gpu"), "mesh axis gpu needs parts"),
        (lambda: Mesh(gpu=4).split("gpu", a=2, b=3), r"mesh axis gpu of 4 ranks is not 2 \* 3 = 6"),
        (lambda: Mesh(node=2, gpu=4).split("gpu", node=4), "the mesh has an axis 'node' already"),
        (lambda: Mesh(**{"a b": 2}), "'a b' is no name for a mesh axis"),
        (lambda: Mesh(gpu=True), "mesh axis gpu has size True"),
        (lambda: Mesh.of_axes([]), "a mesh needs axes with different names, not none"),
        (lambda: Mesh.of_axes([MeshAxis("a", 2, "x"), MeshAxis("a", 2, "y")]), "with different names, not a, a"),
        (lambda: Mesh.of_axes([MeshAxis(a, 2, level) for a, level in ("ax", "by", "cx")]), "must be neighbours"),
    ],
)
def test_meshes_that_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def program(a=None, c="c", outputs=("c",), **others):
    """c[rows] = a[rows], with something changed."""
    a, c = a or Operand("a", ("rows",)), Operand(c, ("rows",))
    return Program("copy", (Axis("rows", 4),), (a,), (c,), (Result("sum", outputs),), "a[rows]", **others)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Axis(None, 4), "None is no name for an axis"),
        (lambda: Axis("rows", True), "axis rows has size True"),
        (lambda: Operand("a b", ("rows",)), "'a b' is no name for an operand"),
        (lambda: Operand("a", ("rows",), groups=(("rows", 0),)), "operand a has groups of 0 along rows"),
        (lambda: Operand("a", ("rows",), groups=(("cols", 2),)), "operand a has groups along cols"),
        (lambda: program(a=Operand("a", ("rows",), source=("z",))), "operand a is derived from z"),
        (lambda: program(c="a", outputs=("a",)), "two operands are called a"),
        (lambda: program(outputs=("c", "d")), "a result of copy names d, which is no output"),
        (lambda: program(options=(("causal", [1]),)), r"option causal is \[1\]"),
        (lambda: program(options=(("causal", 1), ("causal", 2))), "two options are called causal"),
        (
            lambda: program(options=(("scale", float("nan")),)),
            "option scale is nan; it must be a finite number, a string",
        ),
        (lambda: programs.attention(scale=float("inf")), "option scale is inf; it must be a finite number"),
        (
            lambda: programs.attention().with_options(scale=-float("inf")),
            "option scale is -inf; it must be a finite number",
        ),
    ],
)
def test_programs_that_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
