"""Operators of odd sizes on meshes of 1, 3 and 6 ranks, also with a limit of memory. Oracle: torch, in float64."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import commir
from commir import Axis, In, Operand, Out, Program, Result, grid
from commir.execution.state import Count
from commir.ir.monoids import MONOIDS
from commir.ir.program import KERNELS, MONOID_NAMES, TILES
from commir.programs.tiles import _TILES
from loop_programs import assert_close, mesh_of, random_inputs


@commir.operator
def chain(rows=6, left=12, right=18, cols=6):
    """A product of three matrices, which are kept along different axes."""
    a = In[rows, left]
    b = In[left, right].home(right)
    d = In[right, cols]
    c = Out[rows, cols].home(cols)
    for rows, left, right, cols in grid("srrs"):
        c[rows, cols] += a[rows, left] * b[left, right] * d[right, cols]


@commir.operator
def batched(batch=6, rows=12, inner=18, cols=6):
    a = In[batch, rows, inner].home(rows)
    b = In[batch, inner, cols].home(None)
    c = Out[batch, rows, cols].home(None)
    for batch, rows, inner, cols in grid("ssrs"):
        c[batch, rows, cols] += a[batch, rows, inner] * b[batch, inner, cols]


@commir.operator
def largest(rows=12, cols=18):
    x = In[rows, cols].home(cols)
    y = Out[()].home(None)
    for rows, cols in grid("rr"):
        y[()] = max(y[()], torch.abs(x[rows, cols]))


@commir.operator
def highest_column(rows=6, cols=12, times=18):
    x = In[rows, cols, times].home(cols)
    y = Out[times]
    for rows, cols, times in grid("rrs"):
        y[times] = max(y[times], x[rows, cols, times])


@commir.operator
def logarithms(rows=6, cols=12):
    x = In[rows, cols].home(cols)
    y = Out[rows].home(None)
    for rows, cols in grid("sr"):
        y[rows] += torch.log(x[rows, cols]) - torch.sqrt(x[rows, cols])


@commir.operator
def scaled(rows=6, inner=12, cols=6):
    """Numbers stand beside operands in the product."""
    a = In[rows, inner]
    b = In[inner, cols]
    c = Out[rows, cols]
    for rows, inner, cols in grid("srs"):
        c[rows, cols] += -0.5 * a[rows, inner] * (2 * b[inner, cols])


@commir.operator
def gated(rows=12, cols=12):
    x = In[rows, cols].home(cols)
    gate = In[cols].home(None)
    y = Out[rows].home(None)
    for rows, cols in grid("sr"):
        y[rows] += x[rows, cols] / (1.0 + torch.exp(-gate[cols]))


EXPECTED = {  # whose axes divide over 6 ranks
    chain: lambda a, b, d: {"c": a @ b @ d},
    batched: lambda a, b: {"c": a @ b},
    largest: lambda x: {"y": x.abs().amax()},
    highest_column: lambda x: {"y": x.amax((0, 1))},
    gated: lambda x, gate: {"y": (x * gate.sigmoid()).sum(1)},
    logarithms: lambda x: {"y": (x.log() - x.sqrt()).sum(1)},
    scaled: lambda a, b: {"c": -a @ b},
}


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 3), (2, 3), pytest.param((6,), marks=pytest.mark.full)])
@pytest.mark.parametrize("operator", EXPECTED, ids=lambda operator: operator.name)
def test_searched_plans_of_odd_meshes_keep_their_memory(operator, sizes):
    """Also with limits, down to what no plan keeps."""
    program, mesh = operator(dtype="float64"), mesh_of(*sizes)
    inputs = random_inputs(program)
    if operator is logarithms:  # `verify` does the same
        inputs = {"x": inputs["x"].abs() + 0.5}
    expected = EXPECTED[operator](*inputs.values())
    found = [(plan, None) for plan in commir.search(program, mesh)]
    least = min(plan.memory for plan, _ in found)
    found += [(plan, least) for plan in commir.search(program, mesh, memory=least, top=2)]
    for limit in (least - 8, least * 3 // 4):
        with contextlib.suppress(ValueError):  # no plan holds so little
            found += [(plan, limit) for plan in commir.search(program, mesh, memory=limit, top=2)]
    for plan, limit in found:
        counts = []
        assert_close(commir.interpret(plan, inputs, counts), expected)
        assert {count.peak for count in counts} == {plan.memory}
        assert limit is None or plan.memory <= limit
        commir.verify(plan)


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_ranks_keep_a_limit_of_memory(ranks, world, dtype):
    program = batched(dtype=dtype)
    inputs = {name: x.to(getattr(torch, dtype)) for name, x in random_inputs(program).items()}
    mesh = commir.Mesh(x=world)
    limit = commir.pareto(program, mesh)[-1].memory
    found = commir.search(program, mesh, memory=limit)
    assert all(plan.schedule.chunked for plan in found)
    expected = inputs["a"].double() @ inputs["b"].double()

    def run(rank):
        results = []
        for plan in found:
            count = Count()
            outputs = commir.execute(plan, plan.shard(inputs, rank), dist.group.WORLD, count)
            results.append((outputs, count.peak))
        return results

    for number, each in enumerate(zip(*ranks(run, world), strict=True)):
        assert all(peak == found[number].memory <= limit for _, peak in each)
        whole = found[number].unshard([outputs for outputs, _ in each])
        assert_close({"c": whole["c"].double()}, {"c": expected}, 1e-13 if dtype == "float64" else 1e-2)


def test_what_an_expression_cannot_be():
    """Several outputs; and a program's reductions are those of the monoids, its tiles those that there are."""
    a = Operand("a", ("i", "j"), "i")
    outputs = tuple(Operand(name, ("i",), "i") for name in "st")
    results = Result("sum", ("s",)), Result("max", ("t",))
    with pytest.raises(ValueError, match="two: the tile .* is an expression, which computes one output, not s, t"):
        Program("two", (Axis("i", 8), Axis("j", 8, "r")), (a,), outputs, results, "a[i, j]")
    with pytest.raises(ValueError, match="s: unknown reduction 'product': expected sum, max, softmax"):
        Result("product", ("s",))
    assert tuple(MONOIDS) == MONOID_NAMES
    assert {name for name, _ in _TILES} == set(TILES)
    assert {name for name in TILES if _TILES[name, "library"] is not _TILES[name, "reference"]} == set(KERNELS)


