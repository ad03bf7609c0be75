"""The best layouts of all operators of a model together (paper, section 7.4, Algorithm 1), and the plans that follow.

Each operator has options: a placement of the mesh's axes, and the layout in which it leaves its output. An option costs what
it sends itself; an edge costs what turns the producer's layout into the consumer's. The least sum is found exactly, without
enumeration. Computing costs the same in all options, because every rank always has its share of the loops; so only messages
count.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from commir.ir.mesh import Mesh
from commir.lowering.plan import Plan

from .elimination import minimize
from .operator_options import Operator, Option, Relayouts, options_of


@dataclass(frozen=True)
class GraphPlan:
    """The chosen option of each operator. seconds: of all messages, resharding included. resharding: {edge: seconds}."""

    operators: tuple[Operator, ...]
    mesh: Mesh
    chosen: dict[str, Option]
    seconds: float
    resharding: dict[tuple[str, str], float]

    def explain(self) -> str:
        """One line for each operator and for each resharded edge, and the total."""
        lines = [f"{name}: {', '.join(option.axes)}; {option.seconds:.3g} s" for name, option in self.chosen.items()]
        lines += [f"{a} -> {b}: {time:.3g} s" for (a, b), time in self.resharding.items() if time]
        return "\n".join([*lines, f"in all {self.seconds:.3g} s of messages"])

    def plans(self) -> dict[str, Plan]:
        """{operator: its plan}, which takes each input in the layout in which its producer leaves it.

        Illegal: an operator's inputs arrive in layouts of which lowering cannot cut all at once.
        """
        return {
            each.name: self.chosen[each.name].plan(each, self.mesh, self._arriving(each)) for each in self.operators
        }

    def _arriving(self, operator: Operator) -> dict[str, tuple[str | None, ...]]:
        return {
            operand: operator.arriving(operand, self.chosen[producer].out)
            for operand, (producer, _) in operator.inputs.items()
        }


def search_graph(
    operators: Sequence[Operator], mesh: Mesh, memory: int | None = None,
    allowed: Mapping[str, Sequence[tuple[str, ...]]] | None = None,
) -> GraphPlan:  # fmt: skip
    """The options of all operators with the least time of messages.

    memory: the most bytes of parameters that a rank may hold of one operator. allowed: {operator: the loops of the mesh axes
    that it may take}, to compare with a fixed layout. ValueError: an operator has no option, two have one name, or an input
    names an unknown producer or axis, or no layouts fit together.
    """
    _check(operators)
    options = _all_options(operators, mesh, memory, allowed or {})
    relayouts, by_name = Relayouts(mesh), {each.name: each for each in operators}
    edges: dict[tuple[str, str], np.ndarray] = {}
    for consumer in operators:
        for operand, (producer, _) in consumer.inputs.items():
            ends = by_name[producer], options[producer], consumer, options[consumer.name]
            costs = relayouts.edge(*ends, operand)
            edges[producer, consumer.name] = edges.get((producer, consumer.name), 0) + costs
    names = list(by_name)
    own = [np.array([option.seconds for option in options[name]]) for name in names]
    picks, total = minimize(own, {(names.index(a), names.index(b)): costs for (a, b), costs in edges.items()})
    if math.isinf(total):
        raise ValueError(f"no layouts of the operators on {mesh!r} can be turned into one another")
    chosen = {name: options[name][pick] for name, pick in zip(names, picks, strict=True)}
    paid = {(a, b): float(costs[picks[names.index(a)], picks[names.index(b)]]) for (a, b), costs in edges.items()}
    return GraphPlan(tuple(operators), mesh, chosen, total, paid)


def _all_options(
    operators: Sequence[Operator], mesh: Mesh, memory: int | None, allowed: Mapping[str, Sequence[tuple[str, ...]]]
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


def _check(operators: Sequence[Operator]) -> None:
    by_name = {each.name: each for each in operators}
    if len(by_name) < len(operators):
        names = [each.name for each in operators]
        raise ValueError(f"two operators are called {next(name for name in names if names.count(name) > 1)}")
    for consumer in operators:
        for operand, (producer, renamed) in consumer.inputs.items():
            taken = consumer.program.operand(operand)
            if producer not in by_name or producer == consumer.name:
                what = "itself" if producer == consumer.name else f"{producer}, which is no operator of the graph"
                raise ValueError(f"{consumer.name} takes {operand} from {what}")
            made = by_name[producer].program.outputs[0]
            for before, after in renamed.items():
                if before not in made.axes or after not in taken.axes:
                    raise ValueError(
                        f"{consumer.name} takes {operand} from {producer} with {before} as {after}: {made.name} "
                        f"has {', '.join(made.axes)}, and {operand} {', '.join(taken.axes)}"
                    )
