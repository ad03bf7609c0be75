"""Reads measurements of other programs: the output of nccl-tests, CSV made from it, and JSON of all-reduce latencies.

Sizes are in the convention of `Fabric`: an all-gather is counted by one rank's input, whereas nccl-tests counts the whole
output. A file that is cut off or has another format raises a ValueError that names the file and the line.
"""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .curve import Curve, wire

COLUMNS = "size count type redop root time algbw busbw #wrong".split()  # columns of nccl-tests' files without a header
OPERATIONS = {"alltoall": "all_to_all", "sendrecv": "p2p"}  # names of nccl-tests that differ from ours
RATE_ROUNDING = 0.01  # the largest rounding error of a rate, in GB/s and as a ratio
PRECISE_RATE = 1.0  # rates of at least this many GB/s are precise to one percent


@dataclass
class Section:
    """One run in a file.

    Attributes:
        operation, ranks: The operation and the number of ranks, or None if the file does not state them.
        mode: "eager" or "graph".
        variant: The algorithm or protocol that the title names.
        bus: The ratio of bus bandwidth to algorithm bandwidth. It depends only on the operation and the number of ranks, so
            it is used to check both. None if no rate is precise enough.
        points: Pairs (nbytes, seconds).
        dropped: Points that the file itself marks as unreliable.
    """

    operation: str | None = None
    ranks: int | None = None
    mode: str = "eager"
    variant: str = ""
    bus: float | None = None
    points: list[tuple[int, float]] = field(default_factory=list)
    dropped: list[tuple[int, float]] = field(default_factory=list)


