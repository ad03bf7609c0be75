"""The least sum of costs over a graph of choices, exactly: nodes are eliminated one by one (paper, section 7.4).

A node's best option is tabulated for every combination of its neighbours' options. A chain takes time nearly in proportion
to its length, where enumeration takes a power of it.
"""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import count

import numpy as np

# Nodes in ascending order, and a cost for each combination of their options.
Factor = tuple[tuple[int, ...], np.ndarray]


def minimize(own: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]) -> tuple[list[int], float]:
    """Minimize the sum of node costs own[i][a] and pair costs pairs[i, j][a, b]: (an option for each node, the sum).

    The node that is eliminated next is the one with the smallest table of its own and its neighbours' options. Any order
    gives the least sum; this one keeps tables small.
    """
    numbers = count()
    touching: list[dict[int, Factor]] = [{} for _ in own]  # {number of a factor: the factor}, for each node

    def add(nodes: tuple[int, ...], costs: np.ndarray) -> None:
        number = next(numbers)
        for node in nodes:
            touching[node][number] = nodes, costs

    def table_size(node: int) -> int:
        together = {other for nodes, _ in touching[node].values() for other in nodes}
        return math.prod(len(own[other]) for other in together)

    for node, costs in enumerate(own):
        add((node,), costs)
    for (i, j), costs in pairs.items():
        add(*(((i, j), costs) if i < j else ((j, i), costs.T)))
    left = {node: table_size(node) for node in range(len(own))}
    total, decided = 0.0, list[tuple[int, tuple[int, ...], np.ndarray]]()
    while left:
        node = min(left, key=left.__getitem__)
        del left[node]
        taken = dict(touching[node])
        for number, (nodes, _) in taken.items():
            for other in nodes:
                del touching[other][number]
        scope = tuple(sorted({other for nodes, _ in taken.values() for other in nodes} - {node}))
        table = reduce(np.add, (_aligned(costs, nodes, (*scope, node)) for nodes, costs in taken.values()))
        table = np.broadcast_to(table, [len(own[other]) for other in (*scope, node)])
        decided.append((node, scope, table.argmin(-1)))
        if scope:
            add(scope, table.min(-1))
            left |= {other: table_size(other) for other in scope}
        else:
            total += float(table.min(-1))
    picks: dict[int, int] = {}
    for node, scope, best in reversed(decided):
        picks[node] = int(best[tuple(picks[other] for other in scope)])
    return [picks[node] for node in range(len(own))], total


def _aligned(costs: np.ndarray, nodes: tuple[int, ...], scope: tuple[int, ...]) -> np.ndarray:
    """costs, with a dimension for every node of the scope."""
    order = sorted(range(len(nodes)), key=lambda k: scope.index(nodes[k]))
    shape = iter(np.transpose(costs, order).shape)
    return np.transpose(costs, order).reshape([next(shape) if node in nodes else 1 for node in scope])
