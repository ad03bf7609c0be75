"""Meshes and programs that are refused. Oracle: the text of the errors."""

from dataclasses import replace

import pytest
import torch

import commir
from commir import Mesh, Schedule, place, programs
from commir.ir.mesh import MeshAxis
from commir.ir.program import Axis, Operand, Program, Result
from commir.lowering.plan import Plan


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Mesh(gpu=4).split("gpu", a=-2, b=-2), "mesh axis a has size -2"),
        (lambda: Mesh(gpu=1).split("gpu"), "mesh axis gpu needs parts"),
        (lambda: Mesh(gpu=4).split("gpu", a=2, b=3), r"mesh axis gpu of 4 ranks is not 2 \* 3 = 6"),
        (lambda: Mesh(node=2, gpu=4).split("gpu", node=4), "the mesh has an axis 'node' already"),
        (lambda: Mesh(**{"a b": 2}), "'a b' is no name for a mesh axis"),
        (lambda: Mesh(gpu=True), "mesh axis gpu has size True"),
        (
            lambda: Mesh(gpu=2, speeds={"gpu": (0, 1e-320)}),
            "speed of mesh axis gpu is .0, 1e-320.; .* at least 1 byte per",
        ),
        (lambda: Mesh(gpu=2, speeds={"gpu": (1e300, 1e9)}), r"speed of mesh axis gpu is \(1e.300.*0 to 1e.09 seconds"),
        (lambda: Mesh.of_axes([]), "a mesh needs axes with different names, not none"),
        (lambda: Mesh.of_axes([MeshAxis("a", 2, "x"), MeshAxis("a", 2, "y")]), "with different names, not a, a"),
        (lambda: Mesh.of_axes([MeshAxis(a, 2, level) for a, level in ("ax", "by", "cx")]), "must be neighbours"),
    ],
)
def test_meshes_that_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def program(a=None, c="c", outputs=("c",), kinds="s", tile="a[rows]", **others):
    """c[rows] = a[rows], with something changed."""
    a, c = a or Operand("a", ("rows",), "rows"), Operand(c, ("rows",))
    return Program("copy", (Axis("rows", 4, kinds),), (a,), (c,), (Result("sum", outputs),), tile, **others)


def changed_scale(scale):
    """The text of a plan of attention whose scale was changed."""
    text = place(Schedule(programs.attention(head_dim=4), Mesh(gpu=1)), gpu="q").lower().to_json()
    return text.replace('"scale":0.5', f'"scale":{scale}')


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
        (lambda: programs.attention(scale=-0.5), "attention: option scale is -0.5; it must be a positive and finite"),
        (
            lambda: programs.attention(causal=False, backward=True, scale=0),
            "option scale is 0.0; it must be a positive",
        ),
        (
            lambda: programs.attention(scale=1e-46),
            "option scale is 1e-46; it must be a positive and finite number of fl",
        ),
        (
            lambda: programs.attention(scale=1e39),
            r"option scale is 1e\+39; it must be a positive and finite number of f",
        ),
        (lambda: programs.attention().with_options(scale="x"), "attention: option scale is 'x'; it must be a positive"),
        (lambda: programs.attention().with_options(causal="yes"), "option causal is 'yes'; it must be True or False"),
        (lambda: Plan.from_json(changed_scale(-0.5)), "attention: option scale is -0.5; it must be a positive"),
        (
            lambda: replace(programs.attention(), inputs=programs.attention().inputs[1:]),
            "attention: the tile attention has the inputs q, k, v, not k, v",
        ),
        (lambda: replace(programs.selective_scan(), options=(("a", 1),)), "selective_scan has the options none, not a"),
        (
            lambda: programs.gated_delta().resized(key_dim=64),
            "scan of gated_delta has no rates, so map must be square, not of key_dim 64, entering_dim 128",
        ),
        (lambda: programs.gated_delta(heads=6, groups=4), "6 heads do not divide into 4 groups"),
        (lambda: program(kinds="w"), "operand a is kept along rows, which is whole in every tile"),
        (lambda: replace(program(), inputs=(), tile="1.0"), "copy needs at least one input that its caller gives"),
        (lambda: replace(programs.attention(), outputs=(), results=()), "attention needs at least one output"),
        (lambda: Operand("c", ("rows", "rows")), "operand c has an axis twice: rows, rows"),
        (lambda: program(tile=f"a[rows] * {10**400}"), "a number of 2.127 or more is too large"),
        (lambda: program(tile="a[rows] * 1e39"), "a number of 2.127 or more is too large"),
        (
            lambda: program(tile="10 * 1e38 * a[rows]"),
            r"10 \* 1e.38: its numbers multiply to 1e.39, and a number of 2.127",
        ),
        (
            lambda: program(tile="-1e30 * a[rows] * (a[rows] * 1e30)"),
            r"its numbers multiply to -1e.60, and a number of 2",
        ),
        (
            lambda: program(tile="10 * 1e38 * a[rows] + a[rows]"),
            r"10 \* 1e.38: its numbers multiply to 1e.39, and a numb",
        ),
        (lambda: program(tile="exp(10 * (a[rows] * -1e38))"), r"its numbers multiply to -1e.39, and a number of 2.127"),
        (lambda: programs.attention(scale=10**400), "attention: option scale is 10+; it must be a positive and finite"),
        (lambda: programs.attention(scale=3.4028236e38), "it must be a positive and finite number of float32"),
        (lambda: Axis("rows", 2**63), "axis rows has size 9223372036854775808; it must be a whole number"),
        (
            lambda: program(a=Operand("a", ("rows",), is_wide=True), dtype="bfloat16"),
            r"copy: its dtype is bfloat16, but all inputs \(a\) are wide, and so at least float32: make it float32",
        ),
    ],
)
def test_programs_that_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_axes_that_are_called_like_an_argument_of_python():
    """`self` is a name like any other."""
    axis, x, y = Axis("self", 4), Operand("x", ("self",), "self"), Operand("y", ("self",), "self")
    copy = Program("copy", (axis,), (x,), (y,), (Result("sum", ("y",)),), "x[self]").resized(self=8)
    plan = place(Schedule(copy, Mesh(**{"self": 2})), **{"self": "self"}).lower()
    assert plan.at(self=4).program.axis("self").size == 4


def test_the_smallest_scale_of_causal_attention():
    """Every output is the mean of the values up to it, as all scores are about 0, and hidden keys stay hidden."""
    program = programs.attention(1, 2, 2, 8, 4, scale=2.0**-126)
    inputs = {name: torch.randn(1, 8, 2, 4) for name in "qkv"}
    found = commir.interpret(commir.search(program, Mesh(gpu=2))[0], inputs)["out"]
    means = inputs["v"].cumsum(1) / torch.arange(1, 9).reshape(1, 8, 1, 1)
    torch.testing.assert_close(found, means)
