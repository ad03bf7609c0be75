"""One operation on one number of ranks: its measured times, the line segments fitted to them, and their uncertainty.

The size of a message, `nbytes`, is the size of:

| operation | nbytes |
|---|---|
| all_reduce, reduce_scatter, all_to_all | the input of a rank |
| all_gather | the input of a rank, 1/P of the output |
| p2p | the message |
"""

import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .fitting import Segment, fit_segments, half_widths, held_out_errors, predict, relative_errors, spikes

FLOOR_BYTES = 128 * 1024  # the largest message that counts for the latency floor


def wire(operation: str, ranks: int) -> float:
    """Bytes that a rank of a ring sends over its link per byte of `nbytes`: the factors of nccl-tests' bus bandwidth.

    The first word of `operation` names the collective, so that "all_reduce Ring" counts as an all-reduce. Other operations
    send each byte once.
    """
    factors = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "all_to_all": (ranks - 1) / ranks,
        "all_gather": ranks - 1,
    }
    return factors.get(operation.split()[0], 1.0)


@dataclass(frozen=True)
class Curve:
    """The times of one operation.

    Attributes:
        operation: The name of the operation.
        ranks: The number of ranks.
        mode: "eager" (called one by one) or "graph" (called from a CUDA graph).
        nbytes: The measured sizes, ascending.
        seconds: Their median times.
        high: The 90th percentiles of their times; empty if unknown.
        dropped: Points (nbytes, seconds) that are excluded from the fit.
        segments: The fit.
        errors: |log(predicted / measured)| of each point, predicted by a fit of the other points.

    Raises:
        ValueError: A number is not finite and positive, or sizes or segments are not in order.
    """

    operation: str
    ranks: int
    mode: str
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]
    high: tuple[float, ...]
    dropped: tuple[tuple[int, float], ...]
    segments: tuple[Segment, ...]
    errors: tuple[float, ...]

    def __post_init__(self) -> None:
        _check(self)

    @staticmethod
    def fit(
        operation: str,
        ranks: int,
        points: Sequence[tuple[float, ...]],
        mode: str = "eager",
        dropped: Iterable[tuple[int, float]] = (),
    ) -> "Curve":
        """Fit a curve to points.

        Args:
            points: Points (nbytes, seconds) or (nbytes, seconds, 90th percentile), in any order. The median of several
                points of one size is used.
            mode: "eager" or "graph".
            dropped: Points (nbytes, seconds) that the source marks as unreliable. Spikes in `points` are added to them.

        Raises:
            ValueError: There are no points, or a size or time is not positive and finite.
        """
        sizes, seconds, high = _medians(points, f"{operation} on {ranks} ranks")
        spiked = spikes(seconds)
        dropped = sorted([*dropped, *((sizes[i], seconds[i]) for i in spiked)])
        kept = [i for i in range(len(sizes)) if i not in spiked]
        sizes, seconds = [sizes[i] for i in kept], [seconds[i] for i in kept]
        high = [high[i] for i in kept] if high else []
        return Curve(
            operation, ranks, mode, tuple(sizes), tuple(seconds), tuple(high), tuple(dropped),
            segments=fit_segments(sizes, seconds),
            errors=tuple(map(float, held_out_errors(sizes, seconds))),
        )  # fmt: skip

    @property
    def alpha(self) -> float:
        """Seconds of an empty message: alpha of the first segment."""
        return self.segments[0].alpha

    @property
    def beta(self) -> float:
        """Seconds per byte of large messages: beta of the last segment or, if that is 0, time / nbytes of its last size."""
        return self.segments[-1].beta or self.time(self.nbytes[-1]) / self.nbytes[-1]

    @property
    def floor(self) -> float | None:
        """The latency floor: the median measured time of small messages, including dropped points; None without any.

        A small message has at most 128 KB and takes at most twice the time of an empty message on the first segment.
        """
        first = self.segments[0]
        doubled = first.alpha / first.beta if first.beta else math.inf
        points = [*zip(self.nbytes, self.seconds, strict=True), *self.dropped]
        small = [time for size, time in points if size <= min(FLOOR_BYTES, doubled)]
        return statistics.median(small) if small else None

    def time(self, nbytes: float) -> float:
        """Seconds of a message, predicted by the fit."""
        return float(predict(self.segments, nbytes))

    def interpolated(self, nbytes: float) -> float:
        """Seconds of a message, interpolated between measured sizes; outside them, the time of the first or last size.

        Unlike the fit, it follows local effects, such as the size at which a link's burst ends, but also the noise.
        """
        return float(np.interp(nbytes, self.nbytes, self.seconds))

    def half_width(self, nbytes: float) -> float:
        """Half the width of the interval in which a measured time is expected, as a logarithm (0.05: about 5 %).

        It interpolates `half_widths` between the measured sizes. Outside them, every doubling adds the same width again.
        """
        size = math.log2(max(nbytes, 1))
        measured = np.log2(self.nbytes)
        inside = np.interp(size, measured, half_widths(self.errors))
        return float(inside * (1 + max(0.0, measured[0] - size, size - measured[-1])))

    def interval(self, nbytes: float) -> tuple[float, float]:
        """(low, high) seconds between which nine in ten times of the same measurement should lie.

        Times of another day may lie outside. Below the measured sizes, `high` is at most that of the smallest size. Above
        them, `low` assumes a bandwidth that grows with the square root of the size, and `high` a constant bandwidth.
        """
        time, spread = self.time(nbytes), math.exp(self.half_width(nbytes))
        low, high = time / spread, time * spread
        first, last = self.nbytes[0], self.nbytes[-1]
        if nbytes < first:
            high = min(high, self.interval(first)[1])
        elif nbytes > last:
            low = min(low, self.interval(last)[0] * math.sqrt(nbytes / last) / spread)
            high = max(high, self.interval(last)[1] * nbytes / last)
        return low, high

    def bus_bandwidth(self, nbytes: float) -> float:
        """Bytes per second over a rank's link, predicted by the fit, if the algorithm is a ring."""
        return nbytes * wire(self.operation, self.ranks) / self.time(nbytes)

    @property
    def peak_bus_bandwidth(self) -> float:
        """The highest bus bandwidth (bytes per second) of the measured points."""
        rates = [nbytes / seconds for nbytes, seconds in zip(self.nbytes, self.seconds, strict=True)]
        return max(rates) * wire(self.operation, self.ranks)

    @property
    def fit_errors(self) -> tuple[float, float]:
        """(mean, max) of |predicted - measured| / measured over the fitted points."""
        errors = np.abs(relative_errors(self.segments, self.nbytes, self.seconds))
        return float(errors.mean()), float(errors.max())


