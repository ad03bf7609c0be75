"""FindOptFusion: groups consecutive gradients so that the last message arrives as early as possible.

It solves the problem of Cupcake (Wang et al., MLSys 2023) exactly. Gradients become ready one after the other. A group of
gradients is computed, its elements are selected, and then it is sent while the next group is computed.
"""

from collections.abc import Callable, Sequence

import numpy as np

# All cuts of up to MOST_CUTS gradients are tried; with more gradients, COARSE cuts are tried and shifted.
MOST_CUTS, COARSE = 128, 40

Seconds = Callable[[int, int], float]  # (i, j) -> seconds of the gradients i to j - 1


def find_opt_fusion(
    count: int, compute: Seconds, send: Seconds, weights: Sequence[float] | None = None
) -> tuple[int, ...]:
    """The ascending ends of the groups, of which the last is `count`.

    Args:
        count: The number of gradients.
        compute: compute(i, j): seconds to compute the gradients i to j - 1 and to select from them.
        send: send(i, j): seconds to send them together.
        weights: Weights (count,) of the gradients, 1 by default. With more than MOST_CUTS gradients, cuts between equal
            shares of the weights are tried first, and then shifted by one position if that helps.
    """
    if count <= MOST_CUTS:
        return _best_cuts(list(range(count + 1)), compute, send)
    shares = np.cumsum(np.ones(count) if weights is None else np.asarray(weights, float))
    positions = np.searchsorted(shares, shares[-1] * np.arange(1, COARSE) / COARSE) + 1
    positions = sorted({0, *positions.tolist(), count})
    return _shift_cuts(list(_best_cuts(positions, compute, send)), compute, send)


def finish_time(ends: Sequence[int], compute: Seconds, send: Seconds) -> float:
    """Seconds until the last message of these groups has arrived."""
    computed = sent = 0.0
    for i, j in zip((0, *ends), ends, strict=False):
        computed += compute(i, j)
        sent = max(sent, computed) + send(i, j)
    return sent


def _best_cuts(positions: Sequence[int], compute: Seconds, send: Seconds) -> tuple[int, ...]:
    """The best ends among `positions`, by dynamic programming over the Pareto-optimal times (computed, sent)."""
    computed, sent, place, origin = np.zeros(1), np.zeros(1), np.zeros(1, int), np.zeros(1, int)
    for index, end in enumerate(positions[1:], 1):
        there = computed + np.array([compute(start, end) for start in positions[:index]])[place]
        done = np.maximum(sent, there) + np.array([send(start, end) for start in positions[:index]])[place]
        kept = _pareto_front(there, done)
        computed, sent = np.append(computed, there[kept]), np.append(sent, done[kept])
        place, origin = np.append(place, np.full(len(kept), index)), np.append(origin, kept)
    last = np.flatnonzero(place == len(positions) - 1)
    state, ends = last[np.argmin(sent[last])], []
    while place[state]:
        ends.append(positions[place[state]])
        state = origin[state]
    return tuple(reversed(ends))


def _pareto_front(computed: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """The indices of the Pareto-optimal states: no other state is earlier in both `computed` and `sent`."""
    order = np.lexsort((sent, computed))
    least = np.minimum.accumulate(sent[order])
    return order[np.concatenate([[True], sent[order][1:] < least[:-1]])]


def _shift_cuts(ends: list[int], compute: Seconds, send: Seconds) -> tuple[int, ...]:
    """Shift each cut once by one position, forward or back, if the last message then arrives earlier."""
    best = finish_time(ends, compute, send)
    for number in range(len(ends) - 1):
        for step in (-1, 1):
            tried = [*ends]
            tried[number] += step
            if tried[number] in (tried[number + 1], tried[number - 1] if number else 0):
                continue
            seconds = finish_time(tried, compute, send)
            if seconds < best:
                best, ends = seconds, tried
    return tuple(ends)
