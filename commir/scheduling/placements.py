"""Schedules by placement: each mesh axis computes the blocks of one loop, and its messages are either collective or a ring.

This is the space in which the known schedules lie (`known_schedules`), and which `commir.search` explores.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from .loop_nest import IllegalSchedule, LoopNest

Nest = TypeVar("Nest", bound=LoopNest)


@dataclass(frozen=True)
class Placement:
    """The loop that the ranks along a mesh axis divide.

    Attributes:
        axis: the loop, of which each rank computes one block.
        is_streamed: pass operands around in a ring while blocks are computed, instead of gathering them first.
        shifted: the loop along which operands travel then (None: that along which the first that travels is kept).
    """

    axis: str
    is_streamed: bool = False
    shifted: str | None = None

    def __str__(self) -> str:
        return self.axis + ", streamed" * self.is_streamed


def place(nest: Nest, /, **placements: str | Placement) -> Nest:
    """Transform a new schedule by a placement for each mesh axis: `place(nest, cols="kv", rows="q")`.

    An axis along which an operand is kept at home is tiled in the order of the mesh, so that blocks stay where they are.

    Args:
        nest: a schedule to which no primitive was applied, except `shard` and `replicate`.
        placements: the loop of each mesh axis, with collective messages; or `Placement(loop, True)`, which passes operands
            around in a ring.

    Raises:
        IllegalSchedule: a mesh axis has no placement or does not exist, the program has no such loop, its size does not
            divide, or nothing would travel in a ring.
    """
    chosen = {name: each if isinstance(each, Placement) else Placement(each) for name, each in placements.items()}
    for name, placement in chosen.items():
        if name not in nest.mesh.names:
            raise IllegalSchedule(f"place: the mesh has no axis {name!r}: expected {', '.join(nest.mesh.names)}")
        if not nest.digits_of(placement.axis):
            loops = ", ".join(dict.fromkeys(digit.axis for digit in nest.digits))
            raise IllegalSchedule(f"place: {nest.program.name} has no loop {placement.axis!r}: expected {loops}")
    if missing := [name for name in nest.mesh.names if name not in chosen]:
        raise IllegalSchedule(f"mesh axis {missing[0]} has no placement")
    shifted = {name: _shifted_axis(nest, name, each) for name, each in chosen.items() if each.is_streamed}
    for axis in dict.fromkeys(digit.axis for digit in nest.digits):
        nest = _tiled(nest, axis, {name for name, each in chosen.items() if axis in (each.axis, shifted.get(name))})
    for name in nest.mesh.names:
        nest = nest.parallelize(f"{chosen[name].axis}.{name}", name)
    for name in nest.mesh.names:
        if name in shifted:
            nest = nest.shift(f"{shifted[name]}.{name}", name)
    return nest


def in_chunks(nest: Nest, axis: str, chunks: int) -> Nest:
    """Divide the blocks of an axis on each rank of a placed schedule into chunks, which go through all steps in turn.

    Raises:
        IllegalSchedule: as `LoopNest.chunk`, or the axis is no loop, or its blocks do not divide.
    """
    if not (digits := nest.digits_of(axis)):
        raise IllegalSchedule(f"{nest.program.name} has no loop {axis!r} that could have chunks")
    if chunks == 1:
        return nest
    outer, inner = f"{axis}.chunk", f"{axis}.inner"
    while any(digit.name in (outer, inner) for digit in digits):  # a mesh axis is called chunk or inner
        outer, inner = f"{outer}_", f"{inner}_"
    return nest.tile(digits[-1].name, chunks, outer, inner).chunk(outer)


def streamed_axis(nest: LoopNest, mesh_axis: str, axis: str) -> str | None:
    """The loop along which operands travel if the ranks of a mesh axis divide `axis`: the home of the first that does."""
    for operand in nest.program.operands:
        home = nest.home(operand.name).get(mesh_axis)
        if axis not in operand.axes and home is not None and home != axis:
            return home
    return None


def _shifted_axis(nest: LoopNest, mesh_axis: str, placement: Placement) -> str:
    shifted = placement.shifted or streamed_axis(nest, mesh_axis, placement.axis)
    if shifted is None:
        where = f"{placement.axis} on {mesh_axis}"
        raise IllegalSchedule(f"{where} cannot be streamed: every operand kept there is indexed by it")
    return shifted


def _tiled(nest: Nest, axis: str, bound: set[str]) -> Nest:
    """Tile `axis` so that it has a digit axis.m for each mesh axis m in `bound`."""
    cutting = {m for operand in nest.program.operands for m in nest.home_mesh_axes(operand.name, axis)}
    names = [m for m in nest.mesh.names if m in bound | cutting]
    while names and names[-1] not in bound:
        names.pop()
    rest = axis
    for m in names:
        nest = nest.tile(rest, nest.mesh.size(m), f"{axis}.{m}", f"{axis}.{m}'")
        rest = f"{axis}.{m}'"
    return nest


def placements_of(nest: LoopNest) -> dict[str, Placement]:
    """The placement of each mesh axis with more than one rank."""
    shifted = {mesh_axis for _, mesh_axis in nest.shifts}
    parallel = [(name, mesh_axis) for name, mesh_axis in nest.parallel if nest.mesh.size(mesh_axis) > 1]
    return {mesh_axis: Placement(nest.digit(name).axis, mesh_axis in shifted) for name, mesh_axis in parallel}


def is_placed(nest: LoopNest) -> bool:
    """Return True if `place`, and then `in_chunks`, make this schedule, except for names of digits, without moved homes."""
    chosen = placements_of(nest)
    alone = {name: chosen.get(name, Placement(nest.digits[0].axis)) for name in nest.mesh.names}
    try:
        placed = place(LoopNest(nest.program, nest.mesh), **alone)
        if nest.chunked is not None:
            placed = in_chunks(placed, nest.digit(nest.chunked).axis, nest.chunks)
    except IllegalSchedule:
        return False
    return _form(nest) == _form(placed)


def _form(nest: LoopNest) -> tuple[Any, ...]:
    """A schedule without the names of its digits, in which neighbouring digits inside the tile are one."""
    used: dict[str, Any] = dict.fromkeys(nest.order, "loop")
    if nest.chunked is not None:
        used[nest.chunked] = "chunk"
    used |= {name: ("rank", m) for name, m in nest.parallel} | {name: ("ring", m) for name, m in nest.shifts}
    digits: list[tuple[str, int, Any]] = []
    for digit in (digit for digit in nest.digits if digit.size > 1):
        role = used.get(digit.name)
        if digits and digits[-1][0] == digit.axis and digits[-1][2] is role is None:
            digits[-1] = digit.axis, digits[-1][1] * digit.size, None
        else:
            digits.append((digit.axis, digit.size, role))
    loops = [(nest.digit(name).axis, used[name]) for name in nest.order if nest.digit(name).size > 1]
    return digits, loops, nest.homes
