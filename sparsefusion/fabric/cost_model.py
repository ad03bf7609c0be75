"""What messages cost on one set of machines: measured curves, predictions from them, and the file that keeps them.

Sizes are bytes (their meaning per operation: `curve`), times are seconds. One rank sends nothing: it costs 0.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from .curve import Curve, wire
from .fitting import Segment

FORMAT, VERSION = "sparsefusion fabric", 1
# More half-width (a logarithm) per doubling of ranks never measured: from 4 to 6 H100s the library changed its
# algorithm, and took 18 % less than the ring predicts.
EXTRAPOLATED = 0.25


@dataclass(frozen=True)
class Fabric:
    """Curves, at most one per operation, ranks and mode; description: source, hosts, ..., link_bytes_per_s if known."""

    curves: tuple[Curve, ...]
    description: dict = field(default_factory=dict)

    def __post_init__(self):
        keys = [(curve.operation, curve.ranks, curve.mode) for curve in self.curves]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise ValueError("two curves of {} on {} ranks, {}".format(*twice[0]))
        link = self.description.get("link_bytes_per_s")
        if not isinstance(link, (int, float, type(None))):
            raise TypeError(f"link_bytes_per_s is {link!r}, no number")

    @staticmethod
    def load(path) -> "Fabric":
        """The fabric that `save` wrote. ValueError: a file that is cut off, something else, or of another version."""
        try:
            made = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # JSON's and UTF-8's
            raise ValueError(f"{path} is no fabric file, or is cut off: {error}") from None
        if not isinstance(made, dict) or made.get("format") != FORMAT:
            raise ValueError(f'{path} is no fabric file: it lacks "format": "{FORMAT}"')
        if made.get("version") != VERSION:
            raise ValueError(f"{path} is a fabric file of version {made.get('version')}; this program reads {VERSION}")
        try:
            return Fabric(tuple(map(_curve_of, made["curves"])), dict(made["description"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is a damaged fabric file: {type(error).__name__}: {error}") from None

    def save(self, path) -> None:
        """Write JSON that `load` reads back exactly; under a hidden name first, then renamed.

        ValueError: the path is a directory, or in none.
        """
        path = Path(path)
        check_writable(path)
        made = {"format": FORMAT, "version": VERSION, "description": self.description}
        made["curves"] = [asdict(curve) for curve in self.curves]
        text = json.dumps(made, indent=1, allow_nan=False) + "\n"
        if path.exists() and not path.is_file():  # /dev/stdout: what is renamed onto it would take its place
            path.write_text(text, encoding="utf-8")
            return
        hidden = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            hidden.write_text(text, encoding="utf-8")
            hidden.replace(path)
        finally:
            hidden.unlink(missing_ok=True)

    def curve(self, operation: str, ranks: int, mode: str = "eager") -> Curve:
        """The measured curve. ValueError: never measured; it names what was."""
        for curve in self._measured(operation, mode):
            if curve.ranks == ranks:
                return curve
        counts = sorted(curve.ranks for curve in self._measured(operation, mode))
        measured = ", ".join(map(str, counts))
        raise ValueError(f"{operation} ({mode}) was never measured on {ranks} ranks, only on {measured}")

    def _measured(self, operation, mode) -> list[Curve]:
        """The curves of an operation in a mode, or a ValueError that names the operations or modes there are."""
        named = [curve for curve in self.curves if curve.operation == operation]
        if not named:
            known = ", ".join(sorted({curve.operation for curve in self.curves})) or "none"
            raise ValueError(f"this fabric has no operation {operation!r}; it has {known}")
        found = [curve for curve in named if curve.mode == mode]
        if not found:
            modes = ", ".join(sorted({curve.mode for curve in named}))
            raise ValueError(f"{operation} was never measured in mode {mode!r}, only in {modes}")
        return found

    def time(self, operation, nbytes, ranks, extrapolate=False, mode="eager") -> float:
        """Seconds of one operation, from the fit.

        ValueError: an operation, mode or number of ranks never measured. extrapolate=True estimates the last from the
        nearest measured number: latency grows with the P - 1 steps of a ring but does not shrink (on fewer ranks a
        launch costs the same), the rest goes with the bytes a ring sends (`wire`).
        """
        _check_message(nbytes, ranks)
        if ranks == 1:
            return 0.0
        curve = self._nearest(operation, ranks, mode, extrapolate)
        steps, sent = _ratios(curve, ranks)
        latency, rest = _parts(curve, nbytes)
        return latency * max(1.0, steps) + rest * sent

    def interval(self, operation, nbytes, ranks, extrapolate=False, mode="eager") -> tuple[float, float]:
        """(low, high) seconds between which nine in ten measured times should lie.

        Extrapolated: from everything unchanged to everything as a ring's, and 25 % more per doubling of ranks.
        """
        _check_message(nbytes, ranks)
        if ranks == 1:
            return 0.0, 0.0
        curve = self._nearest(operation, ranks, mode, extrapolate)
        if curve.ranks == ranks:
            return curve.interval(nbytes)
        steps, sent = _ratios(curve, ranks)
        latency, rest = _parts(curve, nbytes)
        low, high = (bound / curve.time(nbytes) for bound in curve.interval(nbytes))
        wider = math.exp(EXTRAPOLATED * abs(math.log2(ranks / curve.ranks)))
        least = latency * min(1.0, steps) + rest * min(1.0, sent)
        most = latency * max(1.0, steps) + rest * max(1.0, sent)
        return least * low / wider, most * high * wider

    def _nearest(self, operation, ranks, mode, extrapolate) -> Curve:
        """The curve of this number of ranks; if extrapolate, else of the nearest one (fewer on a tie)."""
        if not extrapolate:
            return self.curve(operation, ranks, mode)
        by_ranks = sorted(self._measured(operation, mode), key=lambda curve: curve.ranks)
        return min(by_ranks, key=lambda curve: abs(math.log(ranks / curve.ranks)))

    def alpha(self, operation, ranks, extrapolate=False, mode="eager") -> float:
        """Seconds of an empty message."""
        return self.time(operation, 0, ranks, extrapolate, mode)

    def beta(self, operation, ranks, extrapolate=False, mode="eager") -> float:
        """Seconds per byte of large messages."""
        if ranks == 1:
            return 0.0
        curve = self._nearest(operation, ranks, mode, extrapolate)
        return curve.beta * _ratios(curve, ranks)[1]

    def floor(self, operation, ranks, mode="eager") -> float | None:
        """Median seconds of small messages, as measured; None if only large ones were."""
        return 0.0 if ranks == 1 else self.curve(operation, ranks, mode).floor

    def bus_bandwidth(self, operation, nbytes, ranks, mode="eager") -> float:
        """Bytes per second over a rank's link, by the fit, if the algorithm is a ring; 0 for one rank."""
        return 0.0 if ranks == 1 else self.curve(operation, ranks, mode).bus_bandwidth(nbytes)

    def crossover(self, a: str, b: str, ranks: int, mode: str = "eager") -> int | None:
        """The message size from which operation b is cheaper than a, or None if it is not at the largest size.

        Looked for among the sizes at which both were measured; ValueError if there are none.
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
        dear = np.flatnonzero(gains <= 0)
        if not len(dear):
            return first
        i = dear[-1]
        share = gains[i] / (gains[i] - gains[i + 1])
        return math.floor(sizes[i] + share * (sizes[i + 1] - sizes[i])) + 1

    def table(self) -> str:
        """The curves as a Markdown table: segments, errors of the fit, floor, bus bandwidth."""
        header = "operation,ranks,mode,points,dropped,segments,error mean,max,floor,peak bus GB/s,of the link".split(
            ","
        )
        rows = [header, ["---"] * len(header), *(_row(curve, self.description) for curve in self.curves)]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _check_message(nbytes, ranks) -> None:
    """ValueError unless these are a size and a number of ranks."""
    if not (isinstance(nbytes, (int, float)) and 0 <= nbytes < math.inf):
        raise ValueError(f"a message of {nbytes!r} bytes")
    if not (isinstance(ranks, int) and ranks >= 1):
        raise ValueError(f"{ranks!r} ranks")


def check_writable(path: Path) -> None:
    """ValueError if no file can be written there, because it is a directory or in none."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no directory {path.absolute().parent}")


def _curve_of(made: dict) -> Curve:
    """A curve from the dictionary that `asdict` made of it."""
    lists = {name: tuple(made[name]) for name in ("nbytes", "seconds", "high", "errors")}
    dropped = tuple((nbytes, seconds) for nbytes, seconds in made["dropped"])
    segments = tuple(Segment(**segment) for segment in made["segments"])
    return Curve(**{**made, **lists, "dropped": dropped, "segments": segments})


def _parts(curve, nbytes) -> tuple[float, float]:
    """(latency, the rest) of a message's seconds."""
    time = curve.time(nbytes)
    latency = min(curve.alpha, time)
    return latency, time - latency


def _ratios(curve, ranks) -> tuple[float, float]:
    """How a ring's steps, and the bytes it sends, grow from the curve's ranks to `ranks`; a message stays the same."""
    steps = 1.0 if curve.operation.split()[0] == "p2p" else (ranks - 1) / (curve.ranks - 1)
    return steps, wire(curve.operation, ranks) / wire(curve.operation, curve.ranks)


def size_name(nbytes: int) -> str:
    """1536 -> '1.5 KB' (of 1024 bytes)."""
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
