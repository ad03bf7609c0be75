"""The best layouts of all operators of a model together (paper, section 7.4, Algorithm 1), and their plans.

Each operator has options: a placement of the mesh's axes, and the layout in which it leaves its output. An option costs the
messages that it sends itself; an edge costs those that turn the producer's layout into the consumer's. The least sum is
found exactly, without enumeration. Without measured times of tiles only messages count, because every rank always has an
equal share of the loops, except under a causal mask.

Each edge is priced by itself. Where several inputs of an operator travel together, or arrive in layouts that cut its axes
differently, the operator's plan takes a little less, or more.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

import numpy as np

from commir.ir.mesh import Mesh
from commir.ir.program import Operand, Program
from commir.lowering.plan import Plan
from commir.lowering.timeline import EQUAL_SPEED
from commir.scheduling.loop_nest import IllegalSchedule

from .elimination import minimize
from .operator_options import GraphNode, Option, Relayouts, options_of, tile_name

MOST_TRIES = 1000  # combinations that are lowered until one fits


@dataclass(frozen=True)
class GraphPlan:
    """The chosen option of each operator.

    Attributes:
        operators: the graph.
        mesh: the ranks.
        chosen: {operator: its option}.
        seconds: of all messages, resharding included; with measured times, also of the tiles.
        resharding: {edge: seconds}.
        is_timed: measured times of tiles are counted.
    """

    operators: tuple[GraphNode, ...]
    mesh: Mesh
    chosen: dict[str, Option]
    seconds: float
    resharding: dict[tuple[str, str], float]
    is_timed: bool = False

    def explain(self) -> str:
        """One line for each operator, with the loop on each axis of the mesh, and for each resharded edge, and the total.

        Each has its predicted seconds or, if the mesh has no speeds, the bytes that a rank sends.
        """
        lines = []
        for name, option in self.chosen.items():
            places = zip(option.loops, self.mesh.names, strict=True)
            divided = (f"{axis} on {level}" + f" with {ring} shifted" * bool(ring) for (axis, ring), level in places)
            lines.append(f"{name}: {'; '.join(divided)}; {self._amount(option.seconds)}")
        lines += [f"{a} -> {b}: {self._amount(time)}" for (a, b), time in self.resharding.items() if time]
        return "\n".join([*lines, f"in all {self._amount(self.seconds)}" + " of messages" * (not self.is_timed)])

    def _amount(self, seconds: float) -> str:
        """A time; without speeds, the bytes that a rank sends in it, as all links then count as EQUAL_SPEED."""
        return f"{seconds:.3g} s" if self.mesh.speeds else f"{round(seconds * EQUAL_SPEED[1]):,} bytes"

    def plans(self) -> dict[str, Plan]:
        """{operator: its plan}, which takes each input in the layout in which its producer leaves it.

        Raises:
            IllegalSchedule: an operator's inputs arrive in layouts that lowering cannot cut all at once.
        """
        return {operator.name: self._plan_of(operator) for operator in self.operators}

    def first_illegal(self) -> GraphNode | None:
        """The first operator whose inputs arrive in layouts that lowering cannot cut all at once, or None."""
        for operator in self.operators:
            try:
                self._plan_of(operator)
            except IllegalSchedule:
                return operator
        return None

    def _plan_of(self, operator: GraphNode) -> Plan:
        edges = operator.inputs.items()
        arriving = {x: operator.arriving(x, self.chosen[producer].out) for x, (producer, _) in edges}
        return self.chosen[operator.name].plan(operator, self.mesh, arriving)


def search_graph(
    operators: Sequence[GraphNode], mesh: Mesh, memory: int | None = None,
    allowed: Mapping[str, Sequence[tuple[str, ...]]] | None = None, times: Mapping[str, float] | None = None,
) -> GraphPlan:  # fmt: skip
    """Find the options of all operators that together take the least time.

    Args:
        operators: the graph.
        mesh: the ranks, with the speeds of its levels.
        memory: the most bytes of parameters that a rank may hold of any one operator.
        allowed: {operator: the loops of the mesh axes that it may take}, to compare with a fixed layout.
        times: of the operators' tiles, as `measure_operators` returns them. Blocks may then also travel while tiles are
            computed (AsyncTP, rings), except in layouts that `allowed` gives. Without, only messages count.

    Raises:
        KeyError: `times` were measured for another graph or mesh.
        ValueError: an operator has no option, two have one name, an input does not fit what its producer makes, or no
            layouts fit together (or none of the MOST_TRIES fastest that each input allows by itself).
    """
    allowed = {} if allowed is None else allowed
    check_edges(operators)
    time_of = None if times is None else lambda tile: times[tile_name(tile)]
    options: dict[str, list[Option]] = {}
    known: dict[object, list[Option]] = {}  # operators with the same program and parameters share their options
    for operator in operators:
        placements = allowed.get(operator.name)
        key = operator.program, frozenset(operator.inputs), None if placements is None else tuple(placements)
        if key not in known:
            known[key] = options_of(operator, mesh, memory, placements, time_of)
        options[operator.name] = known[key]
    relayouts, by_name = Relayouts(mesh), {operator.name: operator for operator in operators}
    edges: dict[tuple[str, str], np.ndarray] = {}
    for consumer in operators:
        for operand, (producer, _) in consumer.inputs.items():
            ends = by_name[producer], options[producer], consumer, options[consumer.name]
            costs = relayouts.edge(*ends, operand)
            edges[producer, consumer.name] = edges.get((producer, consumer.name), 0) + costs
    return replace(_cheapest(operators, mesh, options, edges), is_timed=times is not None)


def _cheapest(
    operators: Sequence[GraphNode], mesh: Mesh, options: Mapping[str, list[Option]],
    edges: Mapping[tuple[str, str], np.ndarray],
) -> GraphPlan:  # fmt: skip
    """The least sum that can be lowered.

    Inputs of one operator may arrive in layouts that cut its axes differently. All other combinations are then divided into
    parts, and the part with the least sum is tried next, at most MOST_TRIES times.
    """
    names, order = [operator.name for operator in operators], count()
    numbered = {(names.index(a), names.index(b)): costs for (a, b), costs in edges.items()}
    parts: list[tuple[float, int, list[int], list[np.ndarray]]] = []

    def add(own: list[np.ndarray]) -> None:
        """Add the part in which these options, whose time is finite, are left."""
        picks, total = minimize(own, numbered)
        if math.isfinite(total):
            heappush(parts, (total, next(order), picks, own))

    add([np.array([option.seconds for option in options[name]]) for name in names])
    for _ in range(MOST_TRIES):
        if not parts:
            raise ValueError(f"no layouts of the operators on {mesh!r} can be turned into one another")
        total, _, picks, own = heappop(parts)
        chosen = {name: options[name][pick] for name, pick in zip(names, picks, strict=True)}
        paid = {
            (a, b): float(numbered[i, j][picks[i], picks[j]]) for (a, b), (i, j) in zip(edges, numbered, strict=True)
        }
        plan = GraphPlan(tuple(operators), mesh, chosen, total, paid)
        failing = plan.first_illegal()
        if failing is None:
            return plan
        for node, fails in _combination(failing, names, options, chosen):
            add([*own[:node], np.where(fails, math.inf, own[node]), *own[node + 1 :]])
            own = [*own[:node], np.where(fails, own[node], math.inf), *own[node + 1 :]]
    raise ValueError(f"the {MOST_TRIES} fastest layouts of the operators on {mesh!r} cannot be lowered")


def _combination(
    failing: GraphNode, names: Sequence[str], options: Mapping[str, list[Option]], chosen: Mapping[str, Option]
) -> Iterator[tuple[int, np.ndarray]]:
    """(number of an operator, True for its options) of what failed together: one option, and layouts of its inputs."""
    for name in dict.fromkeys(producer for producer, _ in failing.inputs.values()):
        yield names.index(name), np.array([option.out == chosen[name].out for option in options[name]])
    yield names.index(failing.name), np.array([option == chosen[failing.name] for option in options[failing.name]])


def check_edges(operators: Sequence[GraphNode]) -> None:
    """Raise ValueError if two operators have one name, or an input does not fit what its producer makes."""
    by_name: dict[str, GraphNode] = {}
    for operator in operators:
        if operator.name in by_name:
            raise ValueError(f"two operators are called {operator.name}")
        by_name[operator.name] = operator
    for consumer in operators:
        for operand, (producer, renamed) in consumer.inputs.items():
            edge = f"{consumer.name} takes {operand} from {producer}"
            if producer not in by_name or producer == consumer.name:
                raise ValueError(f"{edge}: expected another operator of the graph")
            taken = consumer.program.operand(operand)
            if wrong := _misfit(by_name[producer].program, consumer.program, taken, renamed):
                raise ValueError(f"{edge}: {wrong}")


def _misfit(producer: Program, consumer: Program, taken: Operand, renamed: Mapping[str, str]) -> str:
    """Return the rule that an edge breaks, or "". renamed: {axis of what the producer makes: axis of the operand}."""
    made = producer.outputs[0]
    for before, after in renamed.items():
        if before not in made.axes or after not in taken.axes:
            axes = f"{made.name} has {', '.join(made.axes)}, and {taken.name} {', '.join(taken.axes)}"
            return f"{before} as {after}, but {axes}"
        orders = producer.axis(before).order, consumer.axis(after).order
        if orders[0] != orders[1]:
            return f"{before} is in {orders[0]} order, {after} in {orders[1]} order"
    if made.home is not None and made.home not in renamed and taken.home is not None:
        return f"the edge must say which axis of {taken.name} is {made.home}, along which {made.name} is kept"
    if renamed.get(made.home or "") != taken.home:
        return f"{made.name} is kept along {made.home}, and {taken.name} along another axis, {taken.home}"
    sizes = _blocks(made, producer.shape(made), renamed), _blocks(taken, consumer.shape(taken), renamed.values())
    if [(renamed.get(axis, axis), size) for axis, size in sizes[0].items()] != list(sizes[1].items()):
        return f"its axes are {sizes[0]} of {made.name}, and {sizes[1]} of {taken.name}"
    if producer.dtype != consumer.dtype:
        return f"it is {producer.dtype}, and {consumer.name} needs {consumer.dtype}"
    return ""


def _blocks(operand: Operand, shape: Sequence[int], named: Collection[str]) -> dict[str, int]:
    """{axis: its size times those of the axes behind it that the edge does not name}, in the order of the dimensions."""
    sizes: dict[str, int] = {}
    for axis, size in zip(operand.axes, shape, strict=True):
        if axis in named or not sizes:
            sizes[axis] = size
        else:
            sizes[list(sizes)[-1]] *= size
    return sizes