def _medians(points: Sequence[tuple[float, ...]], name: str) -> tuple[list[int], list[float], list[float]]:
    """(ascending sizes, their median times, their median 90th percentiles or [] if a point has none)."""
    wrong = [point for point in points if not all(0 < number < math.inf for number in point)]
    if wrong or not points:
        found = f"{wrong[0][0]} bytes in {wrong[0][1:]} s" if wrong else "no points"
        raise ValueError(f"{name}: expected points with positive, finite sizes and times, got {found}")
    sizes = sorted({nbytes for nbytes, *_ in points})
    count = min(map(len, points)) - 1  # columns that all points have: 1 or 2
    columns = [
        [float(statistics.median(point[column] for point in points if point[0] == size)) for size in sizes]
        for column in range(1, 1 + count)
    ]
    return list(map(int, sizes)), columns[0], columns[1] if count > 1 else []


def _check(curve: Curve) -> None:
    """ValueError if the curve, which may come from a file, is invalid (see `Curve`)."""
    name = f"curve {curve.operation!r} on {curve.ranks!r} ranks, {curve.mode}"
    if not str(curve.operation).strip() or int(curve.ranks) < 2 or curve.mode not in ("eager", "graph"):
        raise ValueError(f"{name}: expected a name, 2 ranks or more, and the mode eager or graph")
    _check_numbers(curve, name)
    ends = [size for s in curve.segments for size in (s.first, s.last)]
    lengths = {len(curve.nbytes), len(curve.seconds), len(curve.errors), len(curve.high) or len(curve.nbytes)}
    ascending = all(a < b for a, b in zip((0, *curve.nbytes), curve.nbytes, strict=False))
    predicts = ends and curve.segments[0].alpha + curve.segments[0].beta > 0 and min(curve.seconds) > 0
    if len(lengths) > 1 or not ascending or ends != sorted(ends) or not set(ends) <= {*curve.nbytes} or not predicts:
        raise ValueError(
            f"{name}: expected ascending sizes, each with a time and an error, and segments that join such sizes"
        )


def _check_numbers(curve: Curve, name: str) -> None:
    """ValueError unless all sizes, times, errors and coefficients of the curve are finite and not negative."""
    lines = [number for s in curve.segments for number in (s.first, s.last, s.beta)]
    lines += [abs(s.alpha) if i else s.alpha for i, s in enumerate(curve.segments)]  # see `_rising_line`
    dropped = [number for pair in curve.dropped for number in pair]
    for number in (*curve.nbytes, *curve.seconds, *curve.high, *curve.errors, *lines, *dropped):
        if not isinstance(number, (int, float)) or not 0 <= number <= sys.float_info.max:
            raise ValueError(f"{name}: {number!r} is not a valid size or time")
