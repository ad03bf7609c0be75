"""Piecewise alpha + beta * nbytes through measured times: spikes out, breakpoints by dynamic programming.

Everything here is plain mathematics on ascending message sizes (bytes) and their times (seconds).
"""

from dataclasses import dataclass

import numpy as np

MOST_SEGMENTS = 4
LEAST_POINTS = 3  # in a segment
GAIN = 0.75  # one more segment must bring the mean error below this share of what it was
EXACT = 1e-9  # a mean relative error that no further segment need improve
NEIGHBOURS = 3  # on either side, for spikes
SPIKE_MADS, SPIKE = 3.0, 1.15  # a spike is above its neighbours' median by both
SURE = 0.9  # the share of times that intervals should hold
MARGIN = 1.1  # because two dozen errors say little about the largest


@dataclass(frozen=True)
class Segment:
    """seconds = alpha + beta * nbytes for messages of `first` to `last` bytes, both of them measured sizes."""

    first: int
    last: int
    alpha: float
    beta: float

    def time(self, nbytes) -> float:
        """Seconds on this line."""
        return self.alpha + self.beta * nbytes


def spikes(seconds) -> list[int]:
    """Indices of times that no longer message shares: host jitter, such as one straggler in a mean over 200 calls.

    A spike is above the median of its (up to) six neighbours by 3 times their median absolute deviation and by 15 %,
    and above the median of its (up to) three larger neighbours: a larger message cannot be faster.
    """
    found = []
    for i, time in enumerate(seconds):
        larger = seconds[i + 1 : i + 1 + NEIGHBOURS]
        if not len(larger):
            continue
        neighbours = np.concatenate([seconds[max(0, i - NEIGHBOURS) : i], larger])
        middle = np.median(neighbours)
        spread = np.median(np.abs(neighbours - middle))
        if time > max(middle + SPIKE_MADS * spread, SPIKE * middle, np.median(larger)):
            found.append(i)
    return found


def fit_segments(nbytes, seconds) -> tuple[Segment, ...]:
    """One to four segments with least squares of relative errors; one more only if the mean error falls by a quarter."""
    table = _lines(np.asarray(nbytes, float), np.asarray(seconds, float))
    best, error = None, np.inf
    for count in range(1, min(MOST_SEGMENTS, max(1, len(nbytes) // LEAST_POINTS)) + 1):
        segments = _segments(nbytes, table, count)
        mean = np.mean(np.abs(relative_errors(segments, nbytes, seconds)))
        if best is None or (error > EXACT and mean < GAIN * error):
            best, error = segments, mean
    return best


def _lines(x, t):
    """(alpha, beta, cost), each (n, n): the line with least sum of ((alpha + beta x - t) / t)^2 over points i to j."""
    alpha, beta, cost = np.full((3, len(x), len(x)), np.inf)
    terms = np.stack([1 / t**2, x / t**2, x**2 / t**2, 1 / t, x / t])
    for i in range(len(x)):
        sums = np.cumsum(terms[:, i:], axis=1)
        alpha[i, i:], beta[i, i:] = a, b = _rising_line(*sums, from_zero=i == 0)
        w, wx, wxx, y, xy = sums
        squares = a * a * w + 2 * a * b * wx + b * b * wxx - 2 * a * y - 2 * b * xy + np.arange(1, len(x) - i + 1)
        cost[i, i:] = np.maximum(squares, 0)
    return alpha, beta, cost


def _rising_line(w, wx, wxx, y, xy, from_zero):
    """alpha and beta >= 0 of weighted least squares from its five sums (arrays).

    alpha too is >= 0 if the line goes down to empty messages; one that begins after a burst aims below zero.
    """
    determinant = w * wxx - wx * wx
    regular = determinant > 1e-12 * w * wxx  # two sizes or more
    safe = np.where(regular, determinant, 1)
    alpha = np.where(regular, (wxx * y - wx * xy) / safe, y / w)
    beta = np.where(regular, (w * xy - wx * y) / safe, 0)
    alpha, beta = np.where(beta < 0, y / w, alpha), np.maximum(beta, 0)
    return (np.maximum(alpha, 0), np.where(alpha < 0, xy / wxx, beta)) if from_zero else (alpha, beta)


def _segments(nbytes, table, count) -> tuple[Segment, ...]:
    """The `count` segments of least cost."""
    alpha, beta, cost = table
    n = len(nbytes)
    least = LEAST_POINTS if count > 1 else 1
    best, start = np.full((2, count, n), np.inf)
    best[0] = np.where(np.arange(n) >= least - 1, cost[0], np.inf)
    for k in range(1, count):
        for j in range((k + 1) * least - 1, n):
            starts = np.arange(k * least, j - least + 2)
            costs = best[k - 1, starts - 1] + cost[starts, j]
            start[k, j] = starts[np.argmin(costs)]
            best[k, j] = costs.min()
    segments, j = [], n - 1
    for k in reversed(range(count)):
        i = int(start[k, j]) if k else 0
        segments.append(Segment(int(nbytes[i]), int(nbytes[j]), float(alpha[i, j]), float(beta[i, j])))
        j = i - 1
    return tuple(reversed(segments))


def predict(segments, nbytes):
    """Seconds at nbytes (a number or an array), never falling as messages grow.

    On a segment its line; between two their lines up to where they cross, as where a burst is used up, or, if they do not
    cross there, the straight line that joins them; below the first measured size the first line;
    above the last the last line (one without slope says nothing of bandwidth: then that of its last size is kept). A
    line that begins below the end of the one before it, as where a protocol changes, is lifted to it.
    """
    sizes, lines = [0], [segments[0].alpha]
    for before, segment in zip((None, *segments), segments, strict=False):
        knots = [*_crossing(before, segment), segment.first, segment.last]
        sizes += knots
        lines += [segment.time(size) for size in knots]
    times = np.maximum.accumulate(lines)
    slope = segments[-1].beta or times[-1] / sizes[-1]
    beyond = np.maximum(np.asarray(nbytes, float) - sizes[-1], 0)
    return np.interp(nbytes, sizes, times) + slope * beyond


def _crossing(before, after) -> list[float]:
    """Where the lines of two neighbouring segments cross, if that is between them."""
    if before is None or after.beta <= before.beta:
        return []
    size = (before.alpha - after.alpha) / (after.beta - before.beta)
    return [size] if before.last < size < after.first else []


def relative_errors(segments, nbytes, seconds):
    """(predicted - measured) / measured of each point."""
    return predict(segments, np.asarray(nbytes, float)) / np.asarray(seconds) - 1


def held_out_errors(nbytes, seconds):
    """|log(predicted / measured)| of each point, predicted by a fit of all the others."""
    if len(nbytes) < 2:
        return np.ones(len(nbytes))  # nothing to learn from: a factor of e
    errors = []
    for i in range(len(nbytes)):
        others = fit_segments(np.delete(nbytes, i), np.delete(seconds, i))
        errors.append(abs(np.log(predict(others, nbytes[i]) / seconds[i])))
    return np.asarray(errors)


def half_widths(errors):
    """Per point, how far a time may be from the prediction: the largest error there and next to it, and nine in ten.

    errors: `held_out_errors`. The first follows the sizes where the fit is poor, the second is for mere noise.
    """
    padded = np.pad(errors, 1)
    around = np.maximum(np.maximum(padded[:-2], padded[2:]), errors)
    return MARGIN * np.maximum(around, np.quantile(errors, SURE))
