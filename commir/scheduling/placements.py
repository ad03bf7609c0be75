"""Schedules by placement: each mesh axis computes the blocks of one loop, and its messages are either collective or a ring.

This is the space in which the known schedules lie (`known_schedules`), and which `commir.search` explores.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from commir.ir.checks import check_flags, check_sizes, check_type, shown

from .loop_nest import Illegal, LoopNest

Nest = TypeVar("Nest", bound=LoopNest)


@dataclass(frozen=True)
class Placement:
    """The loop whose blocks the ranks along a mesh axis compute, and whether operands travel around it in a ring.

    ValueError: is_streamed is neither True nor False.
    """

    axis: str
    is_streamed: bool = False

    def __post_init__(self) -> None:
        check_flags(is_streamed=self.is_streamed)

    def __str__(self) -> str:
        return self.axis + ", streamed" * self.is_streamed


def place(nest: Nest, /, **placements: str | Placement) -> Nest:
    """`nest`, an untransformed schedule, with a placement for each mesh axis: `place(nest, cols="kv", rows="q")`.

    A name is the placement of that loop, with collective messages; `Placement(loop, True)` passes operands around in a ring.
    An axis along which an operand is kept at home is tiled in the order of the mesh, so that blocks stay where they are.
    Illegal: a mesh axis has no placement or does not exist, the program has no such loop, its size does not divide, or
    nothing travels where the placement is streamed.
    """
    check_type("place", nest, LoopNest)
    chosen = {name: each if isinstance(each, Placement) else Placement(each) for name, each in placements.items()}
    for name, each in chosen.items():
        if name not in nest.mesh.names:
            raise Illegal(f"place: the mesh has no axis {name!r}; it has {', '.join(nest.mesh.names)}")
        if not nest.digits_of(each.axis):
            loops = ", ".join(dict.fromkeys(digit.axis for digit in nest.digits))
            raise Illegal(f"place: {nest.program.name} has no loop {shown(each.axis)}; it has {loops}")
    if missing := [name for name in nest.mesh.names if name not in chosen]:
        raise Illegal(f"mesh axis {missing[0]} has no placement")
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
    """A placed schedule whose ranks divide their blocks of an axis into chunks, which go through all steps in turn.

    Illegal: as `LoopNest.chunk`, or the axis is no loop, or its blocks do not divide.
    """
    if not (digits := nest.digits_of(axis)):
        raise Illegal(f"{nest.program.name} has no loop {shown(axis)} that could have chunks")
    check_sizes("in_chunks: ", chunks=chunks)
    if chunks == 1:
        return nest
    outer, inner = f"{axis}.chunk", f"{axis}.inner"
    while any(digit.name in (outer, inner) for digit in digits):  # of mesh axes that are called so
        outer, inner = f"{outer}_", f"{inner}_"
    return nest.tile(digits[-1].name, chunks, outer, inner).chunk(outer)


def streamed_axis(nest: LoopNest, mesh_axis: str, axis: str) -> str | None:
    """The loop along which operands travel if the blocks of `axis` are on a mesh axis: that of the first one's home."""
    for operand in nest.program.operands:
        home = nest.home(operand.name).get(mesh_axis)
        if axis not in operand.axes and home is not None and home != axis:
            return home
    return None


def _shifted_axis(nest: LoopNest, mesh_axis: str, placement: Placement) -> str:
    found = streamed_axis(nest, mesh_axis, placement.axis)
    if found is None:
        raise Illegal(f"{placement.axis} on {mesh_axis} cannot be streamed: every operand kept there is indexed by it")
    return found


def _tiled(nest: Nest, axis: str, bound: set[str]) -> Nest:
    """`axis` tiled so that it has a digit axis.m for each mesh axis m in `bound`."""
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
    return {
        mesh_axis: Placement(nest.digit(name).axis, mesh_axis in shifted)
        for name, mesh_axis in nest.parallel
        if nest.mesh.size(mesh_axis) > 1
    }


def is_placed(nest: LoopNest) -> bool:
    """Whether a schedule is what `place` and then `in_chunks` make, with digits of any names, and with homes unchanged."""
    chosen = placements_of(nest)
    alone = {name: chosen.get(name, Placement(nest.digits[0].axis)) for name in nest.mesh.names}
    try:
        placed = place(LoopNest(nest.program, nest.mesh), **alone)
        if nest.chunked is not None:
            placed = in_chunks(placed, nest.digit(nest.chunked).axis, nest.chunks)
    except Illegal:
        return False
    return _form(nest) == _form(placed)


def _form(nest: LoopNest) -> tuple[Any, ...]:
    """A schedule without the names of its digits, where neighbouring digits that are inside the tile are one."""
    used: dict[str, Any] = dict.fromkeys(nest.order, "loop")
    if nest.chunked is not None:
        used[nest.chunked] = "chunk"
    used |= {name: ("rank", m) for name, m in nest.parallel} | {name: ("ring", m) for name, m in nest.shifts}
    digits: list[tuple[str, int, Any]] = []
    for digit in (each for each in nest.digits if each.size > 1):
        role = used.get(digit.name)
        if digits and digits[-1][0] == digit.axis and digits[-1][2] is role is None:
            digits[-1] = digit.axis, digits[-1][1] * digit.size, None
        else:
            digits.append((digit.axis, digit.size, role))
    loops = [(nest.digit(name).axis, used[name]) for name in nest.order if nest.digit(name).size > 1]
    return digits, loops, nest.homes
