"""The options of an operator in a graph (placements and layouts), what each costs, and the cost of changing a layout.

A layout names, for each mesh axis, the axis of a tensor that its ranks divide, or None where each holds all of it. The axis
along which the program keeps a tensor is always cut by the whole mesh, so that a mesh axis divides it in the same way in
every layout. Costs are those of the steps that lowering makes for each operator, and for each of its inputs by itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeVar

import numpy as np

from commir.ir.mesh import Mesh
from commir.ir.program import SPATIAL, WHOLE, Axis, Operand, Program, Result
from commir.lowering.accounting import account
from commir.lowering.lower import Schedule
from commir.lowering.operand_layouts import Digits, conversions
from commir.lowering.plan import Plan
from commir.lowering.timeline import seconds
from commir.scheduling.loop_nest import IllegalSchedule, LoopNest
from commir.scheduling.placements import Placement, place, streamed_axis

Sharding = tuple[str | None, ...]  # a layout
BY_GRAPH = "search_graph chose it for the least sum of the times of all operators"
Nest = TypeVar("Nest", bound=LoopNest)
TileTime = Callable[[Program], float]  # the seconds of a tile


@dataclass(frozen=True)
class GraphNode:
    """An operator of a graph.

    Attributes:
        name: different from those of the other operators.
        program: the operator.
        inputs: {operand: (producer, {axis of the producer's output: axis of this operand})}. The other operands are
            parameters, kept where the operator needs them. A producer may come later in the graph: its output then enters
            from the layer before, which has the same layouts.
    """

    name: str
    program: Program
    inputs: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)

    def parameters(self) -> list[Operand]:
        """The operands that no other operator makes."""
        return [operand for operand in self.program.inputs if operand.name not in self.inputs and not operand.source]

    def arriving(self, operand: str, out: Sharding) -> Sharding:
        """The layout of an input that its producer leaves in the layout `out`, in the names of this operator's axes."""
        renamed = self.inputs[operand][1]
        return tuple(None if axis is None else renamed.get(axis, axis) for axis in out)


@dataclass(frozen=True)
class Option:
    """A way to compute an operator.

    Attributes:
        axes: the loop of each mesh axis.
        out: the layout of the output.
        seconds: of the messages that it sends itself, with its inputs where it needs them; with measured times, also of its
            tiles.
        memory: bytes of its parameters on a rank.
        shifted: for each mesh axis, the loop that is shifted, so that blocks travel while tiles are computed, or "".
    """

    axes: tuple[str, ...]
    out: Sharding
    seconds: float
    memory: int
    shifted: tuple[str, ...] = ()

    @property
    def loops(self) -> list[tuple[str, str]]:
        """For each mesh axis, its loop and the loop that is shifted, or ""."""
        return list(zip(self.axes, self.shifted or ("",) * len(self.axes), strict=True))

    def needs(self, operand: Operand) -> Sharding:
        """The layout in which it takes an input."""
        return tuple(next((axis for axis in loops if axis in operand.axes), None) for loops in self.loops)

    def plan(self, operator: GraphNode, mesh: Mesh, arriving: Mapping[str, Sharding]) -> Plan:
        """The plan, where inputs come in the layouts `arriving`. Raises IllegalSchedule if they do not fit."""
        program = _with_parameters_anywhere(operator)
        homes = {operand.name: self.needs(operand) for operand in program.operands if not operand.source}
        for name in program.results[0].outputs:
            axes = program.operand(name).axes
            homes[name] = tuple(axis if axis in axes else None for axis in self.out)
        placed = [Placement(axis, bool(shifted), shifted or None) for axis, shifted in self.loops]
        placements = dict(zip(mesh.names, placed, strict=True))
        nest = _kept(Schedule(program, mesh), homes | dict(arriving))
        return replace(place(nest, **placements).lower(), reason=BY_GRAPH)

    def timed(self, operator: GraphNode, mesh: Mesh, time_of: TileTime | None) -> "Option":
        """The option with its time. Raises IllegalSchedule if it cannot be lowered."""
        plan = self.plan(operator, mesh, {})
        if time_of is not None:
            plan = replace(plan, tile_seconds=time_of(_tile_of(plan)))
        return replace(self, seconds=plan.seconds)


def options_of(
    operator: GraphNode, mesh: Mesh, memory: int | None, allowed: Sequence[tuple[str, ...]] | None,
    time_of: TileTime | None = None,
) -> list[Option]:  # fmt: skip
    """Every placement of the mesh axes on the operator's loops, with every layout in which it can leave its output.

    memory: the most bytes of parameters that a rank may hold. allowed: the placements to consider, if not all. time_of:
    the seconds of a tile; all placements are then also tried with blocks that travel while tiles are computed, unless
    `allowed` is given. Raises ValueError if none fits.
    """
    program = operator.program
    all_loops = [axis for axis in program.axes if axis.kind != WHOLE]
    loops = [axis.name for axis in all_loops if axis.size > 1] or [axis.name for axis in all_loops[:1]]
    placements = [each for each in allowed or product(loops, repeat=len(mesh.axes)) if _divides(program, mesh, each)]
    held = [sum(_block(program, operand, mesh, axes) for operand in operator.parameters()) for axes in placements]
    options, refused = list[Option](), list[IllegalSchedule]()
    for axes, nbytes in zip(placements, held, strict=True):
        if memory is None or nbytes <= memory:
            for shifted in _shifts(operator, mesh, axes) if time_of is not None and allowed is None else [()]:
                for out in product(*_targets(program, mesh, axes, shifted)):
                    try:
                        options.append(Option(tuple(axes), out, 0.0, nbytes, shifted).timed(operator, mesh, time_of))
                    except IllegalSchedule as error:
                        refused.append(error)
    if options:
        return options
    if not placements:
        sizes = ", ".join(f"{name} {program.most_blocks(name)}" for name in loops)
        raise ValueError(f"{operator.name}: no placement divides its axes (into at most {sizes} blocks) over {mesh!r}")
    if not refused:
        raise ValueError(f"{operator.name}: memory={memory}: its parameters need at least {min(held)} bytes of a rank")
    raise ValueError(f"{operator.name}: no plan on {mesh!r}: {refused[0]}")


def _targets(program: Program, mesh: Mesh, axes: Sequence[str], shifted: Sequence[str] = ()) -> list[list[str | None]]:
    """For each mesh axis, how its ranks may leave the output: where it is computed, or whole; partial results where they
    travel, or scattered.
    """
    (output, *_) = program.outputs
    loops = [name for name in output.axes if program.axis(name).kind != WHOLE]
    targets: list[list[str | None]] = []
    for part, axis, ring in zip(mesh.axes, axes, shifted or ("",) * len(axes), strict=True):
        partial_at: list[str | None] = [ring] if ring in output.axes else [None, *loops]
        targets.append([None] if part.size == 1 else [axis, None] if axis in output.axes else partial_at)
    return targets


def _shifts(operator: GraphNode, mesh: Mesh, axes: Sequence[str]) -> list[tuple[str, ...]]:
    """For each mesh axis, "" and the loop along which an operand that is no parameter can travel; all combinations."""
    nest = LoopNest(_with_parameters_anywhere(operator), mesh)
    is_scan = operator.program.scan is not None
    rings = [None if is_scan or m.size == 1 else streamed_axis(nest, m.name, axis)
             for m, axis in zip(mesh.axes, axes, strict=True)]  # fmt: skip
    return list(product(*(("", ring) if ring else ("",) for ring in rings)))


def _tile_of(plan: Plan) -> Program:
    nest = plan.schedule
    outside = {*dict(nest.parallel), *nest.order}
    sizes = {axis: math.prod(digit.size for digit in nest.digits_of(axis) if digit.name not in outside)
             for axis in {digit.axis: None for digit in nest.digits}}  # fmt: skip
    return plan.program.resized(**sizes)


def tile_name(tile: Program) -> str:
    """A description of a tile by everything that its time depends on."""
    sizes = ", ".join(f"{axis.name} {axis.size}" for axis in tile.axes)
    groups = "".join(f", {x.name} in groups of {n} {axis}" for x in tile.operands for axis, n in x.groups if n > 1)
    options = "".join(f", {name}={value}" for name, value in tile.options)
    return f"{tile.tile} in {tile.dtype}: {sizes}{groups}{options}"


def _with_parameters_anywhere(operator: GraphNode) -> Program:
    """The program without homes of parameters, whose axes need not divide over the whole mesh."""
    names = {operand.name for operand in operator.parameters()}
    inputs = (replace(operand, home=None) if operand.name in names else operand for operand in operator.program.inputs)
    return replace(operator.program, inputs=tuple(inputs))


def _kept(nest: Nest, homes: Mapping[str, Sharding]) -> Nest:
    """The schedule with operands at home in these layouts."""
    for name, layout in homes.items():
        for mesh_axis, axis in zip(nest.mesh.names, layout, strict=True):
            nest = nest.replicate(name, mesh_axis) if axis is None else nest.shard(name, axis, mesh_axis)
    return nest


def _divides(program: Program, mesh: Mesh, axes: Sequence[str]) -> bool:
    ranks = {name: math.prod(m.size for m, axis in zip(mesh.axes, axes, strict=True) if axis == name) for name in axes}
    return all(program.most_blocks(name) % number == 0 for name, number in ranks.items())


def _block(program: Program, operand: Operand, mesh: Mesh, axes: Sequence[str]) -> int:
    ranks = math.prod(part.size for part, axis in zip(mesh.axes, axes, strict=True) if axis in operand.axes)
    return program.nbytes(operand) // ranks


class Relayouts:
    """The time to bring a tensor from one layout to another on a mesh, remembered for equal shapes."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._known: dict[tuple[object, ...], float] = {}

    def edge(
        self, producer: GraphNode, have: Sequence[Option], consumer: GraphNode, want: Sequence[Option], operand: str
    ) -> np.ndarray:
        """The time between every option of the producer and every one of the consumer; infinite if it is not possible."""
        taken = consumer.program.operand(operand)
        left, right = _numbered([option.out for option in have]), _numbered([option.needs(taken) for option in want])
        table = np.array([
            [self.seconds(consumer.program, taken, consumer.arriving(operand, out), needed) for needed in right[0]]
            for out in left[0]
        ])  # fmt: skip
        return table[np.ix_(left[1], right[1])]

    def seconds(self, program: Program, operand: Operand, have: Sharding, want: Sharding) -> float:
        """The time for an operand; infinite if lowering cannot cut it so, or `have` names an axis that it lacks."""
        numbers = {axis: number for number, axis in enumerate(operand.axes)}
        dims = tuple(tuple(numbers.get(axis, axis) for axis in each) for each in (have, want))  # type: ignore[arg-type]
        whole = [program.axis(name).kind == WHOLE for name in operand.axes]
        home = operand.axes.index(operand.home) if operand.home else None
        key = program.shape(operand), program.itemsize(operand), tuple(whole), home, dims
        if key not in self._known:
            self._known[key] = self._seconds(program, operand, have, want)
        return self._known[key]

    def _seconds(self, program: Program, operand: Operand, have: Sharding, want: Sharding) -> float:
        kinds = (WHOLE if program.axis(name).kind == WHOLE else SPATIAL for name in operand.axes)
        axes = tuple(map(Axis, operand.axes, program.shape(operand), kinds))
        x, y = (Operand(name, operand.axes, operand.home) for name in ("x", "y"))
        dtype = "float32" if operand.is_wide and program.itemsize(operand) == 4 else program.dtype
        tile, results = f"x[{', '.join(x.axes)}]", (Result("sum", ("y",)),)
        copy = Program("copy", axes, (x,), (y,), results, tile, (), dtype)
        try:
            digits = Digits(_kept(LoopNest(copy, self._mesh), {"x": have, "y": want}))
            steps = [step for step, _ in conversions(digits, x, digits.home(x), digits.home(y))]
        except IllegalSchedule:
            return math.inf
        return seconds(self._mesh, steps, account(digits, steps).by_step)


def _numbered(layouts: Sequence[Sharding]) -> tuple[list[Sharding], list[int]]:
    """(the different layouts, the number of each one among them)."""
    different = list(dict.fromkeys(layouts))
    return different, [different.index(each) for each in layouts]
