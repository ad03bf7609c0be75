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
    """Ends out of `places`. A state is (computed, sent) at a place; only those that no other one there beats go on."""
    computed, sent, place, origin = np.zeros(1), np.zeros(1), np.zeros(1, int), np.zeros(1, int)
    for at, end in enumerate(places[1:], 1):
        there = computed + np.array([compute(start, end) for start in places[:at]])[place]
        done = np.maximum(sent, there) + np.array([send(start, end) for start in places[:at]])[place]
        keep = _unbeaten(there, done)
        computed, sent = np.append(computed, there[keep]), np.append(sent, done[keep])
        place, origin = np.append(place, np.full(len(keep), at)), np.append(origin, keep)
    last = np.flatnonzero(place == len(places) - 1)
    state, ends = last[np.argmin(sent[last])], []
    while place[state]:
        ends.append(places[place[state]])
        state = origin[state]
    return tuple(reversed(ends))


def _unbeaten(computed, sent):
    """Which states, ordered by computed, then sent, have a sent that is below all before."""
    order = np.lexsort((sent, computed))
    least = np.minimum.accumulate(sent[order])
    return order[np.concatenate([[True], sent[order][1:] < least[:-1]])]


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
