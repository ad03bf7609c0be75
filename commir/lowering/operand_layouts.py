"""How each operand is split over the mesh: as the caller holds it (its home), as the loops read it, and as they leave it.

A digit is one factor of an axis's index (see `loop_nest`). A layout is {mesh axis: digit}: the ranks along the mesh axis
hold one block of that digit each. Digits that no mesh axis holds are local. The schedule and the homes may cut an axis into
different numbers of blocks; `Digits` is the common refinement of all these cuts.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, takewhile
from operator import mul

from commir.ir.program import Operand
from commir.scheduling.loop_nest import IllegalSchedule, LoopNest

from .plan_steps import AllToAll, Gather, Place, Slice, Step, Swap

Piece = tuple[str, int]  # a digit: (axis, its number, 0 being the outermost)
Layout = dict[str, Piece]


class Digits:
    """The digits of every loop of a nest after all cuts; `sizes` is {axis: size of each digit, outermost first}.

    Raises IllegalSchedule if a home does not divide an axis, or if another cut would divide a digit that a mesh axis must
    hold whole.
    """

    def __init__(self, nest: LoopNest) -> None:
        self.nest = nest
        check_homes(nest)
        _check_scan(nest)
        self.sizes = {axis: _pieces(nest, axis) for axis in dict.fromkeys(digit.axis for digit in nest.digits)}
        if nest.program.scan is not None:
            self.sizes[nest.program.scan.blocks] = block_sizes(nest)
        for operand in nest.program.operands:
            self._check_groups(operand)
        self._check_chunks()

    def piece(self, name: str) -> Piece:
        """The digit that the schedule calls `name`, which is parallelized, shifted or a plain loop."""
        digit = self.nest.digit(name)
        before = takewhile(lambda each: each.name != name, self.nest.digits_of(digit.axis))
        outer = math.prod(each.size for each in before)
        return self._piece_at(digit.axis, outer, digit.size, f"the schedule's digit {name}")

    def parallel(self) -> Layout:
        return {m: self.piece(name) for name, m in self.nest.parallel if self.nest.mesh.size(m) > 1}

    def home(self, operand: Operand) -> Layout:
        """The layout in which the caller holds an operand (its home)."""
        axes = {name: axis for name, axis in self.nest.home(operand.name).items() if self.nest.mesh.size(name) > 1}
        return {name: self._cuts_at_home(operand, axis)[name] for name, axis in axes.items()}

    def _cuts_at_home(self, operand: Operand, axis: str) -> Layout:
        """{mesh axis: digit} of all cuts of an axis at home (see `LoopNest.home_mesh_axes`)."""
        cuts, before = Layout(), 1
        for name in self.nest.home_mesh_axes(operand.name, axis):
            if (size := self.nest.mesh.size(name)) > 1:
                cuts[name] = self._piece_at(axis, before, size, f"the home of {operand.name} on mesh axis {name}")
            before *= size
        return cuts

    def needed(self, operand: Operand) -> Layout:
        """The layout of an input when the loops begin, and of an output (or its partial results) when they end."""
        layout: Layout = {}
        shifts = {mesh_axis: digit for digit, mesh_axis in self.nest.shifts}
        scan = self.nest.program.scan
        for digit, mesh_axis in self.nest.parallel:
            if self.nest.mesh.size(mesh_axis) == 1:
                continue
            shifted = shifts.get(mesh_axis)
            if scan and self.nest.digit(digit).axis == scan.axis and scan.blocks in operand.axes:
                layout[mesh_axis] = scan.blocks, self.nest.mesh.names.index(mesh_axis)
            elif self.nest.digit(digit).axis in operand.axes:
                layout[mesh_axis] = self.piece(digit)
            elif shifted and self.nest.digit(shifted).axis in operand.axes:
                layout[mesh_axis] = self.piece(shifted)
        return layout

    def place(self, operand: Operand, piece: Piece, layout: Layout) -> Place:
        """The place of a digit in a rank's tensor with this layout; of a digit that it distributes, where it would be."""
        axis, number = piece
        held = {index for name, index in layout.values() if name == axis}
        outer = math.prod(size for index, size in enumerate(self.sizes[axis][:number]) if index not in held)
        return Place(operand.axes.index(axis), outer)

    def local_shape(self, operand: Operand, layout: Layout) -> tuple[int, ...]:
        """The shape of a rank's block of an operand."""
        program = self.nest.program
        sizes = dict(zip(operand.axes, program.shape(operand), strict=True))
        for axis, number in layout.values():
            sizes[axis] //= self.sizes[axis][number]
        return tuple(sizes.values())

    def _piece_at(self, axis: str, outer: int, size: int, owner: str) -> Piece:
        """The digit of this size whose outer digits have `outer` blocks together."""
        before, sizes = 1, self.sizes[axis]
        for number, each in enumerate(sizes):
            if before == outer and each == size:
                return axis, number
            before *= each
        cuts = " x ".join(map(str, sizes))
        raise IllegalSchedule(
            f"{owner} needs {axis} cut into {outer} x {size}, but all operands and loops together cut it into {cuts}: "
            "tile the axis in the order of the mesh, or split the mesh axis"
        )

    def _check_chunks(self) -> None:
        if self.nest.chunked is None:
            return
        rule, program = f"chunk({self.nest.chunked})", self.nest.program
        if program.scan is not None:
            raise IllegalSchedule(f"{rule}: {program.name} has a scan, which cannot be divided into chunks")
        piece = self.piece(self.nest.chunked)
        for operand in program.operands:
            if piece in self._cuts_at_home(operand, piece[0]).values():
                where = f"{operand.name} is split over ranks along this digit at home"
                raise IllegalSchedule(f"{rule}: {where}, so it cannot number chunks")

    def _check_groups(self, operand: Operand) -> None:
        for axis, divisor in operand.groups:
            inner = self.sizes[axis][-1]
            if divisor > 1 and inner % divisor:
                size = self.nest.program.axis(axis).size
                count, blocks = size // divisor, size // inner
                rule = f"{count} {axis} do not divide over {blocks} blocks: {count} % {blocks} = {count % blocks}"
                raise IllegalSchedule(f"{operand.name}: {rule}")


