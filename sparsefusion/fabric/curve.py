"""One operation on one number of ranks: its measured times, the line segments fitted to them, and how far to trust them.

`nbytes` means: all_reduce, reduce_scatter, all_to_all: this rank's input; all_gather: what each rank contributes; p2p:
the message.
"""

import math
import statistics
from dataclasses import dataclass

import numpy as np

from .fitting import Segment, fit_segments, half_widths, held_out_errors, predict, relative_errors, spikes

FLOOR_BYTES = 128 * 1024  # messages that may count for the latency floor


def wire(operation: str, ranks: int) -> float:
    """Bytes a rank sends over its link per byte of `nbytes`, by a ring; nccl-tests' bus bandwidth rests on them.

    An operation with a name of its own counts as the collective that its first word names, else 1.
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
    """Times of `operation` on `ranks` ranks, called one by one (mode "eager") or replayed (mode "graph").

    nbytes: ascending; seconds: their times; high: their 90th percentiles, empty where unknown; dropped: the (nbytes,
    seconds) left out of the fit; errors: |log(predicted / measured)| of each point, predicted by a fit of the others.
    ValueError: anything not positive, finite and in order.
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

    def __post_init__(self):
        _check(self)

    @staticmethod
    def fit(operation: str, ranks: int, points, mode: str = "eager", dropped=()) -> "Curve":
        """The curve through `points`: (nbytes, seconds) or (nbytes, seconds, 90th percentile), in any order.

        Several points of one size count as their median. dropped: (nbytes, seconds) that the source itself discredits;
        the spikes found here are added to them. ValueError: no points, or a size or time that is not positive.
        """
        sizes, seconds, high = _medians(points, f"{operation} on {ranks} ranks")
        spiked = spikes(seconds)
        dropped = sorted([*dropped, *((sizes[i], seconds[i]) for i in spiked)])
        sizes, seconds, high = ([v for i, v in enumerate(kept) if i not in spiked] for kept in (sizes, seconds, high))
        return Curve(
            operation, ranks, mode, tuple(sizes), tuple(seconds), tuple(high), tuple(dropped),
            segments=fit_segments(sizes, seconds),
            errors=tuple(map(float, held_out_errors(sizes, seconds))),
        )  # fmt: skip

    @property
    def alpha(self) -> float:
        """Seconds of an empty message: the first segment's."""
        return self.segments[0].alpha

    @property
    def beta(self) -> float:
        """Seconds per byte of large messages: the last segment's, or of its last size where it has no slope."""
        return self.segments[-1].beta or self.time(self.nbytes[-1]) / self.nbytes[-1]

    @property
    def floor(self) -> float | None:
        """The latency floor: the median time of small messages, the dropped ones too; None if none was measured.

        Small: at most 128 KB, and less than doubles the latency of the first segment.
        """
        first = self.segments[0]
        doubled = first.alpha / first.beta if first.beta else math.inf
        points = [*zip(self.nbytes, self.seconds, strict=True), *self.dropped]
        small = [time for size, time in points if size <= min(FLOOR_BYTES, doubled)]
        return statistics.median(small) if small else None

    def time(self, nbytes: int) -> float:
        """Seconds of a message, from the fit."""
        if nbytes < 0:
            raise ValueError(f"a message of {nbytes} bytes")
        return float(predict(self.segments, nbytes))

    def interpolated(self, nbytes: int) -> float:
        """Seconds of a message between the measured ones around it; outside them, of the first or the last.

        Follows what a fit smooths, such as the size at which a link's burst is used up, and the noise with it.
        """
        return float(np.interp(nbytes, self.nbytes, self.seconds))

    def half_width(self, nbytes: int) -> float:
        """Half the width of the interval, as a logarithm (0.05: about 5 %), in which a measured time is expected.

        `half_widths` of the sizes around; once more per doubling outside the measured sizes.
        """
        size = math.log2(max(nbytes, 1))
        measured = np.log2(self.nbytes)
        inside = np.interp(size, measured, half_widths(self.errors))
        return float(inside * (1 + max(0.0, measured[0] - size, size - measured[-1])))

    def interval(self, nbytes: int) -> tuple[float, float]:
        """(low, high) seconds between which nine in ten times of the same measurement should lie; another day's may not.

        Below the measured sizes no message is slower than at the first; above them bandwidth may stay what it was, or
        grow with the square root of the size.
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

    def bus_bandwidth(self, nbytes: int) -> float:
        """Bytes per second over a rank's link, by the fit, if the algorithm is a ring."""
        return nbytes * wire(self.operation, self.ranks) / self.time(nbytes)

    @property
    def peak_bus_bandwidth(self) -> float:
        """The best bus bandwidth (bytes/s) of the measured points."""
        rates = [nbytes / seconds for nbytes, seconds in zip(self.nbytes, self.seconds, strict=True)]
        return max(rates) * wire(self.operation, self.ranks)

    @property
    def fit_errors(self) -> tuple[float, float]:
        """(mean, max) of |predicted - measured| / measured over the fitted points."""
        errors = np.abs(relative_errors(self.segments, self.nbytes, self.seconds))
        return float(errors.mean()), float(errors.max())


def _medians(points, name):
    """Ascending sizes, the median time of each, and the median 90th percentile of each where all points have one."""
    if not points:
        raise ValueError(f"no points to fit {name}")
    for nbytes, *times in points:
        if nbytes <= 0 or not all(0 < time < math.inf for time in times):
            raise ValueError(f"{name}: sizes and times must be positive and finite, not {nbytes} bytes in {times}")
    sizes = sorted({nbytes for nbytes, *_ in points})
    known = min(map(len, points)) - 1  # columns: 1 or 2
    columns = [
        [float(statistics.median(point[column] for point in points if point[0] == size)) for size in sizes]
        for column in range(1, 1 + known)
    ]
    return list(map(int, sizes)), columns[0], columns[1] if known > 1 else []


def _check(curve: Curve) -> None:
    """ValueError unless the curve's numbers are positive, finite and in order."""
    name = f"curve {curve.operation!r} on {curve.ranks!r} ranks"
    if not (isinstance(curve.operation, str) and curve.operation.strip() and isinstance(curve.ranks, int)):
        raise ValueError(f"{name}: needs a name and a number of ranks")
    if curve.ranks < 2 or curve.mode not in ("eager", "graph"):
        raise ValueError(f"{name}, mode {curve.mode!r}: ranks must be 2 or more, the mode eager or graph")
    lines = [number for s in curve.segments for number in (s.first, s.last, s.beta)]
    lines += [abs(s.alpha) if i else s.alpha for i, s in enumerate(curve.segments)]  # only the first begins at 0
    dropped = [number for pair in curve.dropped for number in pair]
    for number in (*curve.nbytes, *curve.seconds, *curve.high, *curve.errors, *lines, *dropped):
        if not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            raise ValueError(f"{name}: {number!r} is no size or time")
    ends = [size for s in curve.segments for size in (s.first, s.last)]
    if ends != sorted(ends) or not set(ends) <= set(curve.nbytes):
        raise ValueError(f"{name}: its segments do not follow one another from measured size to measured size")
    lengths = {len(curve.nbytes), len(curve.seconds), len(curve.errors), len(curve.high) or len(curve.nbytes)}
    ascending = all(a < b for a, b in zip((0, *curve.nbytes), curve.nbytes, strict=False))
    if lengths == {0} or len(lengths) > 1 or not ascending or not curve.segments or min(curve.seconds) == 0:
        raise ValueError(f"{name}: needs ascending sizes, each with its time and error, and segments")
