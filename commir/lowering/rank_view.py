"""What the steps of a plan mean on one rank: its peers, and which blocks it has in each turn of the loops."""

from collections.abc import Mapping
from functools import cached_property

from commir.ir.program import WHOLE, Operand, Scan

from .operand_layouts import Digits, Layout, Piece
from .plan_steps import Key, Swap, register_key
from .tensor_blocks import Sizes, local_sizes
from .unrolled_loops import loops_of, travelling

Fixed = Mapping[Piece, int]  # {digit: its block in a turn of the loops}


class RankView:
    """A rank of a plan. Counting, running and writing a plan's steps all begin with this.

    Attributes:
        coordinates: its place on the mesh.
        loops: its loops of several turns, outermost first.
        travels: {operand: the numbers of the loops along which its blocks travel}.
    """

    def __init__(self, digits: Digits, rank: int) -> None:
        self.digits, self.program, self.mesh = digits, digits.nest.program, digits.nest.mesh
        self.coordinates, self.loops = self.mesh.coordinates(rank), loops_of(digits)
        self.travels = {x.name: travelling(digits, self.loops, x) for x in self.program.operands}

    @cached_property
    def sizes(self) -> dict[str, Sizes]:
        """{operand: its local digits}, as the loops need it."""
        return {x.name: local_sizes(self.digits, x, self.digits.needed(x)) for x in self.program.operands}

    @cached_property
    def parallel(self) -> Layout:
        return self.digits.parallel()

    @property
    def scan(self) -> Scan:
        assert self.program.scan is not None
        return self.program.scan

    def size(self, axis: str) -> int:
        return self.mesh.size(axis)

    def peer(self, axis: str, distance: int) -> int:
        """The rank `distance` further along a mesh axis, which is a ring."""
        there = (self.coordinates[axis] + distance) % self.size(axis)
        return self.mesh.rank_at({**self.coordinates, axis: there})

    def swap_peer(self, step: Swap) -> int:
        (first, second), here = step.axes, self.coordinates
        return self.mesh.rank_at({**here, first: here[second], second: here[first]})

    def outputs(self, result: int) -> list[Operand]:
        return [self.program.operand(name) for name in self.program.results[result].outputs]

    def key(self, operand: str, counters: Key) -> Key:
        """The key of the block of an operand that is used at these loop counters."""
        return register_key(tuple(counters[j] for j in self.travels[operand]))

    def turn(self, counters: Key) -> dict[Piece, int]:
        """The block of each loop's digit at these loop counters."""
        shifts = (self.coordinates[loop.mesh_axis] if loop.mesh_axis else 0 for loop in self.loops)
        turns = zip(self.loops, counters, shifts, strict=True)
        return {loop.piece: (counter + shift) % loop.size for loop, counter, shift in turns}

    def blocks_of_axes(self, fixed: Fixed) -> dict[str, dict[Piece, int]]:
        """{loop axis: the blocks of its digits that a tile has, those of this rank and those of a turn}."""
        known = {piece: self.coordinates[mesh_axis] for mesh_axis, piece in self.parallel.items()} | dict(fixed)
        axes = [axis for axis in self.digits.sizes if self.program.axis(axis).kind != WHOLE]
        return {axis: {piece: n for piece, n in known.items() if piece[0] == axis} for axis in axes}
