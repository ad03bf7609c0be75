"""Operators that are read from Python functions. Oracle: torch, in float64."""

from dataclasses import replace

import pytest
import torch

import commir
from commir import In, Out, grid
from commir.programs.operators import LoopNestError
from loop_programs import assert_close, mesh_of, plans, random_inputs


@commir.operator
def scores(rows=12, cols=8, inner=4):
    """exp of scaled sums, one after the other."""
    a = In[rows, inner].home(rows)
    b = In[cols, inner]
    c = Out[rows, cols]
    for rows, cols, inner in grid("ssr"):
        c[rows, cols] += a[rows, inner] * b[cols, inner]


@commir.operator
def distance(points=12, centres=8):
    x = In[points]
    y = In[centres].home(None)
    least = Out[points]
    for points, centres in grid("sr"):
        least[points] = max(least[points], -abs(x[points] - 2 * y[centres]))


@commir.operator
def activated(rows=12, cols=8):
    x = In[rows, cols]
    bias = In[cols].home(cols)
    y = Out[cols, rows].home(rows)
    for rows, cols in grid("ss"):
        y[cols, rows] = torch.exp(x[rows, cols] / 4) + torch.sigmoid(bias[cols])


@commir.operator
def counted(rows=12, cols=8, times=4):
    x = In[rows]
    y = Out[rows, cols]
    for rows, cols, times in grid("ssr"):  # noqa: B007
        y[rows, cols] += x[rows]


EXPECTED = {
    scores: lambda a, b: {"c": a @ b.T},
    distance: lambda x, y: {"least": -(x[:, None] - 2 * y).abs().amin(1)},
    activated: lambda x, bias: {"y": ((x / 4).exp() + bias.sigmoid()).T},
    counted: lambda x: {"y": 4 * x[:, None].expand(-1, 8)},
}


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
@pytest.mark.parametrize("operator", EXPECTED, ids=lambda operator: operator.name)
def test_every_plan_computes_the_operator(operator, sizes):
    program = operator(dtype="float64")
    inputs = random_inputs(program)
    expected = EXPECTED[operator](*inputs.values())
    found = plans(program, mesh_of(*sizes))
    assert found
    for plan in found:
        assert_close(commir.interpret(plan, inputs), expected)
        commir.verify(plan)
        assert commir.Plan.from_json(plan.to_json()) == plan


def test_sizes_of_a_call():
    assert [axis.size for axis in scores(rows=100, inner=3).axes] == [100, 8, 3]
    with pytest.raises(ValueError, match="scores has no axis 'depth'; it has rows, cols, inner"):
        scores(depth=3)


def race_on_spatial(rows=4, cols=4):
    a = In[rows, cols]
    c = Out[rows]
    for rows, cols in grid("ss"):
        c[rows] += a[rows, cols]


def race_by_overwriting(rows=4, cols=4):
    a = In[rows, cols]
    c = Out[rows]
    for rows, cols in grid("sr"):
        c[rows] = a[rows, cols]


def not_associative(rows=4, cols=4):
    a = In[rows, cols]
    c = Out[rows]
    for rows, cols in grid("sr"):
        c[rows] -= a[rows, cols]


def shifted_index(rows=4, cols=4):
    a = In[rows, cols]
    c = Out[rows]
    for rows, cols in grid("sr"):
        c[rows] += a[rows, cols + 1]


def unknown_function(rows=4):
    a = In[rows]
    c = Out[rows]
    for rows in grid("s"):
        c[rows] = open(a[rows])


def kept_elsewhere(rows=4, cols=4):
    a = In[rows].home(cols)
    c = Out[rows]
    for rows, cols in grid("sr"):  # noqa: B007
        c[rows] += a[rows]


def undeclared(rows=4):
    c = Out[rows]
    for rows in grid("s"):
        c[rows] = a[rows]  # noqa: F821


def reads_the_output(rows=4, cols=4):
    a = In[rows, cols]
    c = Out[rows]
    for rows, cols in grid("sr"):
        c[rows] += a[rows, cols] * c[rows]


def no_size(rows):
    for rows in grid("s"):  # noqa: B007
        pass


def wrong_kinds(rows=4, cols=4):
    a = In[rows, cols]
    c = Out[rows]
    for rows, cols in grid("s"):
        c[rows] += a[rows, cols]


def two_statements(rows=4):
    a = In[rows]
    c = Out[rows]
    for rows in grid("s"):
        c[rows] = a[rows]
        c[rows] += a[rows]


@pytest.mark.parametrize(
    "function, line, message",
    [
        (race_on_spatial, 4, "data race: cols is spatial, but c is not indexed by it"),
        (race_by_overwriting, 4, "data race: = overwrites c for every index of the reduced axis cols"),
        (not_associative, 4, "Sub is no associative and commutative reduction"),
        (shifted_index, 4, "cols [+] 1 is no axis"),
        (unknown_function, 4, "the functions of one argument are exp"),
        (kept_elsewhere, 1, "a is kept along cols, which is none of its axes rows"),
        (undeclared, 3, "a is not declared as In"),
        (reads_the_output, 4, "c is an output, and cannot be read"),
        (no_size, 0, "every parameter is an axis and needs its size"),
        (wrong_kinds, 3, 'grid[(]"s"[)] has 1 kinds for 2 axes'),
        (two_statements, 5, "the loop must have one statement"),
    ],
)
def test_errors_point_at_the_line(function, line, message):
    number = function.__code__.co_firstlineno + line
    with pytest.raises(LoopNestError, match=f"test_operators.py:{number}: .*{message}"):
        commir.operator(function)


def test_an_expression_runs_nothing_else():
    program = scores(dtype="float64")
    wrong = replace(program, tile="load(a[rows, inner])")
    plan = plans(wrong, mesh_of(2))[0]
    with pytest.raises(ValueError, match="is no expression of operands"):
        commir.interpret(plan, random_inputs(wrong))


def test_a_decorated_function_is_not_called():
    for declare in (grid, In.home):
        with pytest.raises(RuntimeError, match="is read, not called"):
            declare("s")
