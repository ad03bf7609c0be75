"""Kernels of your own for tiles, each registered for a pattern of the loop nest (paper, section 7.2).

    @commir.operator
    def product(m=64, n=64, k=64):  # the pattern, which is also the kernel's plain twin
        x = In[m, k]
        y = In[k, n]
        z = Out[m, n]
        for m, n, k in grid("ssr"):
            z[m, n] += x[m, k] * y[k, n]

    @commir.kernel(product)
    def blas(x, y):
        return x @ y

Then `schedule.patch("blas")` computes the tile of any program with this pattern by `blas`, for instance of
`all_gather_matmul`, whose axes and operands have other names.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from commfabric.collectives.wire_formats import at_least_fp32
from commir.ir.expression_syntax import FUNCTIONS
from commir.ir.program import KERNELS, Program

from .expressions import unshared
from .operators import Operator

Tensor = torch.Tensor
BUILT_IN = ("library", "reference", "compiled")


@dataclass(frozen=True)
class Kernel:
    """A function that computes the tiles of all programs with a pattern."""

    pattern: Operator | str
    function: Callable[..., Any]

    def matches(self, program: Program) -> bool:
        return _operands_of(self.pattern, program) is not None

    def tile(self, program: Program, inputs: Mapping[str, Tensor], indices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute a tile. The results are converted to at least fp32, and copied if they share memory with the inputs."""
        if isinstance(self.pattern, str):
            results = self.function(**inputs, indices=indices, **dict(program.options))
        else:
            results = (self.function(*(inputs[name] for name in _operands_of(self.pattern, program) or ())),)
        return {
            output.name: unshared(x.to(at_least_fp32(x.dtype)), inputs)
            for output, x in zip(program.outputs, results, strict=True)
        }


_REGISTERED: dict[str, Kernel] = {}


def kernel(pattern: Operator | str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a kernel of all programs with a pattern, under its own name.

    The kernel of an operator gets the blocks of its inputs in their order, and returns the block of the output. That of
    "attention" (or "attention_backward") gets the tile's inputs, its options, and `indices`, {axis: the elements of the
    whole tensor that the tile has}, by keyword, and returns out and lse (or dq, dk and dv). Blocks are read only: they can
    be views of the user's tensors.

    `verify` calls a kernel with small blocks in float64, and compares with the pattern in plain operations. Every rank
    registers the same kernels; plans have only their names. A later kernel of the same name takes the place of the first.

    Args:
        pattern: an operator, whose loops and operands may have other names in the program; or the name of a tile.

    Raises:
        ValueError: there is no such pattern, or the name is one of the library's own kernels.
    """
    if not isinstance(pattern, Operator) and pattern not in KERNELS:
        raise ValueError(f"pattern {pattern!r}: expected an operator (@commir.operator) or {', '.join(KERNELS)}")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        """Remember the function, and return it."""
        if function.__name__ in BUILT_IN:
            raise ValueError(f"a kernel cannot be called {function.__name__}, as one of the library is")
        _REGISTERED[function.__name__] = Kernel(pattern, function)
        return function

    return register


def kernels_of(program: Program) -> list[str]:
    """The names of all kernels that compute the tile of a program."""
    compiled = [] if program.scan else ["compiled"]
    return [*program.kernels, *compiled, *(name for name, each in _REGISTERED.items() if each.matches(program))]


def registered_tile(name: str) -> Callable[..., dict[str, Tensor]] | None:
    """The function that computes tiles by the registered kernel of this name, or None."""
    return _REGISTERED[name].tile if name in _REGISTERED else None


@lru_cache(maxsize=256)  # a rank looks them up for each tile
def _operands_of(pattern: Operator | str, program: Program) -> list[str] | None:
    """The operands of a program in the order of the pattern's inputs, or None if the pattern does not fit."""
    if isinstance(pattern, str):
        return [operand.name for operand in program.inputs] if program.tile == pattern else None
    if program.tile in KERNELS or program.scan is not None:
        return None
    own, names = pattern(), {name: name for name in FUNCTIONS}
    is_same = own.results[0].monoid == program.results[0].monoid
    if not is_same or not _unify(ast.parse(own.tile), ast.parse(program.tile), names):
        return None
    (made,), (wanted,) = own.outputs, program.outputs
    if tuple(names[axis] for axis in made.axes) != wanted.axes:
        return None
    return [names[operand.name] for operand in own.inputs]


def _unify(one: ast.AST, other: ast.AST, names: dict[str, str]) -> bool:
    """Return True if two syntax trees differ only in names, one to one; `names` gets the pairs."""
    if isinstance(one, ast.Name) and isinstance(other, ast.Name):
        if one.id not in names and other.id not in names.values():
            names[one.id] = other.id
        return names.get(one.id) == other.id
    if isinstance(one, ast.Constant) and isinstance(other, ast.Constant):
        return one.value == other.value
    parts = list(ast.iter_child_nodes(one)), list(ast.iter_child_nodes(other))
    same = type(one) is type(other) and len(parts[0]) == len(parts[1])
    return same and all(_unify(a, b, names) for a, b in zip(*parts, strict=True))
