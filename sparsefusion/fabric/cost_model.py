"""The costs of messages on one set of machines: measured curves, predictions from them, and the file that keeps them.

Sizes are bytes, counted per operation as `curve` says; times are seconds. One rank sends nothing, which costs 0 seconds.
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
# Added to an interval's half-width (a logarithm) per doubling of ranks in an extrapolation: from 4 to 6 H100s, NCCL
# changed its algorithm and took 18 % less time than a ring's formula predicts.
EXTRAPOLATION_HALF_WIDTH = 0.25


@dataclass(frozen=True)
class Fabric:
    """Curves, at most one per operation, number of ranks and mode, and where they come from.

    description: free text by key, such as source and host. Its key link_bytes_per_s, which may be missing, is the
    bandwidth of a rank's link in one direction. ValueError: two curves of one operation, number of ranks and mode.
    TypeError: link_bytes_per_s is not a number.
    """

    curves: tuple[Curve, ...]
    description: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys = [(curve.operation, curve.ranks, curve.mode) for curve in self.curves]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise ValueError("two curves of {} on {} ranks, {}".format(*twice[0]))
        link = self.description.get("link_bytes_per_s")
        if not isinstance(link, (int, float, type(None))):
            raise TypeError(f"link_bytes_per_s is {link!r}, no number")

    @staticmethod
    def load(path: str | Path) -> "Fabric":
        """Read a fabric that `save` wrote. ValueError: the file is cut off, is something else, or has another version."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # JSON's and UTF-8's
            raise ValueError(f"{path} is no fabric file, or is cut off: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f'{path} is no fabric file: it lacks "format": "{FORMAT}"')
        if content.get("version") != VERSION:
            version = content.get("version")
            raise ValueError(f"{path} is a fabric file of version {version}; this program reads {VERSION}")
        try:
            return Fabric(tuple(map(_curve_from_json, content["curves"])), dict(content["description"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is a damaged fabric file: {type(error).__name__}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write JSON from which `load` reads an equal fabric.

        The text is written to a new hidden file, which is then renamed, so that `path` never holds a part of it.
        ValueError: the path is a directory, or its directory does not exist or is not writable. OSError: it cannot be
        written for another reason, for instance because the disk is full; then the file is as before.
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
            raise OSError(error.errno, error.strerror, str(path)) from None  # not the hidden one, or none
        finally:
            hidden.unlink(missing_ok=True)

    def curve(self, operation: str, ranks: int, mode: str = "eager") -> Curve:
        """The measured curve. ValueError: it was never measured; the error names what was."""
        curves = self._curves_of(operation, mode)
        for curve in curves:
            if curve.ranks == ranks:
                return curve
        measured = ", ".join(map(str, sorted(curve.ranks for curve in curves)))
        raise ValueError(f"{operation} ({mode}) was never measured on {ranks} ranks, only on {measured}")

    def _curves_of(self, operation: str, mode: str) -> list[Curve]:
        """The curves of an operation in a mode. ValueError: there are none; the error names the operations or modes."""
        named = [curve for curve in self.curves if curve.operation == operation]
        if not named:
            known = ", ".join(sorted({curve.operation for curve in self.curves})) or "none"
            raise ValueError(f"this fabric has no operation {operation!r}; it has {known}")
        found = [curve for curve in named if curve.mode == mode]
        if not found:
            modes = ", ".join(sorted({curve.mode for curve in named}))
            raise ValueError(f"{operation} was never measured in mode {mode!r}, only in {modes}")
        return found

    def time(self, operation: str, nbytes: float, ranks: int, extrapolate: bool = False, mode: str = "eager") -> float:
        """Seconds of one operation, predicted by the fit.

        ValueError: the operation, the mode or, unless `extrapolate` is set, the number of ranks was never measured.
        extrapolate: estimate other numbers of ranks from the nearest measured one. The latency grows with the P - 1 steps of
        a ring; on fewer ranks it stays the same, because the cost of a launch does. The remaining time is proportional
        to the bytes that a ring sends (`wire`).
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
        """(low, high) seconds between which nine in ten measured times should lie; arguments and errors: as `time`.

        An extrapolated interval reaches from the smaller to the larger of two estimates, for the latency and for the rest:
        unchanged, or growing as in a ring. It is about 25 % wider on either side per doubling of ranks.
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
        least = latency * min(1.0, steps) + rest * min(1.0, sent)
        most = latency * max(1.0, steps) + rest * max(1.0, sent)
        return least * low / wider, most * high * wider

    def _nearest(self, operation: str, ranks: int, mode: str, extrapolate: bool) -> Curve:
        """The curve of this number of ranks; with `extrapolate`, the nearest (by ratio; of two, the one of fewer ranks)."""
        if not extrapolate:
            return self.curve(operation, ranks, mode)
        by_ranks = sorted(self._curves_of(operation, mode), key=lambda curve: curve.ranks)
        return min(by_ranks, key=lambda curve: abs(math.log(ranks / curve.ranks)))

    def alpha(self, operation: str, ranks: int, extrapolate: bool = False, mode: str = "eager") -> float:
        """Seconds of an empty message; arguments and errors: as `time`."""
        return self.time(operation, 0, ranks, extrapolate, mode)

    def beta(self, operation: str, ranks: int, extrapolate: bool = False, mode: str = "eager") -> float:
        """Seconds per byte of large messages; arguments and errors: as `time`."""
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
        """The message size from which on operation b takes less time than a; None if it does not at the largest size.

        Only sizes between the smallest and the largest that both curves cover count. ValueError: there are none.
        """
        ours, theirs = self.curve(a, ranks, mode), self.curve(b, ranks, mode)
        first, last = max(ours.nbytes[0], theirs.nbytes[0]), min(ours.nbytes[-1], theirs.nbytes[-1])
        if first > last:
            raise ValueError(f"{a} and {b} were measured at no common size on {ranks} ranks")
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
    if not (isinstance(nbytes, (int, float)) and 0 <= nbytes < math.inf):
        raise ValueError(f"a message of {nbytes!r} bytes")
    if not (isinstance(ranks, int) and ranks >= 1):
        raise ValueError(f"{ranks!r} ranks")


def check_writable(path: Path) -> None:
    """ValueError if no file can be written to this path: it is a directory, or its own is missing or not writable."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"{path}: there is no directory {parent}")
    if not os.access(path if path.exists() and not path.is_file() else parent, os.W_OK):
        raise ValueError(f"{path}: no permission to write there")


def _curve_from_json(content: dict) -> Curve:
    """A curve from the dictionary that `asdict` made of it, and JSON has kept."""
    lists = {name: tuple(content[name]) for name in ("nbytes", "seconds", "high", "errors")}
    dropped = tuple((nbytes, seconds) for nbytes, seconds in content["dropped"])
    segments = tuple(Segment(**segment) for segment in content["segments"])
    return Curve(**{**content, **lists, "dropped": dropped, "segments": segments})


def _latency_and_rest(curve: Curve, nbytes: float) -> tuple[float, float]:
    """The seconds of a message as a sum: its latency, and the rest."""
    time = curve.time(nbytes)
    latency = min(curve.alpha, time)
    return latency, time - latency


def _growth(curve: Curve, ranks: int) -> tuple[float, float]:
    """The ratios of a ring's steps, and of the bytes that it sends, on `ranks` ranks to those on the curve's.

    A point-to-point message depends on neither.
    """
    steps = 1.0 if curve.operation.split()[0] == "p2p" else (ranks - 1) / (curve.ranks - 1)
    return steps, wire(curve.operation, ranks) / wire(curve.operation, curve.ranks)


def size_name(nbytes: int) -> str:
    """A size in powers of 1024: 1536 -> '1.5 KB'."""
    unit = min(int(math.log2(max(nbytes, 1)) // 10), 3)
    return f"{nbytes / 1024**unit:.4g} {('B', 'KB', 'MB', 'GB')[unit]}"


def _row(curve: Curve, description: dict) -> list[str]:
    """A curve's line in the table."""
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
