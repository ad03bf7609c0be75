"""Operators that are read from Python functions. Oracle: torch, in float64."""

from dataclasses import replace

import pytest
import torch

import commir
from commir import In, Out, grid
from commir.programs.operators import LoopNestError
from commir.programs.tiles import tile_of
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


@commir.operator
def total(cols=8):
    x = In[cols]
    y = Out[()].home(None)
    for cols in grid("r"):
        y[()] += x[cols]


EXPECTED = {
    scores: lambda a, b: {"c": a @ b.T},
    distance: lambda x, y: {"least": -(x[:, None] - 2 * y).abs().amin(1)},
    activated: lambda x, bias: {"y": ((x / 4).exp() + bias.sigmoid()).T},
    counted: lambda x: {"y": 4 * x[:, None].expand(-1, 8)},
    total: lambda x: {"y": x.sum()},
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
    with pytest.raises(ValueError, match="scores has no axis 'depth': expected rows, cols, inner"):
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


def called_dtype(rows=4, dtype=4): ...
def called_self(self=4): ...
def size_of_true(rows=True): ...


def decaying_sum(rows=4, cols=4):
    a = In[rows, cols]
    c = Out[rows]
    for rows, cols in grid("sr"):
        c[rows] = 0.5 * c[rows] + a[rows, cols]


def sum_by_assignment(rows=4, cols=4):
    a = In[rows, cols]
    c = Out[rows]
    for rows, cols in grid("sr"):
        c[rows] = c[rows] + a[rows, cols]


def declared_by_attribute(rows=4):
    a = commir.In[rows]
    return a


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


def loop_with_else(rows=4):
    for rows in grid("s"):  # noqa: B007
        pass
    else:
        pass


def keyword_of_a_function(rows=4):
    a = In[rows]
    c = Out[rows]
    for rows in grid("s"):
        c[rows] = torch.exp(a[rows], out=a[rows])


def product_of_all(rows=4, cols=4):
    a = In[rows, cols]
    c = Out[rows]
    for rows, cols in grid("sr"):
        c[rows] *= a[rows, cols]


def least_of_all(rows=4, cols=4):
    a = In[rows, cols]
    c = Out[rows]
    for rows, cols in grid("sr"):
        c[rows] = min(c[rows], a[rows, cols])


def keyword_of_max(rows=4, cols=4):
    a = In[rows, cols]
    c = Out[rows]
    for rows, cols in grid("sr"):
        c[rows] = max(c[rows], a[rows, cols], key=abs)


def keyword_of_grid(rows=4):
    for rows in grid("s", order="zigzag"):  # noqa: B007
        pass


def more_keywords(rows=4, **options): ...
def more_positions(rows=4, *sizes): ...
def keyword_only(rows=4, *, cols=4): ...
def positional_only(rows, /, cols=4): ...
def no_loop(rows=4): ...
async def asynchronous(rows=4): ...


def no_inputs(rows=4):
    c = Out[rows]
    for rows in grid("s"):
        c[rows] = 1


def scalar_output(rows=4):
    c = Out[()]
    return c


@pytest.mark.parametrize(
    "function, line, message",
    [
        (race_on_spatial, 4, "data race: cols is spatial, but c is not indexed by it"),
        (race_by_overwriting, 4, "data race: = overwrites c for every index of the reduced axis cols"),
        (not_associative, 4, "c.rows. -= .*: this is not supported; the supported reductions are [+]= and max"),
        (product_of_all, 4, "c.rows. [*]= .*: this is not supported; the supported reductions are [+]= and max"),
        (least_of_all, 4, "min is not supported as a reduction; the supported reductions are [+]= and max"),
        (shifted_index, 4, "cols [+] 1 is not an axis"),
        (unknown_function, 4, "the functions of one argument are exp"),
        (kept_elsewhere, 1, "the home of a is In.rows..home[(]cols[)]: expected .home[(]None[)], or an axis of rows"),
        (called_dtype, 0, "no axis can be called dtype"),
        (called_self, 0, "no axis can be called self"),
        (size_of_true, 0, "axis rows has size True: expected a whole number of at least 1"),
        (
            decaying_sum,
            4,
            "c is computed from its own earlier values, so that the result may depend on the order of the",
        ),
        (
            sum_by_assignment,
            4,
            "may depend on the order of the reduced axis; the supported reductions are [+]= and max",
        ),
        (declared_by_attribute, 1, "name = In.axes. or name = Out.axes., with the bare names In and Out"),
        (undeclared, 3, "a is not declared as an input"),
        (reads_the_output, 4, "c is an output, and cannot be read"),
        (no_size, 0, "every parameter is an axis and needs its size"),
        (wrong_kinds, 3, 'grid[(]"s"[)] needs one letter for each axis, and has 1 for 2'),
        (two_statements, 5, "the loop must have one statement"),
        (loop_with_else, 4, "the loop over grid[(]...[)] must have no else"),
        (keyword_of_a_function, 4, "torch.exp[(]a.rows., out=a.rows.[)]: .*; they take no keywords"),
        (keyword_of_max, 4, "a reduction by max is written c.rows. = max[(]the same, expression[)]"),
        (keyword_of_grid, 1, "a loop is annotated as rows=parallel"),
        (more_keywords, 0, "options is not an axis: expected parameters such as rows=1024"),
        (more_positions, 0, "sizes is not an axis"),
        (keyword_only, 0, "cols is not an axis"),
        (positional_only, 0, "rows is not an axis"),
        (no_loop, 0, "must be followed by one loop over grid[(]...[)], the last statement"),
        (no_inputs, 2, "an operator needs at least one input"),
        (scalar_output, 1, "c has no axis along which it could be kept; declare it with .home[(]None[)]"),
        (asynchronous, 0, "reads a function written with def, not lambda or async def"),
        (lambda rows=4: 0, 0, "reads a function written with def, not lambda or async def"),
    ],
)
def test_errors_point_at_the_line(function, line, message):
    number = function.__code__.co_firstlineno + line
    with pytest.raises(LoopNestError, match=f"test_operators.py:{number}: {function.__name__}: .*{message}") as caught:
        commir.operator(function)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("thing, name", [(len, "len"), (scores, "Operator"), (In, "In"), (3, "int")])
def test_what_is_no_function_is_an_error(thing, name):
    with pytest.raises(LoopNestError, match=f"^{name}: commir.operator reads a function written with def"):
        commir.operator(thing)


def test_a_function_without_source_is_an_error():
    exec("def unseen(rows=4): ...", names := {})
    with pytest.raises(LoopNestError, match="<string>:1: unseen: .* reads the source of a function, and this has none"):
        commir.operator(names["unseen"])


def test_a_function_inside_another_may_have_lines_with_less_indentation():
    @commir.operator
    def doubled(rows=4):
        """A text with \
a line"""
        x = In[rows]
        y = Out[rows]
        for rows in grid("s"):
            y[rows] = 2 * x[rows]

    assert doubled().tile == "2 * x[rows]"


def tile_output(program, *dtypes, device="cpu"):
    """(inputs, output) of a tile that is the whole program, for random inputs with these dtypes."""
    random = random_inputs(program).items()
    inputs = {name: x.to(device, dtype) for (name, x), dtype in zip(random, dtypes, strict=True)}
    indices = {axis.name: torch.arange(axis.size) for axis in program.axes}
    (output,) = tile_of(program)(program, inputs, indices).values()
    return inputs, output


@pytest.mark.parametrize("tile", ["x[rows, cols]", "bias[cols]", "exp(bias[cols])", "-x[rows, cols]"])
def test_an_output_shares_no_memory(tile):
    """Neither with inputs, nor do its elements among them: it is a copy of an input, or repeats values along an axis."""
    inputs, output = tile_output(replace(activated(), tile=tile), torch.float64, torch.float64)
    before, expected = {name: x.clone() for name, x in inputs.items()}, output.clone()
    output[0, 0] = expected[0, 0] = 5
    assert torch.equal(output, expected)
    assert_close(inputs, before, limit=0)


def test_execute_returns_no_view_of_its_inputs():
    inputs = {"x": torch.ones(12, 8), "bias": torch.ones(8)}
    plan = plans(replace(activated(), tile="x[rows, cols]"), mesh_of(1))[0]
    commir.execute(plan, inputs)["y"].zero_()
    assert torch.equal(inputs["x"], torch.ones(12, 8))


@pytest.mark.parametrize("tile, dtype", [("-x[rows, cols]", torch.float32), ("x[rows, cols]", torch.bfloat16)])
def test_new_results_are_not_copied(tile, dtype, monkeypatch):
    """An expression gives a new tensor, and so does the conversion from bfloat16."""
    monkeypatch.setattr(torch.Tensor, "clone", lambda x: pytest.fail("a copy"))
    tile_output(replace(activated(), tile=tile), dtype, dtype)


@commir.operator
def with_numbers(rows=6, cols=5):
    x = In[rows, cols]
    z = In[rows]
    y = Out[rows]
    for rows, cols in grid("sr"):
        y[rows] += 0.1 + torch.exp(1 / 3) * x[rows, cols] / 3 - 0.3 * z[rows] / (7 - x[rows, cols])


@pytest.mark.parametrize("x_dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_numbers_are_like_those_of_python(x_dtype, z_dtype):
    """A number takes the dtype of the operand beside it; expressions of numbers alone have the widest dtype."""
    inputs, output = tile_output(with_numbers(), x_dtype, z_dtype)
    x, z = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in inputs.values())
    factor = torch.exp(torch.ones((), dtype=torch.promote_types(x.dtype, z.dtype)) / 3)
    assert torch.equal(output, (0.1 + factor * x / 3 - 0.3 * z[:, None] / (7 - x)).sum(1))


def test_numbers_are_on_the_device_of_the_inputs():
    _, output = tile_output(with_numbers(), torch.float32, torch.float32, device="meta")
    assert output.device.type == "meta" and output.shape == (6,)


@pytest.mark.parametrize(
    "text", ["load(a[rows, inner])", "exp(a[rows, inner], out=b[cols, inner])", "exp()", "~a[rows, inner]", "'1'"]
)
def test_an_expression_runs_nothing_else(text):
    with pytest.raises(ValueError, match="they take no keywords|is neither an operand with its axes, a number"):
        replace(scores(), tile=text)


def test_a_decorated_function_is_not_called():
    for declare in (grid, In.home):
        with pytest.raises(RuntimeError, match="is read, not called"):
            declare("s")
