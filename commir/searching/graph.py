"""The best layouts of all operators of a model together (paper, section 7.4, Algorithm 1), exactly and without enumeration.

Each operator has options: a placement of the mesh's axes, with the layouts in which it takes its inputs and leaves its
output. An option costs what it sends itself; an edge costs what turns the producer's layout into the consumer's. The sum is
minimized by eliminating operators one by one: an operator's best option is tabulated for every combination of its
neighbours' options. A chain takes time in proportion to its length, where enumeration takes a power of it. Computing costs
the same in all options, because every rank always has its share of the loops; so only messages count.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import product

import numpy as np

from commir.ir.mesh import Mesh
from commir.ir.program import WHOLE, Operand, Program
from commir.lowering.timeline import message_seconds
from commir.scheduling.placements import Placement

from .candidates import Part
from .cost import CostModel

Shardings = tuple[str | None, ...]  # for each mesh axis, the axis of a tensor that its ranks divide, or None


@dataclass(frozen=True)
class Operator:
    """A node of a graph. inputs: {operand: (producer, {axis of the producer's output: axis of this operand})}.

    Operands that are not among `inputs` are parameters, kept where the operator needs them.
    """

    name: str
    program: Program
    inputs: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Option:
    """A way to compute an operator. axes: the loop of each mesh axis. out: the output's layout.

    seconds: of the messages that it sends itself. memory: bytes of its parameters on a rank.
    """

    axes: tuple[str, ...]
    out: Shardings
    seconds: float
    memory: int

    def needs(self, operand: Operand) -> Shardings:
        """The layout in which it takes an input."""
        return tuple(axis if axis in operand.axes else None for axis in self.axes)


@dataclass(frozen=True)
class GraphPlan:
    """The chosen option of each operator. seconds: of all messages, resharding included. resharding: {edge: seconds}."""

    chosen: dict[str, Option]
    seconds: float
    resharding: dict[tuple[str, str], float]

    def explain(self) -> str:
        """One line for each operator and for each resharded edge, and the total."""
        lines = [f"{name}: {', '.join(option.axes)}; {option.seconds:.3g} s" for name, option in self.chosen.items()]
        lines += [f"{a} -> {b}: {time:.3g} s" for (a, b), time in self.resharding.items() if time]
        return "\n".join([*lines, f"in all {self.seconds:.3g} s of messages"])


def search_graph(
    operators: Sequence[Operator], mesh: Mesh, memory: int | None = None,
    allowed: Mapping[str, Sequence[tuple[str, ...]]] | None = None,
) -> GraphPlan:  # fmt: skip
    """The options of all operators with the least time of messages.

    memory: the most bytes of parameters that a rank may hold of one operator. allowed: {operator: the loops of the mesh axes
    that it may take}, to compare with a fixed layout. ValueError: an operator has no option, or names an unknown producer.
    """
    by_name = {each.name: each for each in operators}
    options = {each.name: _options(each, mesh, memory, (allowed or {}).get(each.name)) for each in operators}
    edges: dict[tuple[str, str], np.ndarray] = {}
    for consumer in operators:
        for operand, (producer, renamed) in consumer.inputs.items():
            if producer not in by_name:
                raise ValueError(f"{consumer.name} takes {operand} from {producer}, which is no operator of the graph")
            costs = _edge(
                mesh, by_name[producer], options[producer], consumer, options[consumer.name], operand, renamed
            )
            edges[producer, consumer.name] = edges.get((producer, consumer.name), 0) + costs
    names = list(by_name)
    own = [np.array([option.seconds for option in options[name]]) for name in names]
    pairs = {(names.index(a), names.index(b)): costs for (a, b), costs in edges.items()}
    picks, total = minimize(own, pairs)
    chosen = {name: options[name][pick] for name, pick in zip(names, picks, strict=True)}
    paid = {(a, b): float(costs[picks[names.index(a)], picks[names.index(b)]]) for (a, b), costs in edges.items()}
    return GraphPlan(chosen, total, paid)


def minimize(own: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]) -> tuple[list[int], float]:
    """(an option for each node, the least sum) of node costs own[i][a] and pair costs pairs[i, j][a, b].

    Eliminates nodes in the order of the size of the table that each leaves behind (min-fill), which is exact.
    """
    factors: list[tuple[tuple[int, ...], np.ndarray]] = [((node,), costs) for node, costs in enumerate(own)]
    factors += [((i, j), costs) if i < j else ((j, i), costs.T) for (i, j), costs in pairs.items()]
    left, decided = set(range(len(own))), list[tuple[int, tuple[int, ...], np.ndarray]]()
    while left:
        node = min(left, key=lambda each: (_table_size(each, factors, own), each))
        touching = [factor for factor in factors if node in factor[0]]
        factors = [factor for factor in factors if node not in factor[0]]
        scope = tuple(sorted({other for nodes, _ in touching for other in nodes} - {node}))
        table = reduce(np.add, (_aligned(costs, nodes, (*scope, node)) for nodes, costs in touching))
        table = np.broadcast_to(table, [len(own[other]) for other in (*scope, node)])
        decided.append((node, scope, table.argmin(-1)))
        factors.append((scope, table.min(-1)))
        left.remove(node)
    total = sum(float(costs) for _, costs in factors)
    picks: dict[int, int] = {}
    for node, scope, best in reversed(decided):
        picks[node] = int(best[tuple(picks[other] for other in scope)])
    return [picks[node] for node in range(len(own))], total


def _table_size(node: int, factors: Sequence[tuple[tuple[int, ...], np.ndarray]], own: Sequence[np.ndarray]) -> int:
    neighbours = {other for nodes, _ in factors if node in nodes for other in nodes}
    return math.prod(len(own[other]) for other in neighbours)


def _aligned(costs: np.ndarray, nodes: tuple[int, ...], scope: tuple[int, ...]) -> np.ndarray:
    """costs, with a dimension for every node of the scope."""
    order = sorted(range(len(nodes)), key=lambda k: scope.index(nodes[k]))
    shape = iter(np.transpose(costs, order).shape)
    return np.transpose(costs, order).reshape([next(shape) if node in nodes else 1 for node in scope])


# Options and edges


def _options(
    operator: Operator, mesh: Mesh, memory: int | None, allowed: Sequence[tuple[str, ...]] | None
) -> list[Option]:
    """Every placement of the mesh axes on the operator's loops, and every way to leave its partial results."""
    program = operator.program
    (output, *_) = program.outputs
    loops = [axis.name for axis in program.axes if axis.kind != WHOLE and axis.size > 1]
    found = []
    for axes in allowed or list(product(loops, repeat=len(mesh.axes))):
        if not _divides(program, mesh, axes):
            continue
        parameters = [each for each in program.inputs if each.name not in operator.inputs and not each.source]
        held = sum(_block(program, each, mesh, axes) for each in parameters)
        if memory is not None and held > memory:
            continue
        passing = _passing_seconds(program, mesh, axes)
        targets = [[axis] if axis in output.axes else [None, *output.axes] for axis in axes]
        for out in product(*targets):
            if _divides(program, mesh, out, output):
                seconds = _reduction_seconds(program, output, mesh, axes, out) + passing
                found.append(Option(tuple(axes), out, seconds, held))
    if not found:
        raise ValueError(f"{operator.name}: no placement divides its sizes over {mesh!r}, within memory={memory}")
    return found


def _divides(program: Program, mesh: Mesh, axes: Sequence[str | None], operand: Operand | None = None) -> bool:
    """Whether the ranks along each mesh axis divide its axis. operand: also whether none of them divides a tile's axis."""
    for name in {axis for axis in axes if axis is not None}:
        ranks = math.prod(part.size for part, axis in zip(mesh.axes, axes, strict=True) if axis == name)
        if program.shares(name) % ranks or (operand is not None and program.axis(name).kind == WHOLE and ranks > 1):
            return False
    return True


def _block(program: Program, operand: Operand, mesh: Mesh, axes: Sequence[str | None]) -> int:
    """Bytes of a rank's block of an operand that is sharded along these axes."""
    ranks = math.prod(part.size for part, axis in zip(mesh.axes, axes, strict=True) if axis in operand.axes)
    return program.nbytes(operand) // ranks


def _reduction_seconds(
    program: Program, output: Operand, mesh: Mesh, axes: Sequence[str], out: Sequence[str | None]
) -> float:
    """Combining partial results, innermost mesh axes first: a reduce-scatter, or twice that for an all-reduce."""
    block, seconds = _block(program, output, mesh, [a if a in output.axes else None for a in axes]), 0.0
    for part, axis, target in reversed(list(zip(mesh.axes, axes, out, strict=True))):
        if axis in output.axes or part.size == 1:
            continue
        message = sum(message_seconds(mesh, part.name, block / part.size))
        seconds += (part.size - 1) * message * (1 if target else 2)
        block //= part.size if target else 1
    return seconds


def _passing_seconds(program: Program, mesh: Mesh, axes: Sequence[str]) -> float:
    """Passing states between ranks that share a scanned axis."""
    if program.scan is None:
        return 0.0
    parts = [
        Part(m.name, m.size, m.name, m.level, Placement(a)) for m, a in zip(mesh.axes, axes, strict=True) if m.size > 1
    ]
    return CostModel(program, mesh).passing_seconds(tuple(parts))


def _edge(
    mesh: Mesh, producer: Operator, have: Sequence[Option], consumer: Operator, want: Sequence[Option], operand: str,
    renamed: Mapping[str, str],
) -> np.ndarray:  # fmt: skip
    """The time of resharding between every option of the producer and every one of the consumer."""
    needed, known = consumer.program.operand(operand), dict[tuple[Shardings, Shardings], float]()
    nbytes = consumer.program.nbytes(needed)
    table = np.empty((len(have), len(want)))
    for a, before in enumerate(have):
        layout = tuple(None if axis is None else renamed.get(axis, f"{axis} of {producer.name}") for axis in before.out)
        for b, after in enumerate(want):
            key = layout, after.needs(needed)
            if key not in known:
                known[key] = reshard_seconds(mesh, nbytes, *key)
            table[a, b] = known[key]
    return table


def reshard_seconds(mesh: Mesh, nbytes: int, have: Shardings, want: Shardings) -> float:
    """The time to bring a tensor of `nbytes` from one layout to another, by the rules of lowering.

    All-to-alls and slices first, while blocks are small, and then gathers, from the outermost mesh axis.
    """
    seconds = 0.0
    block = nbytes / math.prod(part.size for part, axis in zip(mesh.axes, have, strict=True) if axis)
    for part, before, after in zip(mesh.axes, have, want, strict=True):
        if before and after and before != after:
            seconds += (part.size - 1) * sum(message_seconds(mesh, part.name, block / part.size))
        elif after and not before:
            block /= part.size
    for part, before, after in zip(mesh.axes, have, want, strict=True):
        if before and not after and part.size > 1:
            seconds += (part.size - 1) * sum(message_seconds(mesh, part.name, block))
            block *= part.size
    return seconds
