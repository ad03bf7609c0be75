"""Tiles that are an expression: products of operands and functions of them, summed over the axes that an output lacks.

`a[rows, inner] * b[inner, cols]` is evaluated for one block of every axis. A product of operands, and of numbers, is
one einsum; any other expression is computed for all points of the block before it is summed.
"""

import ast
from collections.abc import Callable, Mapping
from functools import reduce

import torch

from commfabric.collectives.wire_formats import at_least_fp32
from commir.ir.expression_syntax import FUNCTIONS as NAMES
from commir.ir.expression_syntax import factors_of, split_number
from commir.ir.program import Program

Tensor = torch.Tensor
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {name: getattr(torch, name) for name in NAMES}
OPERATORS: dict[type, Callable[..., Tensor]] = {
    ast.Add: torch.add,
    ast.Sub: torch.sub,
    ast.Mult: torch.mul,
    ast.Div: torch.div,
}


def evaluate(program: Program, inputs: Mapping[str, Tensor], indices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Evaluate a program's expression on a block, summed (or reduced by max) over the axes that the output lacks.

    The result shares no memory with the inputs, and no two of its elements share memory. The program has one output, and
    each operand in the expression has its declared axes.
    """
    (output,), (result,) = program.outputs, program.results
    expression = ast.parse(program.tile, mode="eval").body
    loops = [axis.name for axis in program.axes]
    number, factors = split_number(factors_of(expression))
    if result.monoid == "sum" and _is_product(program, factors, loops):
        value = _einsum(program, factors, inputs, loops, output.axes)
        return {output.name: unshared(value if number == 1 else value * _number(number, inputs), inputs)}
    sizes = [len(indices[axis.name]) if axis.name in indices else axis.size for axis in program.axes]
    value = _value(program, expression, inputs, loops).expand(sizes)
    reduced = [d for d, name in enumerate(loops) if name not in output.axes]
    if reduced:
        value = value.sum(reduced) if result.monoid == "sum" else value.amax(reduced)
    kept = [name for name in loops if name in output.axes]
    return {output.name: unshared(value.permute([kept.index(name) for name in output.axes]), inputs)}


def unshared(x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return x, or a copy if it is a view of an input or an expanded tensor, whose elements share memory."""
    memory = x.untyped_storage()
    is_view = memory.data_ptr() in [x.untyped_storage().data_ptr() for x in inputs.values()]
    is_expanded = memory.nbytes() < x.nbytes
    return x.clone() if is_view or is_expanded else x


def _is_product(program: Program, factors: list[ast.expr], loops: list[str]) -> bool:
    """Return True if the factors are operands that together are indexed by every axis."""
    names = [ast.unparse(factor.value) for factor in factors if isinstance(factor, ast.Subscript)]
    axes = {axis for name in names for axis in program.operand(name).axes}
    return len(names) == len(factors) and axes == set(loops)


def _einsum(
    program: Program, factors: list[ast.expr], inputs: Mapping[str, Tensor], loops: list[str], axes: tuple[str, ...]
) -> Tensor:
    operands: list[object] = []
    for factor in factors:
        name = factor.value.id  # type: ignore[attr-defined]
        x = inputs[name]
        operands += [x.to(at_least_fp32(x.dtype)), [loops.index(axis) for axis in program.operand(name).axes]]
    return torch.einsum(*operands, [loops.index(axis) for axis in axes])


def _value(program: Program, node: ast.expr, inputs: Mapping[str, Tensor], loops: list[str]) -> Tensor:
    """The value of an expression with one dimension for each axis of the program, or none if it has no operands."""
    if isinstance(node, ast.Subscript):
        name = node.value.id  # type: ignore[attr-defined]
        axes, x = program.operand(name).axes, inputs[name]
        x = x.to(at_least_fp32(x.dtype)).permute([axes.index(loop) for loop in loops if loop in axes])
        return x[tuple(slice(None) if loop in axes else None for loop in loops)]
    if isinstance(node, ast.Constant):
        return _number(node.value, inputs)  # type: ignore[arg-type]
    if isinstance(node, ast.Call):
        function = FUNCTIONS[ast.unparse(node.func).removeprefix("torch.")]
        return function(_value(program, node.args[0], inputs, loops))
    if isinstance(node, ast.UnaryOp):
        return -_value(program, node.operand, inputs, loops)
    assert isinstance(node, ast.BinOp)
    left, right = (_value(program, each, inputs, loops) for each in (node.left, node.right))
    return OPERATORS[type(node.op)](left, right)


def _number(value: float, inputs: Mapping[str, Tensor]) -> Tensor:
    """A number as a tensor without dimensions, on the inputs' device. Like a Python number it takes an operand's dtype."""
    dtype = reduce(torch.promote_types, (x.dtype for x in inputs.values()), torch.float32)
    return torch.full((), float(value), dtype=dtype, device=next(iter(inputs.values())).device)
