"""Fits piecewise linear functions, seconds = alpha + beta * nbytes, to measured times of messages.

Spikes are removed first; then dynamic programming finds the breakpoints. Sizes are ascending bytes, times are seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

MAX_SEGMENTS = 4
MIN_POINTS = 3  # points of a segment
MAX_ERROR_RATIO = 0.75  # another segment is used if it reduces the mean error at least by this factor
NEGLIGIBLE_ERROR = 1e-9  # a mean relative error at which no segment is added
SPIKE_NEIGHBOURS = 3  # neighbours on either side of a point
SPIKE_DEVIATIONS, SPIKE_RATIO = 3.0, 1.15  # a spike exceeds its neighbours' median by both
COVERAGE = 0.9  # the share of measured times that intervals should contain
SAFETY_FACTOR = 1.1  # the largest of two dozen errors underestimates the largest possible error


@dataclass(frozen=True)
class Segment:
    """seconds = alpha + beta * nbytes for messages of `first` to `last` bytes, which are measured sizes."""

    first: int
    last: int
    alpha: float
    beta: float

    def time(self, nbytes: float) -> float:
        return self.alpha + self.beta * nbytes


def spikes(seconds: Sequence[float]) -> list[int]:
    """Indices of times that are too long for their size, such as a mean over 200 calls with an interrupted one.

    A spike exceeds the median of its neighbours (up to six) by 3 times their median absolute deviation and by 15 %. It
    also exceeds the median of its larger neighbours (up to three), because a larger message cannot be faster.
    """
    indices = []
    for i, time in enumerate(seconds):
        larger = seconds[i + 1 : i + 1 + SPIKE_NEIGHBOURS]
        if not len(larger):
            continue
        neighbours = np.concatenate([seconds[max(0, i - SPIKE_NEIGHBOURS) : i], larger])
        middle = np.median(neighbours)
        spread = np.median(np.abs(neighbours - middle))
        if time > max(middle + SPIKE_DEVIATIONS * spread, SPIKE_RATIO * middle, np.median(larger)):
            indices.append(i)
    return indices


def fit_segments(nbytes: ArrayLike, seconds: ArrayLike) -> tuple[Segment, ...]:
    """One to four segments that minimize the sum of squared relative errors.

    Another segment is added only if it reduces the mean relative error by at least a quarter.
    """
    sizes, times = np.asarray(nbytes), np.asarray(seconds, float)
    lines = _lines(sizes.astype(float), times)
    best = _segments(sizes, lines, 1)
    error = _mean_error(best, sizes, times)
    for count in range(2, min(MAX_SEGMENTS, len(sizes) // MIN_POINTS) + 1):
        segments = _segments(sizes, lines, count)
        mean = _mean_error(segments, sizes, times)
        if error > NEGLIGIBLE_ERROR and mean < MAX_ERROR_RATIO * error:
            best, error = segments, mean
    return best


def _mean_error(segments: Sequence[Segment], nbytes: np.ndarray, seconds: np.ndarray) -> float:
    return float(np.mean(np.abs(relative_errors(segments, nbytes, seconds))))


def _lines(x: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(alpha, beta, cost), each (n, n): the best line through points i to j, and its cost.

    The cost is the sum of ((alpha + beta x - t) / t)^2 over the points. Entries with j < i are infinite.
    """
    alpha, beta, cost = np.full((3, len(x), len(x)), np.inf)
    terms = np.stack([1 / t**2, x / t**2, x**2 / t**2, 1 / t, x / t])
    for i in range(len(x)):
        sums = np.cumsum(terms[:, i:], axis=1)
        w, wx, wxx, y, xy = sums
        alpha[i, i:], beta[i, i:] = a, b = _rising_line(w, wx, wxx, y, xy, from_zero=i == 0)
        squares = a * a * w + 2 * a * b * wx + b * b * wxx - 2 * a * y - 2 * b * xy + np.arange(1, len(x) - i + 1)
        cost[i, i:] = np.maximum(squares, 0)
    return alpha, beta, cost


