"""The language of the expressions in loop nests: which kinds of axes and which operations they may have.

`Program` checks these rules for every program. `commir.programs.operators` checks them for the function that it reads, to
name the line of an error.
"""

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NoReturn

FUNCTIONS = ("exp", "log", "sqrt", "tanh", "sigmoid", "relu", "abs", "sin", "cos")
Operands = Mapping[str, Sequence[str]]  # {operand: its axes, in the order of its dimensions}


class ExpressionError(ValueError):
    """A part of a loop nest breaks a rule of the language. The message says which; `node` is the part's syntax tree."""

    def __init__(self, node: ast.AST, rule: str) -> None:
        super().__init__(rule)
        self.node = node


def axis_error(axis: str, kind: str, outputs: Operands) -> str:
    """Return the rule that the kind of an axis breaks, or "".

    A spatial axis indexes every output; a reduced one is missing in at least one.
    """
    without = [name for name, axes in outputs.items() if axis not in axes]
    if kind == "s" and without:
        return (
            f"data race: {axis} is spatial, but {without[0]} is not indexed by it, so that all its indices write the same "
            f'elements; make {axis} reduced ("r")'
        )
    if kind == "r" and not without:
        return f'{axis} is reduced, but indexes {", ".join(outputs)}; make it spatial ("s")'
    return ""


def read_text(text: str, inputs: Operands, outputs: Collection[str], axes: Collection[str]) -> ast.expr:
    """Parse an expression and check it by `read_expression`. Raises ValueError."""
    try:
        return read_expression(ast.parse(text, mode="eval").body, inputs, outputs, axes)
    except SyntaxError as error:
        raise ValueError(f"no expression: {error.msg}") from None


def read_expression(node: ast.expr, inputs: Operands, outputs: Collection[str], axes: Collection[str]) -> ast.expr:
    """Return an expression in which functions have their bare names.

    Raises ExpressionError unless it consists of inputs with their declared axes, numbers, + - * / and FUNCTIONS.
    """

    def read(part: ast.expr) -> ast.expr:
        return read_expression(part, inputs, outputs, axes)

    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        _check_input(node, node.value.id, inputs, outputs, axes)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        return ast.BinOp(read(node.left), node.op, read(node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ast.UnaryOp(node.op, read(node.operand))
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func).removeprefix("torch.")
        if name not in FUNCTIONS or len(node.args) != 1 or node.keywords:
            names = ", ".join(FUNCTIONS)
            _fail(node, f"{ast.unparse(node)}: the functions of one argument are {names}; they take no keywords")
        return ast.Call(ast.Name(name), [read(node.args[0])], [])
    elif not (isinstance(node, ast.Constant) and isinstance(node.value, int | float)):
        rule = "is neither an operand with its axes, a number, + - * /, nor a function of these"
        _fail(node, f"{ast.unparse(node)} {rule}")
    return node


def factors_of(node: ast.expr) -> list[ast.expr]:
    """The factors of a product in their order, where -x is -1 times x. Another expression is its own factor."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return factors_of(node.left) + factors_of(node.right)
    if isinstance(node, ast.UnaryOp):
        return [ast.Constant(-1.0), *factors_of(node.operand)]
    return [node]


def split_number(factors: Iterable[ast.expr]) -> tuple[float, list[ast.expr]]:
    """Return (the product of the factors that are numbers, the other factors)."""
    number, others = 1.0, []
    for factor in factors:
        if isinstance(factor, ast.Constant):
            number *= float(factor.value)  # type: ignore[arg-type]
        else:
            others.append(factor)
    return number, others


def indices_of(node: ast.Subscript, axes: Iterable[str]) -> tuple[str, ...]:
    """The axes in the brackets of an operand. Raises ExpressionError for anything else and for an axis named twice."""
    indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for index in indices:
        if not isinstance(index, ast.Name):
            _fail(index, f"{ast.unparse(index)} is not an axis: expected {', '.join(axes)}")
        if index.id not in axes:
            _fail(index, f"unknown axis {index.id}: expected {', '.join(axes)}")
    names = tuple(index.id for index in indices if isinstance(index, ast.Name))
    if len(set(names)) < len(names):
        _fail(node, f"{ast.unparse(node)} names an axis twice")
    return names


def _check_input(
    node: ast.Subscript, name: str, inputs: Operands, outputs: Collection[str], axes: Collection[str]
) -> None:
    if name in outputs:
        _fail(node, f"{name} is an output, and cannot be read")
    if name not in inputs:
        _fail(node, f"{name} is not declared as an input")
    if indices_of(node, axes) != tuple(inputs[name]):
        _fail(node, f"{ast.unparse(node)} must be indexed as declared: {', '.join(inputs[name])}")


def _fail(node: ast.AST, rule: str) -> NoReturn:
    raise ExpressionError(node, rule)
