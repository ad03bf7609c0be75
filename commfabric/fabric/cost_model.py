"""The costs of messages on one set of machines: measured curves, predictions from them, and their file.

Sizes are bytes, counted per operation as in `curve`; times are seconds. One rank sends nothing, in 0 seconds.
"""

import json
import math
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from commfabric.foundation.json_files import read_json

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
        if repeated := [key for key in keys if keys.count(key) > 1]:
            raise ValueError("two curves of {} on {} ranks ({}): expected one".format(*repeated[0]))

    @staticmethod
    def load(path: str | Path) -> "Fabric":
        """Read a fabric that `save` wrote. ValueError if the file is damaged, is no fabric, or has another version."""
        try:
            content = read_json(path)
            if (content["format"], content["version"]) != (FORMAT, VERSION):
                raise ValueError(f"it has the format {content['format']!r}, version {content['version']!r}")
            description = dict(content["description"])
            float(description.get("link_bytes_per_s", 0))
            return Fabric(tuple(map(_curve_from_json, content["curves"])), description)
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} is no fabric file of version {VERSION}, or is damaged ({reason})") from None

    def save(self, path: str | Path) -> None:
        """Write JSON from which `load` reads an equal fabric.

        The text is written to a new hidden file, which is then renamed, so that the file at `path` is never incomplete.
        OSError, which names `path`, if that fails; a file that was there is unchanged.
        """
        path = Path(path)
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

    def curve(self, operation: str, ranks: int, mode: str = "eager", extrapolate: bool = False) -> Curve:
        """The measured curve or, with `extrapolate`, that of the nearest number of ranks by ratio (of two, the smaller).

        ValueError if there is none; the error names the curves that were measured.
        """
        curves = sorted(
            (curve for curve in self.curves if (curve.operation, curve.mode) == (operation, mode)),
            key=lambda curve: curve.ranks,
        )
        if not curves or not (extrapolate or any(curve.ranks == ranks for curve in curves)):
            known = curves or self.curves
            measured = ", ".join(sorted(f"{curve.operation} ({curve.mode}) on {curve.ranks}" for curve in known))
            raise ValueError(
                f"{operation} ({mode}) was never measured on {ranks} ranks; this fabric has {measured or 'no curves'}"
            )
        return min(curves, key=lambda curve: abs(math.log(ranks / curve.ranks)))

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
        curve = self.curve(operation, ranks, mode, extrapolate)
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
        curve = self.curve(operation, ranks, mode, extrapolate)
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

    def alpha(self, operation: str, ranks: int, extrapolate: bool = False, mode: str = "eager") -> float:
        """Seconds of an empty message; arguments and errors are those of `time`."""
        return self.time(operation, 0, ranks, extrapolate, mode)

    def beta(self, operation: str, ranks: int, extrapolate: bool = False, mode: str = "eager") -> float:
        """Seconds per byte of large messages; arguments and errors are those of `time`."""
        if ranks == 1:
            return 0.0
        curve = self.curve(operation, ranks, mode, extrapolate)
        return curve.beta * _growth(curve, ranks)[1]

    def table(self) -> str:
        """The curves as a Markdown table: segments, errors of the fit, latency floor, bus bandwidth."""
        header = "operation,ranks,mode,points,dropped,segments,error mean,max,floor,peak bus GB/s,of the link".split(
            ","
        )
        rows = [header, ["---"] * len(header), *(_row(curve, self.description) for curve in self.curves)]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _check_message(nbytes: float, ranks: int) -> None:
    if not 0 <= nbytes < math.inf or ranks < 1:
        raise ValueError(f"nbytes={nbytes}, ranks={ranks}: expected a finite nbytes >= 0 and ranks >= 1")


def check_writable(path: Path) -> None:
    """ValueError unless `Fabric.save` can write to `path`."""
    place = path if path.exists() and not path.is_file() else path.absolute().parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(f"cannot write {path}: it is a directory, or its directory is missing or not writable")


def _curve_from_json(content: dict) -> Curve:
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
    unit = min(int(math.log2(max(nbytes, 1)) // 10), 3)
    return f"{nbytes / 1024**unit:.4g} {('B', 'KB', 'MB', 'GB')[unit]}"


def _row(curve: Curve, description: dict) -> list[str]:
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
