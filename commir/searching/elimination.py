"""The least sum of costs over a graph of choices, exactly: nodes are eliminated one by one (paper, section 7.4).

A node's best option is tabulated for every combination of its neighbours' options. A chain takes time nearly in proportion
to its length, where enumeration takes a power of it.
"""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from heapq import heapify, heappop, heappush

import numpy as np

# Nodes in ascending order, and a cost for each combination of their options.
Factor = tuple[tuple[int, ...], np.ndarray]


def minimize(own: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]) -> tuple[list[int], float]:
    """Minimize the sum of node costs own[i][a] and pair costs pairs[i, j][a, b]: (an option for each node, the sum).

    The node that is eliminated next is the one with the smallest table of its own and its neighbours' options. Any order
    gives the least sum; this one keeps tables small.
    """
    factors = _Factors(own, pairs)
    total, decided = 0.0, list[tuple[int, tuple[int, ...], np.ndarray]]()
    while (node := factors.next_node()) is not None:
        touching = factors.remove_touching(node)
        scope = tuple(sorted({other for nodes, _ in touching for other in nodes} - {node}))
        table = reduce(np.add, (_aligned(costs, nodes, (*scope, node)) for nodes, costs in touching))
        table = np.broadcast_to(table, [len(own[other]) for other in (*scope, node)])
        decided.append((node, scope, table.argmin(-1)))
        if scope:
            factors.add(scope, table.min(-1))
        else:
            total += float(table.min(-1))
    picks: dict[int, int] = {}
    for node, scope, best in reversed(decided):
        picks[node] = int(best[tuple(picks[other] for other in scope)])
    return [picks[node] for node in range(len(own))], total


class _Factors:
    """Costs of single nodes, of pairs, and of the neighbours of eliminated nodes, listed under each node that they touch."""

    def __init__(self, own: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]) -> None:
        self._own, self._count = own, 0
        self._touching: list[dict[int, Factor]] = [{} for _ in own]  # {number of a factor: the factor}, for each node
        for node, costs in enumerate(own):
            self._add((node,), costs)
        for (i, j), costs in pairs.items():
            self._add(*(((i, j), costs) if i < j else ((j, i), costs.T)))
        self._sizes = {node: self._table_size(node) for node in range(len(own))}
        self._heap = [(size, node) for node, size in self._sizes.items()]
        heapify(self._heap)

    def next_node(self) -> int | None:
        """Remove and return the node with the smallest table, the first of several. Return None if there is no node left."""
        while self._heap:
            size, node = heappop(self._heap)
            if self._sizes.get(node) == size:  # otherwise it was removed, or its table has changed since
                del self._sizes[node]
                return node
        return None

    def remove_touching(self, node: int) -> list[Factor]:
        """Remove and return the factors that touch a node."""
        taken = dict(self._touching[node])
        for number, (nodes, _) in taken.items():
            for other in nodes:
                del self._touching[other][number]
        return list(taken.values())

    def add(self, nodes: tuple[int, ...], costs: np.ndarray) -> None:
        """Add a factor of nodes, whose tables change."""
        self._add(nodes, costs)
        for node in nodes:
            self._sizes[node] = self._table_size(node)
            heappush(self._heap, (self._sizes[node], node))

    def _add(self, nodes: tuple[int, ...], costs: np.ndarray) -> None:
        for node in nodes:
            self._touching[node][self._count] = nodes, costs
        self._count += 1

    def _table_size(self, node: int) -> int:
        together = {other for nodes, _ in self._touching[node].values() for other in nodes}
        return math.prod(len(self._own[other]) for other in together)


def _aligned(costs: np.ndarray, nodes: tuple[int, ...], scope: tuple[int, ...]) -> np.ndarray:
    """costs, with a dimension for every node of the scope."""
    order = sorted(range(len(nodes)), key=lambda k: scope.index(nodes[k]))
    shape = iter(np.transpose(costs, order).shape)
    return np.transpose(costs, order).reshape([next(shape) if node in nodes else 1 for node in scope])
