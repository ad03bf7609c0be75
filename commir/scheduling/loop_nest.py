"""The primitives of the paper (section 4.1, Table 2) as pure functions from schedule to schedule, with legality rules.

The index of each axis is a number in mixed radix, whose digits `tile` introduces. Each digit is one of these:

- the coordinate x of a rank along a mesh axis (`parallelize`),
- the counter t of a loop that every rank runs shifted by its coordinate, (t + x) mod T (`shift`),
- a plain loop counter inside a rank (`reorder`),
- the number of a chunk: a rank takes all steps for one chunk after the other (`chunk`),
- an index inside the tile, which a kernel computes (all other digits).

A `LoopNest` is the normal form of a sequence of primitives. It is immutable, and two sequences with the same normal form are
equal.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import Self

from commir.ir.mesh import Mesh
from commir.ir.program import SCANNED, WHOLE, Program
from commir.programs.kernels import kernels_of


@dataclass(frozen=True)
class Digit:
    """A digit of an axis's index."""

    name: str
    axis: str
    size: int


class IllegalSchedule(ValueError):
    """A primitive was applied where its legality rule forbids it. The message names the rule."""


Illegal = IllegalSchedule  # an alias


@dataclass(frozen=True)
class LoopNest:
    """A program on a mesh, and how its loops are divided: `Schedule(program, mesh).tile(...).parallelize(...).lower()`.

    Attributes:
        digits: the digits of each axis, outermost first, axis by axis.
        parallel: (digit, mesh axis) of the digits that ranks divide.
        shifts: (digit, mesh axis) of the loops that are shifted.
        order: the loops of a rank, outermost first.
        homes: (operand, mesh axis, axis or None) where the home of an operand differs from the program's.
        kernel: the implementation of the tile, "library" or another that `patch` takes.
        chunked: the digit that numbers the chunks, if there are any.
    """

    program: Program
    mesh: Mesh
    digits: tuple[Digit, ...] = ()
    parallel: tuple[tuple[str, str], ...] = ()
    shifts: tuple[tuple[str, str], ...] = ()
    order: tuple[str, ...] = ()
    homes: tuple[tuple[str, str, str | None], ...] = ()
    kernel: str = "library"
    chunked: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.program, Program) or not isinstance(self.mesh, Mesh):
            given = f"{type(self.program).__name__} and {type(self.mesh).__name__}"
            raise ValueError(f"expected a Program (call an operator to get one) and a Mesh, not {given}")
        if not self.digits:
            loops = (axis for axis in self.program.axes if axis.kind != WHOLE)
            object.__setattr__(self, "digits", tuple(Digit(axis.name, axis.name, axis.size) for axis in loops))

    # Primitives

    def tile(self, digit: str, factor: int, outer: str | None = None, inner: str | None = None) -> Self:
        """Split a digit into `factor` blocks: the digits `outer` (of size factor) and `inner`.

        Args:
            digit: the digit to split; at first each axis is one digit.
            factor: the number of blocks, which divides the size of the digit.
            outer, inner: names of the new digits, by default `digit.o` and `digit.i`.

        Raises:
            IllegalSchedule: the factor does not divide the size, a name is taken (by another digit or axis), the digit is
                parallelized or shifted, or loops were reordered before.
        """
        whole, rule = self.digit(digit), f"tile({digit}, {factor})"
        outer, inner = f"{digit}.o" if outer is None else outer, f"{digit}.i" if inner is None else inner
        self._refuse_bound(digit, "tile it before that")
        if factor < 1 or whole.size % factor:
            raise IllegalSchedule(f"{rule}: {factor} does not divide {digit}, which has size {whole.size}")
        self._check_names(rule, [outer, inner], [whole])
        parts = Digit(outer, whole.axis, factor), Digit(inner, whole.axis, whole.size // factor)
        digits = [part for digit in self.digits for part in (parts if digit is whole else (digit,))]
        return self._with_loops(digits=tuple(digits))

    def join(self, outer: str, inner: str, name: str | None = None) -> Self:
        """Merge two adjacent digits of one axis into one, the inverse of `tile`.

        The paper's join also merges loops of two axes, which are then parallelized together. Here each is parallelized on
        its own part of the mesh axis (`Mesh.split`, the outer loop on the outer part), so that every rank has the same
        block.

        Args:
            outer, inner: the digits.
            name: of the merged digit. By default it is that of the axis, and so it always is if no other digit of the axis
                is left.

        Raises:
            IllegalSchedule: they are not adjacent digits of one axis, one is parallelized or shifted, loops were reordered
                before, or the name is taken.
        """
        first, second, rule = self.digit(outer), self.digit(inner), f"join({outer}, {inner})"
        index = self.digits.index(first)
        if first.axis != second.axis:
            raise IllegalSchedule(
                f"{rule}: {outer} is a digit of {first.axis} and {inner} of {second.axis}; a digit counts blocks of one "
                "axis. Parallelize each on a part of the mesh axis, which `Mesh.split` makes"
            )
        if self.digits[index + 1 : index + 2] != (second,):
            raise IllegalSchedule(f"{rule}: {inner} is not the next digit of axis {first.axis} after {outer}")
        for digit in (outer, inner):
            self._refuse_bound(digit, "join it before that")
        name = first.axis if name is None or len(self.digits_of(first.axis)) == 2 else name
        self._check_names(rule, [name], [first, second])
        merged = Digit(name, first.axis, first.size * second.size)
        return self._with_loops(digits=(*self.digits[:index], merged, *self.digits[index + 2 :]))

    def reorder(self, *loops: str) -> Self:
        """Run these digits as loops of a rank, outermost first. All others that are not parallelized are inside the tile.

        It comes after `tile`, `join`, `parallelize` and `shift`. An output that a loop does not index is kept whole while
        the loop runs, which `Plan.memory` counts.

        Raises:
            IllegalSchedule: a shifted digit is missing, a parallelized one is named, one is named twice, or digits of a
                scanned axis change their order.
        """
        rule, loops = f"reorder({', '.join(loops)})", tuple(self.digit(name).name for name in loops)
        if missing := [name for name, _ in self.shifts if name not in loops]:
            raise IllegalSchedule(f"{rule}: {missing[0]} is shifted, so it is a loop and must be named")
        for name in loops:
            if name in (*dict(self.parallel), self.chunked):
                how = "chunked" if name == self.chunked else "parallelized"
                raise IllegalSchedule(f"{rule}: {name} is {how}, so it cannot be a loop of a rank")
            if loops.count(name) > 1:
                raise IllegalSchedule(f"{rule}: {name} is named twice")
        scanned = [digit.name for digit in self.digits if digit.name in loops and self._kind(digit.name) == SCANNED]
        if [name for name in loops if self._kind(name) == SCANNED] != scanned:
            raise IllegalSchedule(f"{rule}: digits of a scanned axis keep their order, {', '.join(scanned)}")
        return replace(self, order=loops)

    def parallelize(self, digit: str, mesh_axis: str) -> Self:
        """Compute the blocks of a digit on the ranks along a mesh axis.

        Outputs that the digit indexes are then sharded; others become partial results, which lowering combines.

        Raises:
            IllegalSchedule: the sizes differ, the mesh axis has a digit already, the digit is parallelized or shifted, or
                loops were reordered before.
        """
        blocks, size, rule = self.digit(digit).size, self.mesh.size(mesh_axis), f"parallelize({digit}, {mesh_axis})"
        self._refuse_bound(digit, "parallelize another digit")
        if blocks != size:
            advice = f"tile it by {size} first" if blocks % size == 0 else f"{size} does not divide {blocks}"
            raise IllegalSchedule(f"{rule}: {digit} has size {blocks}, mesh axis {mesh_axis} {size}: {advice}")
        if other := self.digit_on(mesh_axis):
            raise IllegalSchedule(f"{rule}: mesh axis {mesh_axis} has the digit {other.name} already")
        return self._with_loops(parallel=self._bound(self.parallel, digit, mesh_axis))

    def shift(self, digit: str, mesh_axis: str) -> Self:
        """Run the loop over a digit shifted by the rank's coordinate along a mesh axis, so that blocks travel in a ring.

        Raises:
            IllegalSchedule: no digit is parallelized on the mesh axis, the sizes differ, the digit is parallelized or
                shifted, its axis is scanned, the mesh axis has a shift already, loops were reordered before, or nothing
                would travel because no operand is indexed by this digit and not by the parallelized one.
        """
        loop, size, rule = self.digit(digit), self.mesh.size(mesh_axis), f"shift({digit}, {mesh_axis})"
        self._refuse_bound(digit, "shift another digit")
        owner = self.digit_on(mesh_axis)
        if owner is None:
            raise IllegalSchedule(f"{rule}: no digit is parallelized on {mesh_axis}; parallelize one first")
        if loop.size != size:
            sizes = f"{digit} has size {loop.size}, mesh axis {mesh_axis} {size}"
            raise IllegalSchedule(f"{rule}: {sizes}; they must be equal")
        if self._kind(digit) == SCANNED:
            raise IllegalSchedule(f"{rule}: {loop.axis} is scanned, and a scan has only one order")
        if any(used == mesh_axis for _, used in self.shifts):
            raise IllegalSchedule(f"{rule}: mesh axis {mesh_axis} has a shifted loop already")
        if not any(loop.axis in x.axes and owner.axis not in x.axes for x in self.program.operands):
            indexed = f"no operand is indexed by {loop.axis} and not by {owner.axis}"
            raise IllegalSchedule(f"{rule}: {indexed}; nothing would travel")
        return self._with_loops(shifts=self._bound(self.shifts, digit, mesh_axis))

    def shard(self, operand: str, axis: str, mesh_axis: str) -> Self:
        """Keep an operand sharded along `axis` over a mesh axis at home: before the loops (inputs) or after them (outputs).

        Raises:
            IllegalSchedule: the operand is not indexed by the axis, every tile needs all of the axis, or (when the schedule
                is lowered) the mesh axis does not divide it.
        """
        rule = f"shard({operand}, {axis}, {mesh_axis})"
        if axis not in self.program.operand(operand).axes:
            raise IllegalSchedule(f"{rule}: {operand} is not indexed by {axis}")
        if self.program.axis(axis).kind == WHOLE:
            raise IllegalSchedule(f"{rule}: {axis} is whole in every tile, so it cannot be sharded")
        return self._with_home(operand, mesh_axis, axis)

    def replicate(self, operand: str, mesh_axis: str) -> Self:
        """Keep an operand whole on all ranks along a mesh axis at home."""
        return self._with_home(operand, mesh_axis, None)

    def patch(self, kernel: str) -> Self:
        """Compute the tile by another kernel: "library", "reference" (if `Program.kernels` has it), "compiled" (the plain
        operations under `torch.compile`, except of scans), or one of your own (`commir.kernel`).

        Raises:
            IllegalSchedule: the program has no such kernel.
        """
        if kernel not in (kernels := kernels_of(self.program)):
            known = " or ".join(kernels)
            raise IllegalSchedule(f"patch({kernel}): {self.program.name} has no kernel {kernel!r}: expected {known}")
        return replace(self, kernel=kernel)

    def chunk(self, digit: str) -> Self:
        """Take all steps for one block of a digit after the other, so that a rank holds less at a time.

        An input that the digit does not index is brought again for every block.

        Raises:
            IllegalSchedule: the digit is parallelized, shifted, of size 1 or the innermost of its axis; an output is not
                indexed by its axis; or another digit is chunked already. Lowering refuses a digit that an operand's home
                divides, and a program with a scan.
        """
        axis, rule = self.digit(digit).axis, f"chunk({digit})"
        self._refuse_bound(digit, "chunk another digit")
        if self.chunked is not None:
            raise IllegalSchedule(f"{rule}: {self.chunked} is chunked already, and a schedule has chunks of one digit")
        if digit == self.digits_of(axis)[-1].name:
            raise IllegalSchedule(
                f"{rule}: {digit} is the innermost digit of {axis}; tile it, and chunk the outer digit"
            )
        if other := next((operand.name for operand in self.program.outputs if axis not in operand.axes), None):
            raise IllegalSchedule(f"{rule}: {other} is not indexed by {axis}, so chunks would have to be combined")
        return replace(self, chunked=digit, order=tuple(name for name in self.order if name != digit))

    # Queries

    def digit(self, name: str) -> Digit:
        """The digit of this name. Raises IllegalSchedule if there is none."""
        for digit in self.digits:
            if digit.name == name:
                return digit
        names = ", ".join(digit.name for digit in self.digits)
        raise IllegalSchedule(f"{self.program.name} has no digit {name!r}: expected {names}")

    def digits_of(self, axis: str) -> list[Digit]:
        return [digit for digit in self.digits if digit.axis == axis]

    def digit_on(self, mesh_axis: str) -> Digit | None:
        return next((self.digit(name) for name, used in self.parallel if used == mesh_axis), None)

    def home(self, operand: str) -> dict[str, str]:
        """{mesh axis: axis} along which an operand is sharded at home. Mesh axes over which it is whole are missing."""
        axes: dict[str, str | None] = dict.fromkeys(self.mesh.names, self.program.operand(operand).home)
        axes |= {mesh_axis: axis for name, mesh_axis, axis in self.homes if name == operand}
        return {mesh_axis: axis for mesh_axis, axis in axes.items() if axis is not None}

    def home_mesh_axes(self, operand: str, axis: str) -> list[str]:
        """The mesh axes that cut `axis` at the home of an operand, outermost first.

        They include those along which `shard` or `replicate` has moved the home elsewhere: the blocks of the others, if
        there are any, stay as they were, so that a rank may hold blocks that are not neighbours.
        """
        own = self.program.operand(operand).home
        if not self.homes:
            return list(self.mesh.names) if axis == own else []
        home = self.home(operand)
        if axis not in home.values():
            return []
        return [name for name in self.mesh.names if axis in (home.get(name), own)]

    def primitives(self) -> list[tuple[Any, ...]]:
        """The normal form as a sequence of primitives, which give an equal schedule when applied to a new one."""
        steps: list[tuple[Any, ...]] = []
        mark = "#" * (1 + max(digit.name.count("#") for digit in self.digits))  # no digit has a name with this mark
        for axis in dict.fromkeys(digit.axis for digit in self.digits):
            *outer, last = self.digits_of(axis)
            rest = axis
            for number, digit in enumerate(outer, 1):
                inner = last.name if number == len(outer) else f"{axis}{mark}{number}"
                steps.append(("tile", rest, digit.size, digit.name, inner))
                rest = inner
        steps += [("parallelize", *bound) for bound in self.parallel] + [("shift", *bound) for bound in self.shifts]
        steps += [("reorder", *self.order)] if self.order != self.default_order() else []
        for operand, mesh_axis, home in self.homes:
            steps.append(("replicate", operand, mesh_axis) if home is None else ("shard", operand, home, mesh_axis))
        steps += [("chunk", self.chunked)] if self.chunked else []
        return steps + ([("patch", self.kernel)] if self.kernel != "library" else [])

    @property
    def chunks(self) -> int:
        """The number of chunks; a rank takes all steps once for each."""
        return self.digit(self.chunked).size if self.chunked else 1

    def apply(self, primitives: Iterable[Iterable[Any]]) -> Self:
        """Apply primitives in the form in which `primitives` lists them.

        Raises:
            IllegalSchedule: as the primitive does.
            ValueError: there is no such primitive.
        """
        schedule = self
        for name, *arguments in primitives:
            if name not in PRIMITIVES:
                raise ValueError(f"unknown primitive {name!r}: expected {', '.join(PRIMITIVES)}")
            schedule = getattr(schedule, name)(*arguments)
        return schedule

    def __str__(self) -> str:
        """The loop that each mesh axis computes, and the loops that are shifted; `primitives` lists everything."""
        shifted = {mesh_axis: self.digit(name).axis for name, mesh_axis in self.shifts}
        parts = []
        for name, mesh_axis in self.parallel:
            ring = f" with {shifted[mesh_axis]} shifted" if mesh_axis in shifted else ""
            parts.append(f"{self.digit(name).axis} on {mesh_axis}{ring}")
        for operand, mesh_axis, axis in self.homes:
            parts.append(f"{operand} kept {f'along {axis}' if axis else 'whole'} on {mesh_axis}")
        parts += [f"loops {', '.join(self.order)}"] if self.order != self.default_order() else []
        parts += [f"{self.digit(self.chunked).axis} in {self.chunks} chunks"] if self.chunked else []
        return f"{self.program.name} on {self.mesh!r}: {'; '.join(parts) or 'one rank computes everything'}"

    def _kind(self, digit: str) -> str:
        return self.program.axis(self.digit(digit).axis).kind

    def _bound(self, known: tuple[tuple[str, str], ...], digit: str, mesh_axis: str) -> tuple[tuple[str, str], ...]:
        return tuple(sorted((*known, (digit, mesh_axis)), key=lambda each: self.mesh.names.index(each[1])))

    def _check_names(self, rule: str, names: list[str], replaced: list[Digit]) -> None:
        """Raise IllegalSchedule unless these names can be given to the digits that replace others of one axis."""
        taken = {digit.name for digit in self.digits if digit not in replaced}
        taken |= {axis.name for axis in self.program.axes if axis.name != replaced[0].axis}
        for name in names:
            if name in taken:
                raise IllegalSchedule(f"{rule}: the name {name} is taken")
            taken.add(name)

    def _refuse_bound(self, digit: str, advice: str) -> None:
        if digit == self.chunked:
            raise IllegalSchedule(f"{digit} is chunked already; {advice}")
        for name, mesh_axis in (*self.parallel, *self.shifts):
            if name == digit:
                how = "parallelized" if (name, mesh_axis) in self.parallel else "shifted"
                raise IllegalSchedule(f"{digit} is {how} on {mesh_axis} already; {advice}")

    def _with_home(self, operand: str, mesh_axis: str, axis: str | None) -> Self:
        self.program.operand(operand), self.mesh.size(mesh_axis)
        others = {(name, used): old for name, used, old in self.homes if (name, used) != (operand, mesh_axis)}
        if axis != self.program.operand(operand).home:
            others[operand, mesh_axis] = axis
        return replace(self, homes=tuple(sorted((*key, each) for key, each in others.items())))

    def default_order(self) -> tuple[str, ...]:
        """The shifted digits, in the order of the program's axes."""
        shifted = dict(self.shifts)
        return tuple(digit.name for digit in self.digits if digit.name in shifted)

    def _with_loops(self, **changes: Any) -> Self:
        """The schedule with other digits, or other uses of them, and the default order of its loops."""
        if self.order != self.default_order():
            rule = f"reorder({', '.join(self.order)}) must come after all tile, join, parallelize and shift"
            raise IllegalSchedule(f"{rule}, which decide what is a loop")
        changed = replace(self, **changes)
        return replace(changed, order=changed.default_order())


PRIMITIVES = ("tile", "join", "reorder", "parallelize", "shift", "shard", "replicate", "chunk", "patch")
