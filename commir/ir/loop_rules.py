"""What a loop nest around an expression may be: the kinds of its axes, and what the expression is made of.

`Program` checks these rules for every program, and `commir.programs.operators` for the function that it reads, whose line it
then names.
"""

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NoReturn

FUNCTIONS = ("exp", "log", "sqrt", "tanh", "sigmoid", "relu", "abs", "sin", "cos")
LARGEST = 2**127  # numbers in an expression are smaller, so that they are float32 numbers
Operands = Mapping[str, Sequence[str]]  # {operand: its axes, in the order of its dimensions}


class RuleBroken(ValueError):
    """A part of a loop nest breaks a rule, which the message says. node: where, in the syntax tree."""

    def __init__(self, node: ast.AST, rule: str) -> None:
        super().__init__(rule)
        self.node = node


def axis_error(axis: str, kind: str, outputs: Operands) -> str:
    """The rule that the kind of an axis breaks, or nothing: outputs have all spatial axes, and lack each reduced one."""
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
    """The syntax tree of an expression. ValueError: it is none, or breaks a rule of `read_expression`."""
    try:
        return read_expression(ast.parse(text, mode="eval").body, inputs, outputs, axes)
    except SyntaxError as error:
        raise ValueError(f"no expression: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("its parts are nested too deeply") from None


def read_expression(node: ast.expr, inputs: Operands, outputs: Collection[str], axes: Collection[str]) -> ast.expr:
    """An expression with the bare names of functions.

    RuleBroken: it is made of something else than inputs with their declared axes, numbers, + - * / and FUNCTIONS, or a
    number, or the product of those in a product, is LARGEST or more.
    """

    def read(part: ast.expr) -> ast.expr:
        return read_expression(part, inputs, outputs, axes)

    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        _check_input(node, node.value.id, inputs, outputs, axes)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        parts = ast.BinOp(read(node.left), node.op, read(node.right))
        _check_number(node)
        return parts
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ast.UnaryOp(node.op, read(node.operand))
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func).removeprefix("torch.")
        if name not in FUNCTIONS or len(node.args) != 1 or node.keywords:
            names = ", ".join(FUNCTIONS)
            _fail(node, f"{ast.unparse(node)}: the functions of one argument are {names}; they take no keywords")
        return ast.Call(ast.Name(name), [read(node.args[0])], [])
    elif not (isinstance(node, ast.Constant) and isinstance(node.value, int | float)):
        _fail(
            node,
            f"{ast.unparse(node)} is neither an operand with its axes, a number, + - * /, nor a function of these",
        )
    elif abs(node.value) >= LARGEST:
        _fail(node, "a number of 2^127 or more is too large")
    return node


def factors_of(node: ast.expr) -> list[ast.expr]:
    """The factors of a product, in their order; -x is -1 times x. What is no product is its own factor."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return factors_of(node.left) + factors_of(node.right)
    if isinstance(node, ast.UnaryOp):
        return [ast.Constant(-1.0), *factors_of(node.operand)]
    return [node]


def split_number(factors: Iterable[ast.expr]) -> tuple[float, list[ast.expr]]:
    """The product of those factors that are numbers, and the others."""
    number, others = 1.0, []
    for factor in factors:
        if isinstance(factor, ast.Constant):
            number *= float(factor.value)  # type: ignore[arg-type]
        else:
            others.append(factor)
    return number, others


def indices_of(node: ast.Subscript, axes: Iterable[str]) -> tuple[str, ...]:
    """The axes in the brackets of an operand. RuleBroken: something else is there, or an axis twice."""
    indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for index in indices:
        if not isinstance(index, ast.Name):
            _fail(index, f"{ast.unparse(index)} is no axis: an index must be the name of one")
        if index.id not in axes:
            _fail(index, f"there is no axis {index.id}; the axes are {', '.join(axes)}")
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


def _check_number(node: ast.expr) -> None:
    """The numbers of a product are multiplied before its operands are, so their product must be a float32 number, too."""
    number, _ = split_number(factors_of(node))
    if abs(number) >= LARGEST:
        text = ast.unparse(node)
        _fail(node, f"{text:.80}: its numbers multiply to {number:g}, and a number of 2^127 or more is too large")


def _fail(node: ast.AST, rule: str) -> NoReturn:
    raise RuleBroken(node, rule)
