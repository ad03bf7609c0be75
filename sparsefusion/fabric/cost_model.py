"""The costs of messages on one set of machines: measured curves, predictions from them, and their file.

Sizes are bytes, counted per operation as in `curve`; times are seconds. One rank sends nothing, in 0 seconds.
"""

import json
import math
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from .curve import Curve, wire
from .fitting import Segment

FORMAT, VERSION = "sparsefusion fabric", 1
# The growth of an interval's half-width (a logarithm) per doubling of ranks in an extrapolation. From 4 to 6 H100s, NCCL
# changes its algorithm and takes 18 % less time than the formula of a ring predicts.
EXTRAPOLATION_HALF_WIDTH = 0.25


@dataclass(frozen=True)
class Fabric:
    """Predicts the times of messages from measured curves.

    Attributes:
        curves: The curves, at most one per operation, number of ranks and mode (otherwise ValueError).
        description: Free text by key, such as source and host. The optional key link_bytes_per_s is the bandwidth of a
            rank's link in one direction.
    """

    curves: tuple[Curve, ...]
    description: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys = [(curve.operation, curve.ranks, curve.mode) for curve in self.curves]
        duplicates = [key for key in keys if keys.count(key) > 1]
        if duplicates:
            raise ValueError("two curves of {} on {} ranks, {}".format(*duplicates[0]))

    @staticmethod
    def load(path: str | Path) -> "Fabric":
        """Read a fabric that `save` wrote. ValueError if the file is cut off, is no fabric, or has another version."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8
            raise ValueError(f"{path} is no fabric file, or is cut off: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f'{path} is no fabric file: it lacks "format": "{FORMAT}"')
        if content.get("version") != VERSION:
            version = content.get("version")
            raise ValueError(f"{path} is a fabric file of version {version}; this program reads {VERSION}")
        try:
            description = dict(content["description"])
            link = description.get("link_bytes_per_s")
            if not isinstance(link, (int, float, type(None))):
                raise TypeError(f"link_bytes_per_s is {link!r}, not a number")
            return Fabric(tuple(map(_curve_from_json, content["curves"])), description)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is a damaged fabric file: {type(error).__name__}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write JSON from which `load` reads an equal fabric.

        The text is written to a new hidden file, which is then renamed, so that the file at `path` is never incomplete.

        Raises:
            ValueError: `path` is a directory, or its directory does not exist or is not writable.
            OSError: Writing failed for another reason, such as a full disk. The file is unchanged.
        """
        path = Path(path)
        check_writable(path)
        content = {"format": FORMAT, "version": VERSION, "description": self.description}
        content["curves"] = [asdict(curve) for curve in self.curves]
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        if path.exists() and not path.is_file():  # such as /dev/stdout, which a rename would replace
            path.write_text(text, encoding="utf-8")
            return
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with hidden.open("x", encoding="utf-8") as file:  # a new file: in /tmp another user may have made one
                file.write(text)
            hidden.replace(path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None  # names `path`, not the hidden file
        finally:
            hidden.unlink(missing_ok=True)

    def curve(self, operation: str, ranks: int, mode: str = "eager") -> Curve:
        """The measured curve. ValueError if it was never measured; the error names the curves that were."""
        curves = self._curves_of(operation, mode)
        for curve in curves:
            if curve.ranks == ranks:
                return curve
        measured = ", ".join(map(str, sorted(curve.ranks for curve in curves)))
        raise ValueError(f"{operation} ({mode}) was never measured on {ranks} ranks, only on {measured}")

    def _curves_of(self, operation: str, mode: str) -> list[Curve]:
        """The curves of an operation in a mode. ValueError, with the known operations or modes, if there are none."""
        named = [curve for curve in self.curves if curve.operation == operation]
        if not named:
            known = ", ".join(sorted({curve.operation for curve in self.curves})) or "none"
            raise ValueError(f"this fabric has no operation {operation!r}; it has {known}")
        curves = [curve for curve in named if curve.mode == mode]
        if not curves:
            modes = ", ".join(sorted({curve.mode for curve in named}))
            raise ValueError(f"{operation} was never measured in mode {mode!r}, only in {modes}")
        return curves

    def time(self, operation: str, nbytes: float, ranks: int, extrapolate: bool = False, mode: str = "eager") -> float:
        """Seconds of one operation, predicted by the fit.

        Args:
            operation: The name of the operation.
            nbytes: The size of the message.
            ranks: The number of ranks.
            extrapolate: Estimate numbers of ranks that were not measured from the nearest one. The latency grows with the
                P - 1 steps of a ring; on fewer ranks it stays the same, because the cost of a launch does. The remaining
                time is proportional to the bytes that a ring sends (`wire`).
            mode: "eager", or "graph" for calls from a CUDA graph.

        Raises:
            ValueError: The operation, the mode or, without `extrapolate`, the number of ranks was never measured.
        """
        _check_message(nbytes, ranks)
        if ranks == 1:
            return 0.0
        curve = self._nearest(operation, ranks, mode, extrapolate)
        steps, sent = _growth(curve, ranks)
        latency, rest = _latency_and_rest(curve, nbytes)
        return latency * max(1.0, steps) + rest * sent

    def interval(
        self, operation: str, nbytes: float, ranks: int, extrapolate: bool = False, mode: str = "eager"
    ) -> tuple[float, float]:
        """(low, high) seconds between which nine in ten measured times should lie; arguments and errors are those of `time`.

        When extrapolating, the latency and the remaining time both range from their measured value to that of a ring, and
        the interval becomes about 25 % wider on either side per doubling of ranks.
        """
        _check_message(nbytes, ranks)
        if ranks == 1:
            return 0.0, 0.0
        curve = self._nearest(operation, ranks, mode, extrapolate)
        if curve.ranks == ranks:
            return curve.interval(nbytes)
        steps, sent = _growth(curve, ranks)
        latency, rest = _latency_and_rest(curve, nbytes)
        if latency + rest == 0:  # an empty message on a curve without latency
            return 0.0, 0.0
        low, high = (bound / curve.time(nbytes) for bound in curve.interval(nbytes))
        wider = math.exp(EXTRAPOLATION_HALF_WIDTH * abs(math.log2(ranks / curve.ranks)))
        shortest = latency * min(1.0, steps) + rest * min(1.0, sent)
        longest = latency * max(1.0, steps) + rest * max(1.0, sent)
        return shortest * low / wider, longest * high * wider

    def _nearest(self, operation: str, ranks: int, mode: str, extrapolate: bool) -> Curve:
        """The curve of this number of ranks or, with `extrapolate`, of the nearest by ratio (if two are, the smaller)."""
        if not extrapolate:
            return self.curve(operation, ranks, mode)
        by_ranks = sorted(self._curves_of(operation, mode), key=lambda curve: curve.ranks)
        return min(by_ranks, key=lambda curve: abs(math.log(ranks / curve.ranks)))

    def alpha(self, operation: str, ranks: int, extrapolate: bool = False, mode: str = "eager") -> float:
        """Seconds of an empty message; arguments and errors are those of `time`."""
        return self.time(operation, 0, ranks, extrapolate, mode)

    def beta(self, operation: str, ranks: int, extrapolate: bool = False, mode: str = "eager") -> float:
        """Seconds per byte of large messages; arguments and errors are those of `time`."""
        _check_message(0, ranks)
        if ranks == 1:
            return 0.0
        curve = self._nearest(operation, ranks, mode, extrapolate)
        return curve.beta * _growth(curve, ranks)[1]

    def floor(self, operation: str, ranks: int, mode: str = "eager") -> float | None:
        """The measured latency floor, `Curve.floor`: median seconds of small messages; None if none were measured."""
        return 0.0 if ranks == 1 else self.curve(operation, ranks, mode).floor

    def bus_bandwidth(self, operation: str, nbytes: float, ranks: int, mode: str = "eager") -> float:
        """Bytes per second over a rank's link, predicted by the fit, if the algorithm is a ring; 0 for one rank."""
        return 0.0 if ranks == 1 else self.curve(operation, ranks, mode).bus_bandwidth(nbytes)

    def crossover(self, a: str, b: str, ranks: int, mode: str = "eager") -> int | None:
        """The message size from which on operation b takes less time than a; None if it takes longer at the largest size.

        Only sizes that both curves cover are compared. ValueError if there are none.
        """
        ours, theirs = self.curve(a, ranks, mode), self.curve(b, ranks, mode)
        first, last = max(ours.nbytes[0], theirs.nbytes[0]), min(ours.nbytes[-1], theirs.nbytes[-1])
        if first > last:
            raise ValueError(f"{a} and {b} have no common range of measured sizes on {ranks} ranks")
        knots = {size for curve in (ours, theirs) for s in curve.segments for size in (s.first, s.last)}
        sizes = sorted({first, last} | {size for size in knots if first <= size <= last})
        gains = np.array([ours.time(size) - theirs.time(size) for size in sizes])  # straight lines in between
        if gains[-1] <= 0:
            return None
        slower = np.flatnonzero(gains <= 0)
        if not len(slower):
            return first
        i = slower[-1]
        share = gains[i] / (gains[i] - gains[i + 1])
        return math.floor(sizes[i] + share * (sizes[i + 1] - sizes[i])) + 1

    def table(self) -> str:
        """The curves as a Markdown table: segments, errors of the fit, latency floor, bus bandwidth."""
        header = "operation,ranks,mode,points,dropped,segments,error mean,max,floor,peak bus GB/s,of the link".split(
            ","
        )
        rows = [header, ["---"] * len(header), *(_row(curve, self.description) for curve in self.curves)]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _check_message(nbytes: float, ranks: int) -> None:
    """ValueError unless these are a size and a number of ranks."""
    if not 0 <= nbytes < math.inf:
        raise ValueError(f"nbytes={nbytes} must be at least 0 and finite")
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")


def check_writable(path: Path) -> None:
    """ValueError if `path` is a directory, or if its parent directory is missing or not writable."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"{path}: there is no directory {parent}")
    if not os.access(path if path.exists() and not path.is_file() else parent, os.W_OK):
        raise ValueError(f"{path}: no permission to write there")


def _curve_from_json(content: dict) -> Curve:
    """A curve from the dictionary that `asdict` made of it and that was stored as JSON."""
    lists = {name: tuple(content[name]) for name in ("nbytes", "seconds", "high", "errors")}
    dropped = tuple((nbytes, seconds) for nbytes, seconds in content["dropped"])
    segments = tuple(Segment(**segment) for segment in content["segments"])
    return Curve(**{**content, **lists, "dropped": dropped, "segments": segments})


def _latency_and_rest(curve: Curve, nbytes: float) -> tuple[float, float]:
    """(latency of a message, its remaining seconds)."""
    time = curve.time(nbytes)
    latency = min(curve.alpha, time)
    return latency, time - latency


def _growth(curve: Curve, ranks: int) -> tuple[float, float]:
    """(steps, bytes) of a ring on `ranks` ranks, relative to a ring on the curve's ranks; 1 for point-to-point messages."""
    steps = 1.0 if curve.operation.split()[0] == "p2p" else (ranks - 1) / (curve.ranks - 1)
    return steps, wire(curve.operation, ranks) / wire(curve.operation, curve.ranks)


def size_name(nbytes: int) -> str:
    """A size in units of powers of 1024: 1536 -> '1.5 KB'."""
    unit = min(int(math.log2(max(nbytes, 1)) // 10), 3)
    return f"{nbytes / 1024**unit:.4g} {('B', 'KB', 'MB', 'GB')[unit]}"


def _row(curve: Curve, description: dict) -> list[str]:
    """The row of a curve in the table."""
    lines = [f"{s.alpha * 1e6:.1f} us + {s.beta * 1e12:.3g} us/MB to {size_name(s.last)}" for s in curve.segments]
    mean, worst = curve.fit_errors
    floor = "-" if curve.floor is None else f"{curve.floor * 1e6:.1f} us"
    link = description.get("link_bytes_per_s")
    share = f"{curve.peak_bus_bandwidth / link:.0%}" if link else "-"
    dropped = ", ".join(size_name(size) for size, _ in curve.dropped) or "-"
    return [
        curve.operation, str(curve.ranks), curve.mode, str(len(curve.nbytes)), dropped, "; ".join(lines),
        f"{mean:.1%}", f"{worst:.1%}", floor, f"{curve.peak_bus_bandwidth / 1e9:.3g}", share,
    ]  # fmt: skip
