"""Operators written as loop nests in Python (paper, section 7.1): `@commir.operator` reads a function and never calls it."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

from commir.ir.expression_syntax import ExpressionError, axis_error, indices_of, read_expression
from commir.ir.program import REDUCED, SPATIAL, Axis, Operand, Program, Result

RESERVED = ("self", "dtype")  # parameters of `Operator.__call__` that are not axes
NOT_CALLED = "a function decorated with commir.operator is read, not called"
REDUCTIONS = "the supported reductions are += and max"


class LoopNestError(ValueError):
    """A function is no loop nest. The message has the file, the line, the function and the rule."""


class In:
    """An input over axes: `a = In[rows, cols]`, or `a = In[rows, cols].home(cols)`."""

    def __class_getitem__(cls, axes: Any) -> "type[In]":
        return cls

    @staticmethod
    def home(axis: Any) -> NoReturn:
        """Name the axis along which the operand is kept, or None; see `operator`."""
        raise RuntimeError(NOT_CALLED)

    @staticmethod
    def replicate(*mesh_axes: str) -> "type[In]":
        """Keep the operand whole on all ranks along some mesh axes; see `operator`."""
        raise RuntimeError(NOT_CALLED)


class Out(In):
    """An output over axes: `c = Out[rows]`."""


def grid(kinds: str, /, **placements: object) -> NoReturn:
    """The loops over all axes, and which mesh axes divide them; see `operator`."""
    raise RuntimeError(NOT_CALLED)


def parallel(*mesh_axes: str) -> NoReturn:
    """Divide a loop over the ranks along some mesh axes, outermost first; see `operator`."""
    raise RuntimeError(NOT_CALLED)


def shift(*mesh_axes: str) -> NoReturn:
    """Run a loop shifted along some mesh axes, so that blocks travel in rings; see `operator`."""
    raise RuntimeError(NOT_CALLED)


@dataclass(frozen=True)
class Operator:
    """A loop nest without sizes; calling it gives a `Program`.

    Attributes:
        sizes: the defaults of its axes.
        placements: (mesh axis, the loop that its ranks divide, the loop that is shifted or "").
        replicated: (operand, mesh axis) of the operands that the ranks along a mesh axis have whole.
    """

    name: str
    sizes: tuple[tuple[str, int], ...]
    kinds: tuple[tuple[str, str], ...]
    inputs: tuple[Operand, ...]
    output: Operand
    monoid: str
    tile: str
    placements: tuple[tuple[str, str, str], ...] = ()
    replicated: tuple[tuple[str, str], ...] = ()

    def __call__(self, dtype: str = "float32", **sizes: int) -> Program:
        """The program with these sizes of its axes. Raises ValueError for an unknown axis or a size below 1."""
        known = dict(self.sizes)
        if unknown := [name for name in sizes if name not in known]:
            raise ValueError(f"{self.name} has no axis {unknown[0]!r}: expected {', '.join(known)}")
        axes = tuple(Axis(name, (known | sizes)[name], kind) for name, kind in self.kinds)
        result = Result(self.monoid, (self.output.name,))
        return Program(self.name, axes, self.inputs, (self.output,), (result,), self.tile, (), dtype)


def operator(function: Callable[..., Any]) -> Operator:
    """Read a function as a loop nest.

    For example, with one input that every rank has whole:

        @commir.operator
        def weighted_sum(rows=1024, cols=4096):
            a = In[rows, cols]
            b = In[cols].home(None)
            c = Out[rows]
            for rows, cols in grid("sr"):
                c[rows] += a[rows, cols] * b[cols]

    Parameters are axes and their sizes. Assignments declare operands over axes. `home` names the axis along which an operand
    is kept sharded over all ranks: the first one, unless it says otherwise; `home(None)` keeps it whole on every rank.

    The loop over `grid` names all axes, with their kinds: "s" is spatial, "r" reduced. Its one statement is
    `out[...] += expression`, `out[...] = expression` without reduced axes, or `out[...] = max(out[...], expression)`.
    Expressions are made of operands, numbers, + - * /, and `torch.exp`, `log`, `sqrt`, `tanh`, `sigmoid`, `relu`, `abs`,
    `sin` and `cos`. An expression that is no product is computed for all points of a tile before it is summed.

    Annotations say where the operator runs, for `Schedule.of`. With `grid("sr", rows=parallel("gpu"), cols=shift("gpu"))`,
    the ranks along the mesh axis `gpu` divide rows, and each runs over cols from its own block on. With
    `In[cols].replicate("node")`, all ranks along the mesh axis `node` have the whole operand.

    Raises:
        LoopNestError: the function is no loop nest; the message points at the line.
    """
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        name = getattr(function, "__name__", type(function).__name__)
        raise LoopNestError(f"{name}: commir.operator reads a function written with def")
    code = function.__code__
    node = _syntax_tree(function, f"{code.co_filename}:{code.co_firstlineno}: {code.co_name}")
    return _Reader(code.co_filename, code.co_firstlineno, node).read()


def _syntax_tree(function: FunctionType, where: str) -> ast.FunctionDef:
    """Parse the source of a function. `where` is its file, line and name, for errors."""
    node: ast.stmt | None = None
    try:
        lines, _ = inspect.getsourcelines(function)
        indent = lines[0][: -len(lines[0].lstrip())]
        node = ast.parse("".join(line.removeprefix(indent) for line in lines)).body[0]
    except OSError:
        raise LoopNestError(f"{where}: commir.operator reads the source of a function, and this has none") from None
    except SyntaxError:  # the lines of a lambda may be only a part of a statement
        pass
    if not isinstance(node, ast.FunctionDef) or node.name != function.__code__.co_name:
        raise LoopNestError(f"{where}: commir.operator reads a function written with def, not lambda or async def")
    return node


class _Reader:
    """Reads the syntax tree of one function."""

    def __init__(self, file: str, first: int, node: ast.FunctionDef) -> None:
        self._file, self._first, self._node = file, first, node
        self._sizes = self._axis_sizes()
        self._inputs: dict[str, Operand] = {}
        self._outputs: dict[str, Operand] = {}
        self._replicated: list[tuple[str, str]] = []

    def read(self) -> Operator:
        """The operator."""
        try:
            return self._operator()
        except ExpressionError as error:
            self._fail(error.node, str(error))

    def _operator(self) -> Operator:
        loop = self._loop()
        kinds, placements = self._grid(loop), self._placements(loop)
        output, monoid, value = self._statement(loop, kinds)
        axes = {name: each.axes for name, each in self._inputs.items()}
        expression = read_expression(value, axes, self._outputs, self._sizes)
        if not self._inputs:
            self._fail(loop, "an operator needs at least one input, such as x = In[axes]")
        read = [ast.unparse(part.value) for part in ast.walk(expression) if isinstance(part, ast.Subscript)]
        if unread := [name for name in self._inputs if name not in read]:
            self._fail(loop, f"the input {unread[0]} is never read")
        sizes, inputs = tuple(self._sizes.items()), tuple(self._inputs.values())
        return Operator(
            self._node.name, sizes, tuple(kinds.items()), inputs, output, monoid, ast.unparse(expression),
            placements, tuple(self._replicated),
        )  # fmt: skip

    def _fail(self, node: ast.AST, rule: str) -> NoReturn:
        line = self._first + getattr(node, "lineno", 1) - 1
        raise LoopNestError(f"{self._file}:{line}: {self._node.name}: {rule}")

    def _axis_sizes(self) -> dict[str, int]:
        arguments = self._node.args
        others = *arguments.posonlyargs, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg
        for other in filter(None, others):
            self._fail(other, f"{other.arg} is not an axis: expected parameters such as rows=1024, without /, * and **")
        if len(arguments.defaults) != len(arguments.args) or not arguments.args:
            self._fail(self._node, "every parameter is an axis and needs its size as default, such as rows=1024")
        sizes: dict[str, int] = {}
        for argument, default in zip(arguments.args, arguments.defaults, strict=True):
            name = argument.arg
            if name in RESERVED:
                self._fail(argument, f"no axis can be called {name}, which a call of the operator means otherwise")
            if not (isinstance(default, ast.Constant) and type(default.value) is int and default.value >= 1):
                given = ast.unparse(default)
                self._fail(default, f"axis {name} has size {given}: expected a whole number of at least 1")
            sizes[name] = default.value
        return sizes

    def _loop(self) -> ast.For:
        """Read the declarations of operands; return the loop that follows them."""
        texts = [
            each for each in self._node.body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        ]
        *declarations, loop = [each for each in self._node.body if each not in texts] or [self._node]
        rule = "the operands must be followed by one loop over grid(...), the last statement"
        for statement in declarations:
            if not isinstance(statement, ast.Assign):
                self._fail(statement, rule)
            self._declare(statement)
        if not isinstance(loop, ast.For):
            self._fail(loop, rule)
        if loop.orelse:
            self._fail(loop.orelse[0], "the loop over grid(...) must have no else")
        return loop

    def _declare(self, node: ast.Assign) -> None:
        kind: ast.expr = node.value
        calls: dict[str, ast.Call] = {}
        while isinstance(kind, ast.Call) and isinstance(kind.func, ast.Attribute) and kind.func.attr not in calls:
            calls[kind.func.attr], kind = kind, kind.func.value
        (target, *others), where = node.targets, {"In": self._inputs, "Out": self._outputs}
        is_declared = isinstance(target, ast.Name) and isinstance(kind, ast.Subscript) and not others
        is_declared &= calls.keys() <= {"home", "replicate"}
        if not is_declared or ast.unparse(kind.value) not in where:  # type: ignore[attr-defined]
            rule = "an operand is declared as name = In[axes] or name = Out[axes], with the bare names In and Out"
            self._fail(node, rule)
        assert isinstance(target, ast.Name) and isinstance(kind, ast.Subscript)
        name, axes = target.id, indices_of(kind, self._sizes)
        if name in self._inputs | self._outputs:
            self._fail(node, f"two operands are called {name}")
        home = calls.get("home")
        if home is None and not axes:
            self._fail(node, f"{name} has no axis along which it could be kept; declare it with .home(None)")
        kept = axes[0] if home is None else self._home(home, name, axes)
        where[ast.unparse(kind.value)][name] = Operand(name, axes, kept)
        if "replicate" in calls:
            self._replicated += [(name, mesh_axis) for mesh_axis in self._mesh_axes(calls["replicate"])]

    def _home(self, node: ast.Call, name: str, axes: tuple[str, ...]) -> str | None:
        argument = node.args[0] if len(node.args) == 1 and not node.keywords else None
        if isinstance(argument, ast.Constant) and argument.value is None:
            return None
        if isinstance(argument, ast.Name) and argument.id in axes:
            return argument.id
        given = f"the home of {name} is {ast.unparse(node)}"
        self._fail(node, f"{given}: expected .home(None), or an axis of {', '.join(axes)}")

    def _grid(self, node: ast.For) -> dict[str, str]:
        """Return {axis: kind} of the loops, in their order."""
        call = node.iter
        is_grid = isinstance(call, ast.Call) and _is_call(call, "grid") and len(call.args) == 1
        if not is_grid or not isinstance(call.args[0], ast.Constant):  # type: ignore[attr-defined]
            rule = "with the bare name grid and one letter for the kind of each axis"
            self._fail(node, f'the loop must be over grid("..."), {rule}')
        kinds = str(call.args[0].value)  # type: ignore[attr-defined]
        targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
        names = [ast.unparse(target) for target in targets]
        if sorted(names) != sorted(self._sizes):
            rule = f"it must name each axis once: {', '.join(self._sizes)}"
            self._fail(node, f"the loop is over {', '.join(names)}; {rule}")
        if len(kinds) != len(names):
            self._fail(node, f'grid("{kinds}") needs one letter for each axis, and has {len(kinds)} for {len(names)}')
        for name, kind in zip(names, kinds, strict=True):
            if kind not in (SPATIAL, REDUCED):
                self._fail(node, f'axis {name} has kind "{kind}", which is neither "s" (spatial) nor "r" (reduced)')
        return dict(zip(names, kinds, strict=True))

    def _placements(self, loop: ast.For) -> tuple[tuple[str, str, str], ...]:
        """(mesh axis, the loop that its ranks divide, the loop that is shifted or "") of the annotations of a grid."""
        placed: dict[str, dict[str, str]] = {"parallel": {}, "shift": {}}
        for keyword in loop.iter.keywords:  # type: ignore[attr-defined]
            value, is_axis = keyword.value, keyword.arg in self._sizes
            if not is_axis or not isinstance(value, ast.Call) or ast.unparse(value.func) not in placed:
                self._fail(value, 'a loop is annotated as rows=parallel("gpu") or rows=shift("gpu")')
            for mesh_axis in self._mesh_axes(value):
                loops = placed[ast.unparse(value.func)]
                if mesh_axis in loops:
                    self._fail(value, f"mesh axis {mesh_axis} has the loop {loops[mesh_axis]} already")
                loops[mesh_axis] = keyword.arg
        parallel, shifted = placed.values()
        if alone := [mesh_axis for mesh_axis in shifted if mesh_axis not in parallel]:
            self._fail(loop, f"{shifted[alone[0]]} is shifted along {alone[0]}, but no loop is parallel there")
        return tuple((mesh_axis, axis, shifted.get(mesh_axis, "")) for mesh_axis, axis in parallel.items())

    def _mesh_axes(self, node: ast.Call) -> list[str]:
        """The names in the parentheses of an annotation."""
        names = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if not names or len(names) < len(node.args) or node.keywords:
            self._fail(node, f'{ast.unparse(node)}: expected the names of mesh axes, such as ("gpu")')
        return names

    def _statement(self, loop: ast.For, kinds: dict[str, str]) -> tuple[Operand, str, ast.expr]:
        """Return (output, monoid, expression) of the one statement in the loop."""
        if len(loop.body) != 1:
            self._fail(loop.body[1], "the loop must have one statement")
        (node,) = loop.body
        if isinstance(node, ast.AugAssign):
            if not isinstance(node.op, ast.Add):
                self._fail(node, f"{ast.unparse(node)}: this is not supported; {REDUCTIONS}")
            output = self._output(node.target)
            self._check_axes(node, output, kinds)
            return output, "sum", node.value
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            self._fail(node, "the statement must assign to an output: +=, or =")
        output = self._output(node.targets[0])
        value, is_max = node.value, _is_call(node.value, "max")
        read = [ast.unparse(part) for part in ast.walk(value) if isinstance(part, ast.Subscript)]
        target = ast.unparse(node.targets[0])
        if isinstance(value, ast.Call) and not is_max and target in map(ast.unparse, value.args):
            self._fail(node, f"{ast.unparse(value.func)} is not supported as a reduction; {REDUCTIONS}")
        if not is_max and REDUCED in kinds.values() and target in read:
            order = "so that the result may depend on the order of the reduced axis"
            others = f"{REDUCTIONS}, whose order does not matter, and commir.programs.selective_scan is a scan"
            self._fail(node, f"{output.name} is computed from its own earlier values, {order}; {others}")
        self._check_axes(node, output, kinds, is_combined=is_max)
        if not is_max or not isinstance(value, ast.Call):
            return output, "sum", value
        first, *rest = value.args
        if len(rest) != 1 or value.keywords or ast.unparse(first) != target:
            self._fail(node, f"a reduction by max is written {target} = max(the same, expression)")
        return output, "max", rest[0]

    def _output(self, target: ast.expr) -> Operand:
        if not (isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)):
            self._fail(target, "the statement must assign to an output, indexed by axes")
        name = target.value.id
        if name not in self._outputs:
            self._fail(target, f"{name} is assigned to, but is not declared as Out")
        if len(self._outputs) > 1:
            self._fail(target, f"an operator has one output, not {', '.join(self._outputs)}")
        if indices_of(target, self._sizes) != (axes := self._outputs[name].axes):
            self._fail(target, f"{ast.unparse(target)} must be indexed as declared: {', '.join(axes)}")
        return self._outputs[name]

    def _check_axes(self, node: ast.AST, output: Operand, kinds: dict[str, str], is_combined: bool = True) -> None:
        """The output must be indexed by exactly the spatial axes."""
        for axis, kind in kinds.items():
            if rule := axis_error(axis, kind, {output.name: output.axes}):
                self._fail(node, rule)
            if kind == REDUCED and not is_combined:
                race = f"data race: = overwrites {output.name} for every index of the reduced axis {axis}"
                self._fail(node, f"{race}; use += or max")


def _is_call(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