def digits_of(nest: LoopNest) -> Digits:
    """The digits of a nest, found once and stored in it, as it is immutable. Raises IllegalSchedule as `Digits` does."""
    known: dict[str, Digits] = vars(nest)
    if "_digits" not in known:
        known["_digits"] = Digits(nest)
    return known["_digits"]


def digits_of_chunk(nest: LoopNest) -> Digits:
    """The digits of the nest of a single chunk (found once); without chunks, the digits of the nest."""
    known: dict[str, Digits] = vars(nest)
    if "_digits_of_chunk" not in known:
        known["_digits_of_chunk"] = digits_of(_of_one_chunk(nest))
    return known["_digits_of_chunk"]


def _of_one_chunk(nest: LoopNest) -> LoopNest:
    """The nest of one chunk by itself, with its elements numbered in their order."""
    if nest.chunked is None:
        return nest
    digit = nest.digit(nest.chunked)
    whole = nest.program.axis(digit.axis)
    part = replace(whole, size=whole.size // digit.size, order="contiguous")
    axes = tuple(part if axis.name == part.name else axis for axis in nest.program.axes)
    digits = tuple(each for each in nest.digits if each != digit)
    return replace(nest, program=replace(nest.program, axes=axes), digits=digits, chunked=None)


def conversions(digits: Digits, operand: Operand, have: Layout, want: Layout) -> Iterator[tuple[Step, Layout]]:
    """The steps that bring an operand from one layout to another, each with the layout after it.

    All-to-alls come first; then slices and swaps, which keep blocks small; and then gathers. Gathers start with the
    outermost mesh axis: its links are the slowest, and blocks are smallest before the first gather.
    """
    while have != want:
        possible = (kind(digits, operand, have, want) for kind in (_all_to_all, _slice, _swap, _gather))
        step, have = next(each for each in possible if each is not None)
        yield step, dict(have)


Conversion = tuple[Step, Layout]  # a step, and the layout after it


def _all_to_all(digits: Digits, operand: Operand, have: Layout, want: Layout) -> Conversion | None:
    """Exchange the digit that a mesh axis holds, unless another one wants it, for the local digit that it wants."""
    held, wanted = set(have.values()), set(want.values())
    for m in digits.nest.mesh.names:
        if m in have and m in want and have[m] != want[m] and have[m] not in wanted and want[m] not in held:
            after = {**have, m: want[m]}
            cut = digits.place(operand, want[m], have)
            return AllToAll(m, ((operand.name, cut, digits.place(operand, have[m], after)),)), after
    return None


def _slice(digits: Digits, operand: Operand, have: Layout, want: Layout) -> Conversion | None:
    """Keep one block of a local digit on each rank along a mesh axis that holds none, so that its ranks had the same."""
    for m in digits.nest.mesh.names:
        if m in want and m not in have and want[m] not in have.values():
            return Slice(m, ((operand.name, digits.place(operand, want[m], have)),)), {**have, m: want[m]}
    return None


def _swap(digits: Digits, operand: Operand, have: Layout, want: Layout) -> Conversion | None:
    """Move a digit to another mesh axis of equal size, where it is wanted, and that axis's digit, if it has one, here."""
    mesh = digits.nest.mesh
    for m in mesh.names:
        others = (other for other in mesh.names if want.get(other) == have.get(m) is not None and other != m)
        target = next(others, None)
        if target and mesh.size(target) == mesh.size(m):
            after = {name: piece for name, piece in have.items() if name not in (m, target)}
            after[target] = have[m]
            if target in have:
                after[m] = have[target]
            return Swap((m, target), (operand.name,)), after
    return None


def _gather(digits: Digits, operand: Operand, have: Layout, want: Layout) -> Conversion:
    """Gather the blocks of a digit that should not be on its mesh axis."""
    m = next(m for m in digits.nest.mesh.names if m in have and have[m] != want.get(m))
    after = {name: piece for name, piece in have.items() if name != m}
    return Gather(m, ((operand.name, digits.place(operand, have[m], after)),)), after


def scanning_mesh_axes(nest: LoopNest) -> list[str]:
    """The mesh axes along which ranks share the scanned axis, outermost first."""
    scan = nest.program.scan
    axes = {mesh_axis: nest.digit(name).axis for name, mesh_axis in nest.parallel if nest.mesh.size(mesh_axis) > 1}
    return [mesh_axis for mesh_axis, axis in axes.items() if scan and axis == scan.axis]


def block_sizes(nest: LoopNest) -> tuple[int, ...]:
    """The sizes of the digits of `scan.blocks`, the axis that numbers the blocks of the scanned axis: one size per mesh
    axis, and the number of blocks on a rank (2 in zigzag order).

    Mesh axes after the last one that splits the scanned axis are left out: their ranks hold adjacent blocks.
    """
    scan, shared = nest.program.scan, scanning_mesh_axes(nest)
    if scan is None or not shared:
        return (1,)
    cutting = nest.mesh.names[: nest.mesh.names.index(shared[-1]) + 1]
    return (*map(nest.mesh.size, cutting), 2 if nest.program.axis(scan.axis).order == "zigzag" else 1)


def _pieces(nest: LoopNest, axis: str) -> tuple[int, ...]:
    """The sizes of the digits between all cuts of an axis, outermost first.

    Raises IllegalSchedule if two cuts do not divide each other.
    """
    *outer, last = nest.digits_of(axis)
    is_last_cut = last.name in {*dict(nest.parallel), *dict(nest.shifts), *nest.order}
    cuts = {1, *accumulate((digit.size for digit in (*outer, *[last] * is_last_cut)), mul)}
    for operand in nest.program.operands:
        cutting = [nest.mesh.size(name) for name in nest.home_mesh_axes(operand.name, axis)]
        cuts |= set(accumulate(cutting, mul))
    ordered = sorted(cuts)
    for smaller, larger in zip(ordered, ordered[1:], strict=False):
        if larger % smaller:
            raise IllegalSchedule(
                f"{axis} is cut into {smaller} and into {larger} blocks, which do not divide each other: tile the axis in "
                "the order of the mesh"
            )
    sizes = [larger // smaller for smaller, larger in zip(ordered, ordered[1:], strict=False)]
    return (*sizes, nest.program.axis(axis).size // ordered[-1])


def _check_scan(nest: LoopNest) -> None:
    """Raise IllegalSchedule if a rank would scan in another order than that of the sequence, or in several tiles."""
    scan = nest.program.scan
    if scan is None:
        return
    if loops := [name for name in nest.order if nest.digit(name).size > 1]:
        raise IllegalSchedule(
            f"{loops[0]} is a loop, but {nest.program.name} scans {scan.axis}: a rank does that in one tile"
        )
    shared = scanning_mesh_axes(nest)
    cutting = nest.mesh.names[: nest.mesh.names.index(shared[-1]) + 1] if shared else ()
    expected = [(nest.mesh.size(m), m if m in shared else None) for m in cutting if nest.mesh.size(m) > 1]
    used = dict(nest.parallel)
    actual = [(digit.size, used.get(digit.name)) for digit in nest.digits_of(scan.axis) if digit.size > 1]
    if actual[: len(expected)] != expected:
        raise IllegalSchedule(f"{scan.axis} is scanned, so tile it in the order of the mesh, by {', '.join(cutting)}")
    kept = [tuple(nest.home_mesh_axes(operand.name, scan.axis))[: len(cutting)] for operand in nest.program.operands]
    if expected and nest.program.axis(scan.axis).order == "zigzag" and cutting not in kept:
        raise IllegalSchedule(
            f"{scan.axis} is in zigzag order, so at least one operand must be sharded along it at home on "
            f'{", ".join(cutting)}; otherwise set order="contiguous"'
        )


def check_homes(nest: LoopNest) -> None:
    """Raise IllegalSchedule if the ranks among which an operand is kept at home do not divide its axis."""
    for operand in nest.program.operands:
        home = nest.home(operand.name)
        for name in dict.fromkeys(home.values()):
            ranks = math.prod(map(nest.mesh.size, nest.home_mesh_axes(operand.name, name)))
            axis, divisor = nest.program.axis(name), operand.divisor(name)
            blocks = ranks * (2 if axis.order == "zigzag" and ranks > 1 else 1) * divisor
            if axis.size % blocks:
                what = " (zigzag order: two blocks for each rank)" if axis.order == "zigzag" and ranks > 1 else ""
                raise IllegalSchedule(
                    f"{operand.name}: axis {name} of {axis.size} does not divide over {ranks} ranks{what}: "
                    f"{axis.size} % {blocks} = {axis.size % blocks}"
                )
