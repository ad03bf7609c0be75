"""Blocks of whole tensors: which elements a rank holds, and in which order the elements of an axis are numbered.

The elements of an axis are numbered in the order in which ranks hold them. In zigzag order, with P ranks and 2P blocks,
blocks p and 2P-1-p of the tensor stand next to each other; `positions` says which element of the tensor has each number.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attention2d.layout import token_order
from commir.ir.checks import shown
from commir.ir.program import ITEMSIZES, Operand

from .layouts import Digits, Layout, Piece
from .steps import Place

Tensor = torch.Tensor
Sizes = Sequence[Sequence[tuple[Piece, int]]]  # for each dimension, its local digits and their sizes, outermost first


def check_tensor(name: str, x: Any) -> None:
    """ValueError unless an input is a dense tensor in one of ITEMSIZES. name: what the error calls it."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is {shown(x)}, and no tensor")
    if x.layout != torch.strided:
        raise ValueError(f"{name} has the layout {x.layout}; a plan computes with dense tensors")
    if str(x.dtype).removeprefix("torch.") not in ITEMSIZES:
        raise ValueError(f"{name} is {x.dtype}; a plan computes with floating-point tensors ({', '.join(ITEMSIZES)})")


def positions(digits: Digits, axis: str) -> Tensor:
    """(size,) int64: the element of the whole tensor that has each number along an axis."""
    nest = digits.nest
    found = nest.program.axis(axis)
    cutting = [nest.home_mesh_axes(operand.name, axis) for operand in nest.program.operands]
    ranks = max(math.prod(map(nest.mesh.size, names)) for names in cutting)
    segments = [
        segment
        for rank in range(ranks)
        for segment in token_order.segments(found.order, rank, ranks, found.size // ranks, found.size)
    ]
    return token_order.positions(segments)


def local_sizes(digits: Digits, operand: Operand, layout: Layout) -> Sizes:
    """For each dimension of an operand, its local digits and their sizes, outermost first."""
    held, found = set(layout.values()), list[list[tuple[Piece, int]]]()
    for axis in operand.axes:
        sizes = list(digits.sizes.get(axis, ()))
        if not sizes:
            found.append([((axis, 0), digits.nest.program.axis(axis).size // operand.divisor(axis))])
            continue
        sizes[-1] //= operand.divisor(axis)
        found.append([((axis, number), size) for number, size in enumerate(sizes) if (axis, number) not in held])
    return found


def select(x: Tensor, sizes: Sizes, fixed: Mapping[Piece, int]) -> Tensor:
    """A view of x with each dimension cut into its digits, of which those in `fixed` are replaced by one block."""
    x = x.reshape([size for dim in sizes for _, size in dim])
    return x[tuple(fixed.get(piece, slice(None)) for dim in sizes for piece, _ in dim)]


def chosen(x: Tensor, digits: Digits, axis: str, fixed: Mapping[Piece, int]) -> Tensor:
    """The elements of x (size of an axis,) that have these blocks of some of its digits."""
    sizes = [[((axis, number), size) for number, size in enumerate(digits.sizes[axis])]]
    return select(x, sizes, fixed).reshape(-1)


def flat(view: Tensor, sizes: Sizes, fixed: Mapping[Piece, int]) -> Tensor:
    """The result of `select` with one dimension per axis again."""
    return view.reshape([math.prod(size for piece, size in dim if piece not in fixed) for dim in sizes])


def expand(x: Tensor, sizes: Sizes, fixed: Mapping[Piece, int]) -> Tensor:
    """x, one dimension per axis, with the shape of `select`'s result."""
    return x.reshape([size for dim in sizes for piece, size in dim if piece not in fixed])


def has_contiguous_blocks(digits: Digits, name: str, place: Place) -> bool:
    """Whether the blocks of the digit at `place` are contiguous in a tensor of an operand: nothing of it surrounds them.

    Such blocks are sent from the tensor, and received into it; others are copied.
    """
    operand = digits.nest.program.operand(name)
    surrounding = digits.nest.program.shape(operand)[: place.dim]
    return place.outer == 1 and math.prod(surrounding) == 1


def block(digits: Digits, operand: Operand, whole: Tensor, layout: Layout, coordinates: Mapping[str, int]) -> Tensor:
    """What the rank at these coordinates holds of a whole operand, whose elements are in their order of numbers."""
    sizes = local_sizes(digits, operand, {})
    fixed = {piece: coordinates[mesh_axis] for mesh_axis, piece in layout.items()}
    return flat(select(whole, sizes, fixed), sizes, fixed)


def put_block(
    digits: Digits, operand: Operand, whole: Tensor, part: Tensor, layout: Layout, coordinates: Mapping[str, int]
) -> None:
    """Write what the rank at these coordinates holds into a whole operand."""
    sizes = local_sizes(digits, operand, {})
    fixed = {piece: coordinates[mesh_axis] for mesh_axis, piece in layout.items()}
    select(whole, sizes, fixed).copy_(expand(part, sizes, fixed))


def reordered(operand: Operand, whole: Tensor, orders: Mapping[str, Tensor]) -> Tensor:
    """A whole tensor whose elements along each axis of `orders` are taken in that order."""
    for dim, axis in enumerate(operand.axes):
        if axis in orders:
            whole = whole.index_select(dim, orders[axis].to(whole.device))
    return whole
