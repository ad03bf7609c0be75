"""Which neighbouring gradients to send together: FindOptFusion, exactly (the problem of Cupcake, Wang et al., MLSys 2023).

Gradients become ready one after the other; a group of them is first computed and selected from, then sent, while the next
group is computed. Of all ways to cut them into groups the one is found whose last message arrives first.
"""

from collections.abc import Callable

import numpy as np

MOST_CUTS = 128  # places to cut at; of more, COARSE are tried first, then moved
COARSE = 40


def find_opt_fusion(count: int, compute: Callable, send: Callable, weights=None) -> tuple[int, ...]:
    """Ends of the groups, ascending, the last one `count`.

    compute(i, j), send(i, j): seconds of the group of gradients i to j - 1, non-negative. weights (count,): of more than
    MOST_CUTS gradients, cuts are first made between equal shares of these, then each moved by one if that helps.
    """
    if count <= MOST_CUTS:
        return _best(list(range(count + 1)), compute, send)
    shares = np.cumsum(np.ones(count) if weights is None else np.asarray(weights, float))
    places = np.searchsorted(shares, shares[-1] * np.arange(1, COARSE) / COARSE) + 1
    places = sorted({0, *places.tolist(), count})
    return _moved(list(_best(places, compute, send)), compute, send)


def finish(ends, compute: Callable, send: Callable) -> float:
    """Seconds until the last message of these groups has arrived."""
    computed = sent = 0.0
    for i, j in zip((0, *ends), ends, strict=False):
        computed += compute(i, j)
        sent = max(sent, computed) + send(i, j)
    return sent


def _best(places, compute, send) -> tuple[int, ...]:
    """Ends out of `places`. A state is (computed, sent, where it came from); only those that no other one beats go on."""
    fronts = [(np.zeros(1), np.zeros(1), [None])]
    for at in range(1, len(places)):
        computed, sent, origins = [], [], []
        for i, (t, c, _) in enumerate(fronts):
            there = t + compute(places[i], places[at])
            computed.append(there)
            sent.append(np.maximum(c, there) + send(places[i], places[at]))
            origins += [(i, state) for state in range(len(t))]
        fronts.append(_unbeaten(np.concatenate(computed), np.concatenate(sent), origins))
    ends, at = [], len(places) - 1
    state = int(np.argmin(fronts[at][1]))
    while at:
        ends.append(places[at])
        at, state = fronts[at][2][state]
    return tuple(reversed(ends))


def _unbeaten(computed, sent, origins):
    """Of states ordered by computed, then sent, those whose sent is below all before."""
    order = np.lexsort((sent, computed))
    least = np.minimum.accumulate(sent[order])
    keep = order[np.concatenate([[True], sent[order][1:] < least[:-1]])]
    return computed[keep], sent[keep], [origins[state] for state in keep]


def _moved(ends, compute, send) -> tuple[int, ...]:
    """Each cut one place further or back, if the last message arrives earlier for it; one cut after the other, once."""
    best = finish(ends, compute, send)
    for number in range(len(ends) - 1):
        for step in (-1, 1):
            tried = [*ends]
            tried[number] += step
            if tried[number] in (tried[number + 1], tried[number - 1] if number else 0):
                continue
            seconds = finish(tried, compute, send)
            if seconds < best:
                best, ends = seconds, tried
    return tuple(ends)
