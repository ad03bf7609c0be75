"""Blocks of whole tensors: the elements that a rank holds, and the order in which the elements of an axis are numbered.

The elements of an axis are numbered in the order in which ranks hold them. In zigzag order, with P ranks and 2P blocks,
blocks p and 2P-1-p of the tensor are next to each other; `positions` says which element of the tensor has each number.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from attention2d.layout import token_order
from commir.ir.program import Operand

from .operand_layouts import Digits, Layout, Piece
from .plan_steps import Place

Tensor = torch.Tensor
Sizes = Sequence[Sequence[tuple[Piece, int]]]  # for each dimension, its local digits and their sizes, outermost first


def positions(digits: Digits, axis: str) -> Tensor:
    """(size,) int64: for each number along an axis, the element of the whole tensor that has it."""
    nest = digits.nest
    order, size = nest.program.axis(axis).order, nest.program.axis(axis).size
    cutting = [nest.home_mesh_axes(operand.name, axis) for operand in nest.program.operands]
    ranks = max(math.prod(map(nest.mesh.size, names)) for names in cutting)
    of_ranks = [token_order.segments(order, rank, ranks, size // ranks, size) for rank in range(ranks)]
    return token_order.positions([segment for segments in of_ranks for segment in segments])


def local_sizes(digits: Digits, operand: Operand, layout: Layout) -> Sizes:
    """For each dimension of an operand, its local digits and their sizes, outermost first."""
    held, local = set(layout.values()), list[list[tuple[Piece, int]]]()
    for axis in operand.axes:
        sizes = list(digits.sizes.get(axis, ()))
        if not sizes:
            local.append([((axis, 0), digits.nest.program.axis(axis).size // operand.divisor(axis))])
            continue
        sizes[-1] //= operand.divisor(axis)
        local.append([((axis, number), size) for number, size in enumerate(sizes) if (axis, number) not in held])
    return local


def select(x: Tensor, sizes: Sizes, fixed: Mapping[Piece, int]) -> Tensor:
    """A view of x in which each dimension is cut into its digits, and those in `fixed` are replaced by one block."""
    x = x.reshape([size for dim in sizes for _, size in dim])
    return x[tuple(fixed.get(piece, slice(None)) for dim in sizes for piece, _ in dim)]


def chosen(x: Tensor, digits: Digits, axis: str, fixed: Mapping[Piece, int]) -> Tensor:
    """The elements of x, which has one element for each index of an axis, that lie in these blocks of some digits."""
    sizes = [[((axis, number), size) for number, size in enumerate(digits.sizes[axis])]]
    return select(x, sizes, fixed).reshape(-1)


def flat(view: Tensor, sizes: Sizes, fixed: Mapping[Piece, int]) -> Tensor:
    """Reshape a result of `select` to one dimension for each axis."""
    return view.reshape([math.prod(size for piece, size in dim if piece not in fixed) for dim in sizes])


def expand(x: Tensor, sizes: Sizes, fixed: Mapping[Piece, int]) -> Tensor:
    """Reshape x, which has one dimension for each axis, to the shape of a result of `select`."""
    return x.reshape([size for dim in sizes for piece, size in dim if piece not in fixed])


def has_contiguous_blocks(digits: Digits, name: str, place: Place) -> bool:
    """Return True if the blocks of the digit at `place` are contiguous in a tensor of an operand.

    Such blocks are sent from the tensor and received into it; others are copied.
    """
    operand = digits.nest.program.operand(name)
    surrounding = digits.nest.program.shape(operand)[: place.dim]
    return place.outer == 1 and math.prod(surrounding) == 1


def block(digits: Digits, operand: Operand, whole: Tensor, layout: Layout, coordinates: Mapping[str, int]) -> Tensor:
    """The block of a whole operand, its elements in numbered order, that the rank at these coordinates holds."""
    sizes = local_sizes(digits, operand, {})
    fixed = {piece: coordinates[mesh_axis] for mesh_axis, piece in layout.items()}
    return flat(select(whole, sizes, fixed), sizes, fixed)


def put_block(
    digits: Digits, operand: Operand, whole: Tensor, part: Tensor, layout: Layout, coordinates: Mapping[str, int]
) -> None:
    """Write the block of the rank at these coordinates into a whole operand."""
    sizes = local_sizes(digits, operand, {})
    fixed = {piece: coordinates[mesh_axis] for mesh_axis, piece in layout.items()}
    select(whole, sizes, fixed).copy_(expand(part, sizes, fixed))


def reordered(operand: Operand, whole: Tensor, orders: Mapping[str, Tensor]) -> Tensor:
    """A whole tensor with the elements along each axis of `orders` taken in that order."""
    for dim, axis in enumerate(operand.axes):
        if axis in orders:
            whole = whole.index_select(dim, orders[axis].to(whole.device))
    return whole