def read_curves(path: str | Path, operation: str, ranks: int | None = None, text: str | None = None) -> list[Curve]:
    """Read one file of any known format; returns a curve for each number of ranks, mode and variant.

    A variant is appended to the operation: "all_reduce Ring". Rows of empty messages, with which nccl-tests begins some
    sweeps, are skipped.

    Args:
        path: The file or, with `text`, the name of its source for errors.
        operation: The operation that was measured.
        ranks: The number of ranks. None if the file states it.
        text: The contents; None to read them from the file.

    Raises:
        ValueError: The file is damaged, or contradicts `operation` or `ranks`.
    """
    curves: dict[tuple[str, int, str], tuple[list[tuple[int, float]], list[tuple[int, float]]]] = {}
    for section in read_sections(path, text):
        num_ranks = _ranks_of(section, path, operation, ranks)
        size_divisor = num_ranks if operation == "all_gather" else 1
        expected = wire(operation, num_ranks) / size_divisor
        if section.bus is not None and abs(section.bus / expected - 1) > 2 * RATE_ROUNDING:
            raise ValueError(
                f"{path}: busbw / algbw is {section.bus:.3f}, but for {operation} on {num_ranks} ranks it must be "
                f"{expected:.3f}: wrong operation or number of ranks?"
            )
        key = (f"{operation} {section.variant}".strip(), num_ranks, section.mode)
        points, dropped = curves.setdefault(key, ([], []))
        points += [(size // size_divisor, seconds) for size, seconds in section.points if size >= size_divisor]
        dropped += section.dropped
    return [
        Curve.fit(name, num_ranks, points, mode, dropped)
        for (name, num_ranks, mode), (points, dropped) in curves.items()
    ]


def _ranks_of(section: Section, path: str | Path, operation: str, ranks: int | None) -> int:
    """The number of ranks of a section. ValueError if the file contradicts the arguments of `read_curves`."""
    if section.operation not in (None, operation):
        raise ValueError(f"{path} holds {section.operation}, not {operation}")
    num_ranks = section.ranks or ranks
    if num_ranks is None:
        raise ValueError(f"{path} does not say on how many ranks it was measured: add --ranks N")
    if num_ranks < 2 or num_ranks != (ranks or num_ranks):
        raise ValueError(f"{path} was measured on {num_ranks} ranks: expected {ranks or '2 or more'}")
    return num_ranks


def extend_by_sweeps(curves: Iterable[Curve], sweeps: Sequence[Curve]) -> list[Curve]:
    """Extend each curve by the larger sizes of the sweep with the same operation and ranks. Returns the extended curves, and
    the sweeps whose (operation, ranks, mode) no curve has.

    Latency files measure small messages, with and without CUDA graphs, up to a size at which both take the same time.
    Sweeps measure eager calls of larger messages, whose times the cost of a launch does not affect.
    """
    curves = list(curves)
    extended_curves = []
    for curve in curves:
        larger = [
            point
            for sweep in sweeps
            if (sweep.operation, sweep.ranks) == (curve.operation, curve.ranks)
            for point in _points(sweep)
            if point[0] > curve.nbytes[-1]
        ]
        extended_curves.append(
            Curve.fit(curve.operation, curve.ranks, _points(curve) + larger, curve.mode, curve.dropped)
        )
    keys = {(curve.operation, curve.ranks, curve.mode) for curve in curves}
    return extended_curves + [sweep for sweep in sweeps if (sweep.operation, sweep.ranks, sweep.mode) not in keys]


def _points(curve: Curve) -> list[tuple[int, float]]:
    return list(zip(curve.nbytes, curve.seconds, strict=True))


def read_sections(path: str | Path, text: str | None = None) -> list[Section]:
    """The runs in one file, with sizes as the file counts them. The beginning of the file determines its format.

    path, text: See `read_curves`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig") if text is None else text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text ({error})") from None
    if text.lstrip().startswith("{"):
        return read_latency(path, text)
    if text.startswith("size_bytes,"):
        return [_csv_section(path, text)]
    return read_nccl_tests(path, text)


# JSON of latencies


def read_latency(path: str | Path, text: str) -> list[Section]:
    """Two sections: the mean times of eager all-reduces, and of all-reduces replayed in a CUDA graph.

    The file is {"world_size": ranks, "size_sweep": rows}. A row has `bytes`, `eager_us`, `graph_us`, and may have the
    standard deviations `eager_std_us` and `graph_std_us`. A point whose standard deviation exceeds its mean is dropped,
    because one slow call dominates it.
    """
    sections = []
    try:
        content = json.loads(text)
        for mode in ("eager", "graph"):
            section = Section("all_reduce", int(content["world_size"]), mode)
            for row in content["size_sweep"]:
                mean, deviation = float(row[f"{mode}_us"]), float(row.get(f"{mode}_std_us", 0))
                good = math.isfinite(mean) and deviation <= mean
                (section.points if good else section.dropped).append((int(row["bytes"]), mean * 1e-6))
            sections.append(section)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:  # OverflowError: int(infinity)
        raise ValueError(f"{path}: not a latency file, or cut off: {type(error).__name__}: {error}") from None
    return sections


# CSV


def _csv_section(path: str | Path, text: str) -> Section:
    section = Section()
    rows = csv.DictReader(text.splitlines())
    for row in rows:
        columns = [row.get(name) for name in ("size_bytes", "time_us", "algbw_GBs", "busbw_GBs")]
        _add_point(section, path, rows.line_num, *columns)
    return section


def _add_point(
    section: Section,
    path: str | Path,
    number: int,
    size: str | None,
    time_us: str | None,
    gb_per_s: str | None,
    bus_gb_per_s: str | None,
) -> None:
    """Add the point of line `number`; a missing column is None. Its rates reveal a cut-off time and a wrong operation."""
    words = size, time_us, gb_per_s, bus_gb_per_s
    try:
        nbytes, microseconds, rate, bus = int(size or ""), *(float(word or "") for word in words[1:])
    except ValueError:
        raise ValueError(f"{path}:{number}: expected size, time and two rates, got {words}; cut off?") from None
    is_time = 0 < microseconds < math.inf
    if not is_time or not abs(nbytes / microseconds / 1e3 - rate) <= RATE_ROUNDING * (1 + rate):  # `not`: includes NaN
        raise ValueError(f"{path}:{number}: {nbytes} bytes in {microseconds:g} us are not {rate:g} GB/s")
    section.points.append((nbytes, microseconds * 1e-6))
    if rate >= PRECISE_RATE:
        section.bus = bus / rate


# nccl-tests' text


def read_nccl_tests(path: str | Path, text: str) -> list[Section]:
    """The out-of-place columns of nccl-tests' output.

    A file may contain several runs, with titles such as "### ALGO=Ring" and "### GPUS=4". Output of NCCL_DEBUG, between
    lines and inside lines, is removed first.
    """
    lines = list(_without_debug(text))
    sections = [section for run in _runs(lines) if (section := _section(path, run)).points]
    if not sections:
        raise ValueError(f"{path}:{lines[-1][0] if lines else 1}: no row of nccl-tests, CSV or latency JSON up to here")
    return sections


def _runs(lines: Iterable[tuple[int, str]]) -> list[list[tuple[int, str]]]:
    """The pairs (number, line) of each run. A run begins with a title, or with nccl-tests' first line after rows."""
    runs: list[list[tuple[int, str]]] = [[]]
    for number, line in lines:
        is_first_line = "nccl-tests version" in line and any(_is_row(before) for _, before in runs[-1])
        if is_first_line or line.startswith("###"):
            runs.append([])
        runs[-1].append((number, line))
    return runs


def has_rows(text: str) -> bool:
    return any(_is_row(line) for line in text.splitlines())


def _is_row(line: str) -> bool:
    return re.match(r"\s+\d+(\s|$)", line) is not None


def _section(path: str | Path, lines: Iterable[tuple[int, str]]) -> Section:
    """Read one run. A header names the columns; a run with a header must end with its average bandwidth."""
    section, columns, number, is_complete = Section(), COLUMNS, 0, True
    for number, line in lines:
        if _is_row(line):
            _add_point(section, path, number, *_row(path, number, line.split(), columns))
        elif line.startswith("#") and {"size", "time", "algbw", "busbw"} <= set(line.split()):
            columns, is_complete = line.split()[1:], False
        elif line.startswith("#"):
            _read_comment(line, section)
            is_complete = is_complete or "Avg bus bandwidth" in line
    if not is_complete:
        raise ValueError(f'{path}:{number}: ends before its "# Avg bus bandwidth"; cut off?')
    return section


def _row(path: str | Path, number: int, words: list[str], columns: list[str]) -> tuple[str, str, str, str]:
    """(size, time, algorithm bandwidth, bus bandwidth) of a row, from the first, out-of-place columns of these names."""
    if len(words) <= columns.index("busbw"):
        raise ValueError(f"{path}:{number}: only {len(words)} columns; cut off?")
    wrong = words[columns.index("#wrong")] if "#wrong" in columns[: len(words)] else "0"
    if wrong not in ("0", "N/A"):
        raise ValueError(f"{path}:{number}: {wrong} wrong results, so the times are invalid")
    size, time, rate, bus = (words[columns.index(name)] for name in ("size", "time", "algbw", "busbw"))
    return size, time, rate, bus


def _without_debug(text: str) -> Iterator[tuple[int, str]]:
    """Remove the output of NCCL_DEBUG; yields (number, line), where lines that it broke in two are joined again.

    A line of that output begins with the name of the host, which may follow a number without a space. So the names are
    collected first, from lines that contain nothing else.
    """
    hosts = sorted(set(re.findall(r"^(\S+?):\d+:\d+ \[\d+\] .*NCCL ", text, re.MULTILINE)))
    names = "|".join(map(re.escape, hosts)) or "(?!)"
    debug = re.compile(rf"(?:{names}):\d+:\d+ \[\d+\] .*")
    pending, start = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        start = start if pending else number
        rest = debug.sub("", line)
        pending += rest
        if rest == line:
            yield start, pending
            pending = ""
    if pending:
        yield start, pending


def _read_comment(line: str, section: Section) -> None:
    """Set the section's operation, mode, ranks or variant from a title or from nccl-tests' comments."""
    if line.startswith("###"):
        named = dict(re.findall(r"(\w+)=(\S+)", line))
        section.variant = " ".join(named[key] for key in ("ALGO", "PROTO") if key in named)
        section.ranks = int(named["GPUS"]) if "GPUS" in named else None
    elif started := re.search(r"Collective test starting: (\w+)_perf", line):
        section.operation = OPERATIONS.get(started[1], started[1])
    elif graph := re.search(r"\bgraph: (\d+)", line):
        section.mode = "graph" if int(graph[1]) else "eager"
    elif rank := re.match(r"#\s+Rank\s+(\d+)\s.* device ", line):
        section.ranks = max(section.ranks or 0, int(rank[1]) + 1)
