"""The best layouts of all operators of a model together (paper, section 7.4, Algorithm 1), and the plans that follow.

Each operator has options: a placement of the mesh's axes, and the layout in which it leaves its output. An option costs what
it sends itself; an edge costs what turns the producer's layout into the consumer's. The least sum is found exactly, without
enumeration. Only messages count: every rank always has an equal share of the loops, but for a causal mask.

Each edge is priced by itself. Where several inputs of an operator travel together, or arrive in layouts that cut its axes
differently, the operator's plan takes a little less, or more.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import numpy as np

from commir.ir.checks import check_memory
from commir.ir.mesh import Mesh
from commir.lowering.plan import Plan
from commir.lowering.timeline import EQUAL_SPEED
from commir.scheduling.loop_nest import Illegal

from .elimination import minimize
from .graph_checks import check_graph
from .operator_options import GraphNode, Option, Relayouts, options_of

MOST_TRIES = 1000  # to find a combination that can be lowered


@dataclass(frozen=True)
class GraphPlan:
    """The chosen option of each operator. seconds: of all messages, resharding included. resharding: {edge: seconds}."""

    operators: tuple[GraphNode, ...]
    mesh: Mesh
    chosen: dict[str, Option]
    seconds: float
    resharding: dict[tuple[str, str], float]

    def explain(self) -> str:
        """One line for each operator, with the loop on each axis of the mesh, and for each resharded edge, and the total.

        Each has its predicted seconds or, if the mesh has no speeds, the bytes that a rank sends.
        """
        lines = []
        for name, option in self.chosen.items():
            divided = (f"{axis} on {level}" for axis, level in zip(option.axes, self.mesh.names, strict=True))
            lines.append(f"{name}: {'; '.join(divided)}; {self._amount(option.seconds)}")
        lines += [f"{a} -> {b}: {self._amount(time)}" for (a, b), time in self.resharding.items() if time]
        return "\n".join([*lines, f"in all {self._amount(self.seconds)} of messages"])

    def _amount(self, seconds: float) -> str:
        """A time or, without speeds, what a rank sends in it: all links then count as EQUAL_SPEED, one after the other."""
        return f"{seconds:.3g} s" if self.mesh.speeds else f"{round(seconds * EQUAL_SPEED[1]):,} bytes"

    def plans(self) -> dict[str, Plan]:
        """{operator: its plan}, which takes each input in the layout in which its producer leaves it.

        Illegal: an operator's inputs arrive in layouts of which lowering cannot cut all at once.
        """
        return {each.name: self._plan_of(each) for each in self.operators}

    def first_illegal(self) -> GraphNode | None:
        """The first operator whose inputs arrive in layouts of which lowering cannot cut all at once, if there is one."""
        for each in self.operators:
            try:
                self._plan_of(each)
            except Illegal:
                return each
        return None

    def _plan_of(self, operator: GraphNode) -> Plan:
        arriving = {
            operand: operator.arriving(operand, self.chosen[producer].out)
            for operand, (producer, _) in operator.inputs.items()
        }
        return self.chosen[operator.name].plan(operator, self.mesh, arriving)


def search_graph(
    operators: Sequence[GraphNode], mesh: Mesh, memory: int | None = None,
    allowed: Mapping[str, Sequence[tuple[str, ...]]] | None = None,
) -> GraphPlan:  # fmt: skip
    """The options of all operators with the least time of messages.

    memory: the most bytes of parameters that a rank may hold of any one operator. allowed: {operator: the loops of the mesh
    axes that it may take}, to compare with a fixed layout. ValueError: an operator has no option, two have one name, an
    input does not fit what its producer makes, `allowed` names no operator or no loops, an argument is of another type, or
    no layouts fit together (or none of the MOST_TRIES fastest that each input allows by itself).
    """
    allowed = {} if allowed is None else allowed
    check_graph(operators, mesh, allowed)
    check_memory(memory)
    options = _all_options(operators, mesh, memory, allowed)
    relayouts, by_name = Relayouts(mesh), {each.name: each for each in operators}
    edges: dict[tuple[str, str], np.ndarray] = {}
    for consumer in operators:
        for operand, (producer, _) in consumer.inputs.items():
            ends = by_name[producer], options[producer], consumer, options[consumer.name]
            costs = relayouts.edge(*ends, operand)
            edges[producer, consumer.name] = edges.get((producer, consumer.name), 0) + costs
    return _cheapest(operators, mesh, options, edges)


def _cheapest(
    operators: Sequence[GraphNode], mesh: Mesh, options: Mapping[str, list[Option]],
    edges: Mapping[tuple[str, str], np.ndarray],
) -> GraphPlan:  # fmt: skip
    """The least sum that can be lowered.

    Inputs of one operator may arrive in layouts that cut its axes differently. All other combinations are then divided into
    parts, and the part with the least sum is tried next, at most MOST_TRIES times.
    """
    names, order = [each.name for each in operators], count()
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
    """What fails together, as (number of an operator, which of its options): one option, and layouts of its inputs."""
    for name in dict.fromkeys(producer for producer, _ in failing.inputs.values()):
        yield names.index(name), np.array([each.out == chosen[name].out for each in options[name]])
    yield names.index(failing.name), np.array([each == chosen[failing.name] for each in options[failing.name]])


def _all_options(
    operators: Sequence[GraphNode], mesh: Mesh, memory: int | None, allowed: Mapping[str, Sequence[tuple[str, ...]]]
) -> dict[str, list[Option]]:
    """{operator: its options}; operators with the same program and parameters have the same."""
    known: dict[object, list[Option]] = {}
    found = {}
    for each in operators:
        placements = allowed.get(each.name)
        key = each.program, frozenset(each.inputs), None if placements is None else tuple(placements)
        if key not in known:
            known[key] = options_of(each, mesh, memory, placements)
        found[each.name] = known[key]
    return found