def _rising_line(
    w: np.ndarray, wx: np.ndarray, wxx: np.ndarray, y: np.ndarray, xy: np.ndarray, from_zero: bool
) -> tuple[np.ndarray, np.ndarray]:
    """alpha and beta >= 0 of weighted least squares, from the five sums of its normal equations.

    from_zero: alpha is >= 0 too, because the line includes empty messages. The alpha of other lines may be negative, for
    example after the end of a link's burst.
    """
    determinant = w * wxx - wx * wx
    regular = determinant > 1e-12 * w * wxx  # two sizes or more
    safe = np.where(regular, determinant, 1)
    alpha = np.where(regular, (wxx * y - wx * xy) / safe, y / w)
    beta = np.where(regular, (w * xy - wx * y) / safe, 0)
    alpha, beta = np.where(beta < 0, y / w, alpha), np.maximum(beta, 0)
    return (np.maximum(alpha, 0), np.where(alpha < 0, xy / wxx, beta)) if from_zero else (alpha, beta)


def _segments(nbytes: np.ndarray, lines: tuple[np.ndarray, np.ndarray, np.ndarray], count: int) -> tuple[Segment, ...]:
    """The `count` consecutive segments with the smallest total cost; lines: see `_lines`."""
    alpha, beta, cost = lines
    n = len(nbytes)
    least = MIN_POINTS if count > 1 else 1
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


def predict(segments: Sequence[Segment], nbytes: ArrayLike) -> np.ndarray | np.float64:
    """Seconds of messages of `nbytes` (a number or an array); a larger message never takes less.

    - On a segment: its line.
    - Between two segments: their lines up to the size at which they cross, as at the end of a link's burst. If they do not
      cross in between, the straight line that joins them.
    - Below the first measured size: the first line.
    - Above the last measured size: the last line or, if that has no slope, the bytes per second of its last size.
    - A line that begins below the end of the previous line, as where a protocol changes, is raised to that end.
    """
    sizes: list[float] = [0]
    lines = [segments[0].alpha]
    for before, segment in zip((None, *segments), segments, strict=False):
        knots = [*_crossing(before, segment), segment.first, segment.last]
        sizes += knots
        lines += [segment.time(size) for size in knots]
    times = np.maximum.accumulate(lines)
    slope = segments[-1].beta or times[-1] / sizes[-1]
    queries = np.asarray(nbytes, float)
    return np.interp(queries, sizes, times) + slope * np.maximum(queries - sizes[-1], 0)


def _crossing(before: Segment | None, after: Segment) -> list[float]:
    """[the size at which the lines of two neighbouring segments cross], or [] if they do not cross between them."""
    if before is None or after.beta <= before.beta:
        return []
    size = (before.alpha - after.alpha) / (after.beta - before.beta)
    return [size] if before.last < size < after.first else []


def relative_errors(segments: Sequence[Segment], nbytes: ArrayLike, seconds: ArrayLike) -> np.ndarray:
    return np.asarray(predict(segments, np.asarray(nbytes, float)) / np.asarray(seconds) - 1)


def held_out_errors(nbytes: ArrayLike, seconds: ArrayLike) -> np.ndarray:
    """|log(predicted / measured)| of each point, predicted by a fit of all other points."""
    sizes, times = np.asarray(nbytes), np.asarray(seconds)
    if len(sizes) < 2:
        return np.ones(len(sizes))  # a single point cannot be predicted: a factor of e
    errors = []
    for i in range(len(sizes)):
        others = fit_segments(np.delete(sizes, i), np.delete(times, i))
        errors.append(abs(np.log(predict(others, sizes[i]) / times[i])))
    return np.asarray(errors)


def half_widths(errors: ArrayLike) -> np.ndarray:
    """The half-width of each point's interval, as a logarithm. errors: those of `held_out_errors`.

    It is the larger of two errors, times a safety factor: the largest error of the point and its two neighbours, which
    is large where the fit is poor, and the 90th percentile of all errors, which accounts for noise.
    """
    errors = np.asarray(errors)
    padded = np.pad(errors, 1)
    nearby = np.maximum(np.maximum(padded[:-2], padded[2:]), errors)
    return SAFETY_FACTOR * np.maximum(nearby, np.quantile(errors, COVERAGE))