def row_sum(tile="a[i, j]", kinds="sr", monoid="sum", **operands):
    """c[i] += a[i, j], with something changed."""
    axes = tuple(Axis(name, 8, kind) for name, kind in zip("ij", kinds, strict=True))
    a, c = operands.get("a", Operand("a", ("i", "j"), "i")), Operand("c", ("i",), "i")
    return Program("row_sum", axes, (a,), (c,), (Result(monoid, ("c",)),), tile, dtype="float64")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(tile="a[j, i]"), r"a\[j, i\] must be indexed as declared: i, j"),
        (dict(tile="a[i]"), r"a\[i\] must be indexed as declared: i, j"),
        (dict(tile="a[i, i]"), r"a\[i, i\] names an axis twice"),
        (dict(tile="a[i, k]"), "unknown axis k: expected i, j"),
        (dict(tile="a[i, j + 1]"), r"j \+ 1 is not an axis: expected i, j"),
        (dict(tile="a[i,j]*"), r"the tile 'a\[i,j\]\*' is neither attention, .*: no expression: invalid syntax"),
        (
            dict(tile="foo"),
            "the tile 'foo' is neither attention, .*: foo is neither an operand with its axes, a number",
        ),
        (dict(tile="("), "no expression: "),
        (dict(tile=""), "no expression: "),
        (dict(tile="a[i,j]*zz[i]"), "zz is not declared as an input"),
        (dict(tile="a[i, j] * c[i]"), "c is an output, and cannot be read"),
        (dict(monoid="softmax"), "softmax combines two outputs, a mean and the log of its weights' sum, not c"),
        (dict(kinds="ss"), "row_sum: data race: j is spatial, but c is not indexed by it"),
        (dict(kinds="rr"), r'row_sum: i is reduced, but indexes c; make it spatial \("s"\)'),
        (dict(kinds="sc"), "row_sum: j is scanned, but no scan passes a state along it"),
        (
            dict(a=Operand("a", ("i", "j"), "i", (("j", 2),))),
            "row_sum: the input a of an expression must have no groups",
        ),
    ],
)
def test_a_program_is_what_an_operator_can_be(change, message):
    """Also if it is written without one, or read from a plan's JSON."""
    with pytest.raises(ValueError, match=message) as caught:
        row_sum(**change)
    assert "\n" not in str(caught.value)


def test_a_plan_whose_tile_has_other_indices_is_refused():
    text = commir.search(row_sum(), commir.Mesh(g=2))[0].to_json()
    with pytest.raises(ValueError, match=r"a\[j, i\] must be indexed as declared: i, j"):
        commir.Plan.from_json(text.replace("a[i, j]", "a[j, i]"))


@pytest.mark.parametrize("tile", ["a[i, j]", "exp(a[i, j])"])
def test_an_expression_may_have_an_axis_that_is_whole(tile):
    (plan, *_) = commir.search(row_sum(tile, kinds="sw"), commir.Mesh(g=2))
    commir.verify(plan)
    a = torch.ones(8, 8, dtype=torch.float64)
    assert_close(commir.interpret(plan, {"a": a}), {"c": (a.exp() if "exp" in tile else a).sum(1)})
