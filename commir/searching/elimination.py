"""The least sum of costs over a graph of choices, exactly: nodes are eliminated one by one (paper, section 7.4).

A node's best option is tabulated for every combination of its neighbours' options. A chain takes time in proportion to its
length, where enumeration takes a power of it.
"""

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np


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
