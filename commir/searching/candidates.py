"""The candidates of a search: every way to split the levels of a mesh, with a placement for each part.

The space is finite and small. Two neighbouring parts of one level with the same placement would be one part, so only that is
listed. Candidates come in a fixed order; nothing depends on hashes or times.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from commir.ir.mesh import Mesh
from commir.ir.program import SCANNED, WHOLE, Program
from commir.lowering.lower import Schedule
from commir.scheduling.placements import Placement, in_chunks, place, streamed_axis

MOST_PARTS = 3  # of a mesh; see `candidates`
MOST_CHUNKS = 64  # more chunks save little memory and send many small messages


@dataclass(frozen=True)
class Part:
    """A mesh axis of a candidate.

    Attributes:
        axis: the axis of the given mesh of which it is a part.
        level: the level whose links it uses.
        shifted: the loop that is shifted against it, if its placement is streamed.
    """

    name: str
    size: int
    axis: str
    level: str
    placement: Placement
    shifted: str | None = None


@dataclass(frozen=True)
class Candidate:
    """Parts of the mesh from the outermost to the innermost, and chunks.

    Attributes:
        chunked: the axis that is divided into chunks, or "".
        chunks: their number.
    """

    parts: tuple[Part, ...]
    chunked: str = ""
    chunks: int = 1

    def schedule(self, program: Program, mesh: Mesh) -> Schedule:
        """The schedule. Raises IllegalSchedule if it does not fit the program after all."""
        for axis in mesh.names:
            mine = {part.name: part.size for part in self.parts if part.axis == axis}
            if list(mine) != [axis]:
                mesh = mesh.split(axis, **mine)
        placed = place(Schedule(program, mesh), **{part.name: part.placement for part in self.parts})
        return in_chunks(placed, self.chunked, self.chunks) if self.chunked else placed

    def in_chunks(self, program: Program) -> "Iterator[Candidate]":
        """The same placement in chunks of each axis that indexes all outputs: at most MOST_CHUNKS, the fewest first.

        A chunk is a part of each rank's own blocks, and at home all ranks have one of it: so the innermost part must divide
        an axis along which operands are kept. Some do not fit after all.
        """
        all_ranks = math.prod(part.size for part in self.parts)
        last = next((part for part in reversed(self.parts) if part.size > 1), None)
        for axis in () if program.scan is not None else program.axes:
            if axis.kind == WHOLE or any(axis.name not in output.axes for output in program.outputs):
                continue
            if last and axis.name not in (last.placement.axis, last.shifted):
                if any(operand.home == axis.name for operand in program.operands):
                    continue
            ranks = math.prod(part.size for part in self.parts if axis.name in (part.placement.axis, part.shifted))
            blocks = program.most_blocks(axis.name) // ranks
            at_home = max(
                (all_ranks * x.divisor(axis.name) for x in program.operands if x.home == axis.name), default=1
            )
            for number in range(2, min(blocks, MOST_CHUNKS) + 1):
                if blocks % number == 0 and axis.size // number % at_home == 0:
                    yield Candidate(self.parts, axis.name, number)

    def __str__(self) -> str:
        chunks = f"; {self.chunked} in {self.chunks} chunks" if self.chunked else ""
        return "; ".join(f"{part.name} ({part.size}): {part.placement}" for part in self.parts) + chunks


def candidates(program: Program, mesh: Mesh) -> Iterator[Candidate]:
    """All candidates whose sizes divide, in a fixed order.

    The mesh has at most MOST_PARTS parts, and one more if it has several levels or the program more loops than that; or as
    many as it has levels, if that is more. Axes of one rank do not count, and have only one placement.
    """
    options = _options(program, mesh)
    levels = sum(axis.size > 1 for axis in mesh.axes)
    loops = len({placement.axis for placement, _ in options})
    most = max(MOST_PARTS + (levels > 1 or loops > MOST_PARTS), levels) + len(mesh.axes) - levels
    for split in product(*(_factorizations(axis.size) for axis in mesh.axes)):
        if sum(map(len, split)) <= most:
            yield from _placed(program, mesh, split, options)


def _placed(
    program: Program, mesh: Mesh, split: Sequence[Sequence[int]], options: Sequence[tuple[Placement, str | None]]
) -> Iterator[Candidate]:
    """The candidates with these sizes of the parts of each axis."""
    shapes = [
        (axis.name if len(sizes) == 1 else _part_name(mesh, axis.name, number), size, axis)
        for axis, sizes in zip(mesh.axes, split, strict=True)
        for number, size in enumerate(sizes)
    ]

    most = {placement.axis: program.most_blocks(placement.axis) for placement, _ in options}

    def extended(parts: tuple[Part, ...], used: dict[str, int]) -> Iterator[Candidate]:
        """The candidates that begin with `parts`. used: {loop axis: ranks that divide it so far}."""
        if len(parts) == len(shapes):
            yield Candidate(parts)
            return
        name, size, axis = shapes[len(parts)]
        for placement, shifted in options if size > 1 else options[:1]:
            ranks = used.get(placement.axis, 1) * size
            is_repeated = parts and parts[-1].axis == axis.name and parts[-1].placement == placement
            if not is_repeated and most[placement.axis] % ranks == 0:
                part = Part(name, size, axis.name, axis.level, placement, shifted if placement.is_streamed else None)
                yield from extended((*parts, part), {**used, placement.axis: ranks})

    yield from extended((), {})


def _part_name(mesh: Mesh, axis: str, number: int) -> str:
    name = f"{axis}{number}"
    while name in mesh.names:
        name += "_"
    return name


def _options(program: Program, mesh: Mesh) -> list[tuple[Placement, str | None]]:
    """(placement, the loop that is shifted if it is streamed), without and with streaming."""
    nest, options = Schedule(program, mesh), list[tuple[Placement, str | None]]()
    loops = [axis for axis in program.axes if axis.kind != WHOLE]
    for axis in loops:
        if axis.size > 1 or all(each.size == 1 for each in loops):
            shifted = streamed_axis(nest, mesh.names[0], axis.name)
            if shifted and program.axis(shifted).kind == SCANNED:
                shifted = None
            options.append((Placement(axis.name), shifted))
            options += [(Placement(axis.name, True), shifted)] if shifted else []
    return options


def _factorizations(size: int) -> list[tuple[int, ...]]:
    """All ways to write a size as an ordered product of factors above 1; 1 itself as (1,)."""
    if size == 1:
        return [(1,)]
    products: list[tuple[int, ...]] = [(size,)]
    for first in range(2, size):
        if size % first == 0:
            products += [(first, *rest) for rest in _factorizations(size // first)]
    return products
